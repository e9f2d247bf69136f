"""One process at a time uses a run folder: real processes, and SIGKILL."""

from __future__ import annotations

from pathlib import Path

import pytest

from cleave.files import LOCK
from cleave.training.loop.run_folder import RunFolder
from cleave.training.results.export import export_run
from tests.integration.processes import here

TRAIN = (
    "train", "--model", "opt-nano", "--devices", "0", "--batch", "1", "--seq", "8", "--json",
    "--checkpoint-every", "1", "--name", "run",
)  # fmt: skip


def test_what_a_killed_export_left_is_removed(tmp_path: Path, corpus_file: Path) -> None:
    made = here(*TRAIN, "--data", str(corpus_file), "--steps", "1", cwd=tmp_path)
    assert not made.returncode, made.stderr
    left = tmp_path / ".out.export"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half of it")
    done = export_run(RunFolder(tmp_path / "runs" / "run"), tmp_path / "out")
    assert not left.exists()
    assert not [path for path in done.folder.iterdir() if path.name == LOCK]
    with pytest.raises(Exception, match="already exists"):
        export_run(RunFolder(tmp_path / "runs" / "run"), tmp_path / "out")
