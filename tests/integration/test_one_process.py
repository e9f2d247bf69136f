"""One process at a time uses a run folder: real processes, and SIGKILL."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from cleave.files import LOCK
from cleave.training.loop.run_folder import RunFolder
from cleave.training.results.export import export_run
from tests.integration.processes import PATIENCE_S, here, started, wait_for_event

TRAIN = (
    "train", "--model", "opt-nano", "--devices", "0", "--batch", "1", "--seq", "8", "--json",
    "--checkpoint-every", "1", "--name", "run",
)  # fmt: skip


@pytest.mark.nightly
def test_a_second_process_is_refused_until_the_first_has_ended(
    tmp_path: Path, corpus_file: Path
) -> None:
    folder = tmp_path / "runs" / "run"
    endless = (*TRAIN, "--data", str(corpus_file), "--steps", "1000000")
    with started(*endless, cwd=tmp_path) as (process, lines):
        for _ in range(3):
            wait_for_event(lines, "step")
        resumed = here("train", "--resume", str(folder), "--devices", "0")
        exported = here("export", str(folder))
        for said in (resumed, exported):
            assert said.returncode
            assert f"process {process.pid} uses the run folder" in said.stderr
            assert "Traceback" not in said.stderr
        assert not (folder / "export").exists()
        inside = here("export", str(folder), "--while-training")
        assert "give a folder outside" in inside.stderr
        for number in range(3):  # while checkpoints are written and removed
            into = tmp_path / f"export-{number}"
            step = export_run(RunFolder(folder), into, while_training=True).step
            assert step >= 2
            assert (into / "model.safetensors").is_file()
        process.send_signal(signal.SIGKILL)
        process.wait(PATIENCE_S)
    last = max(int(path.name[5:]) for path in (folder / "checkpoints").glob("step-??????"))
    again = here(
        "train", "--resume", str(folder), "--devices", "0", "--steps", str(last + 1), "--json"
    )
    assert not again.returncode, again.stderr
    done = [json.loads(line) for line in again.stdout.splitlines()][-1]
    assert (done["event"], done["steps"]) == ("done", last + 1)
    assert not here("export", str(folder)).returncode


def test_what_a_killed_export_left_is_removed(tmp_path: Path, corpus_file: Path) -> None:
    made = here(*TRAIN, "--data", str(corpus_file), "--steps", "1", cwd=tmp_path)
    assert not made.returncode, made.stderr
    left = tmp_path / ".out.export"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half of it")
    done = export_run(RunFolder(tmp_path / "runs" / "run"), tmp_path / "out")
    assert not left.exists()
    assert not [path for path in done.folder.iterdir() if path.name == LOCK]
    with pytest.raises(Exception, match="exists already"):
        export_run(RunFolder(tmp_path / "runs" / "run"), tmp_path / "out")
