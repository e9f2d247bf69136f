"""Servers and runs that are stopped, whatever they wait for: nothing that was done is lost."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from cleave.training.loop.run_folder import CHECKPOINTS
from tests.integration.processes import (
    PATIENCE_S,
    started,
    training,
    wait_for_event,
)


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
