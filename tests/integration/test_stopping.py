"""Servers and runs that are stopped, whatever they wait for: nothing that was done is lost."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from cleave.training.loop.run_folder import CHECKPOINTS
from tests.disks import small_disk
from tests.integration.processes import (
    JOIN,
    PATIENCE_S,
    here,
    started,
    training,
    wait_for_event,
)


@pytest.mark.nightly  # tests/training/test_disk.py tests the waiting
def test_a_full_disk_makes_the_job_wait_and_say_so(
    corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To whoever follows it, in `cleave status` and in the server's log."""
    monkeypatch.setenv("CLEAVE_CREDENTIAL", "for devices")
    with small_disk(tmp_path) as disk, ExitStack() as stack:
        serve = ("serve", "--port", "0", "--data", str(tmp_path / "data"), "--json")
        _, lines = stack.enter_context(started(*serve, "--runs", str(disk.path)))
        listening = wait_for_event(lines, "listening")
        operator = ("--server", listening["operator_url"])
        stack.enter_context(started("join", listening["url"], *JOIN))
        disk.fill(300_000)  # for records, and for no checkpoint
        submit = (
            *training(corpus_file, 3, "opt-nano"), "--checkpoint-every", "2", "--name", "run"
        )  # fmt: skip
        client, steps = stack.enter_context(started(*submit, *operator))
        full = wait_for_event(steps, "disk")
        assert (full["state"], full["step"]) == ("full", 2)
        shown = here("status", *operator)
        assert "waits  the disk is full" in shown.stdout
        disk.free()
        assert wait_for_event(steps, "disk")["state"] == "free"
        assert wait_for_event(steps, "done")["steps"] == 3
        assert client.wait(PATIENCE_S) == 0
        assert "waits  the" not in here("status", *operator).stdout
        notes: list[str] = []
        while not notes or "the disk has space again" not in notes[-1]:
            notes.append(wait_for_event(lines, "note")["text"])
        assert any("job-1: the disk is full" in note for note in notes)
        found = [path.name for path in (disk.path / "run" / CHECKPOINTS).iterdir()]
        assert sorted(found) == ["step-000002", "step-000003"]


@pytest.mark.nightly  # tests/training/test_stopping.py stops runs without a signal
def test_a_run_in_this_process_is_stopped_by_sigterm(corpus_file: Path, tmp_path: Path) -> None:
    command = (
        *training(corpus_file, 100_000, "opt-nano"), "--checkpoint-every", "1000",
        "--devices", "2", "--name", "run",
    )  # fmt: skip
    with started(*command, cwd=tmp_path) as (process, lines):
        wait_for_event(lines, "step")
        process.send_signal(signal.SIGTERM)
        done = wait_for_event(lines, "done")
        assert process.wait(PATIENCE_S) == 0
    assert done["stopped"]
    found = [path.name for path in (tmp_path / "runs" / "run" / CHECKPOINTS).iterdir()]
    assert found == [f"step-{done['steps']:06d}"]
