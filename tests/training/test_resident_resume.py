"""A killed server goes on after the last step, although devices had the state and lost it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from cleave.training.loop import resident_files, trainer
from cleave.training.loop.context import TrainContext
from cleave.training.loop.job import JobSpec
from cleave.training.loop.records import Record, StepRecord
from cleave.training.loop.run_folder import (
    CHECKPOINTS,
    LAYERS,
    LOG,
    RESIDENT,
    RunFolder,
    held_steps,
    resumable_step,
)
from cleave.training.loop.trainer import train
from cleave.training.stages.resident import ResidentState
from cleave.training.stages.stage_plans import StagePlans
from cleave.training.stages.step_log import LogFolder
from emulator.virtual import emulated
from tests.training.runs import losses, nightly

STEPS = 9


class KilledError(Exception):
    """Ends a run, as SIGKILL would. Afterwards nothing is written."""


def job_of(corpus_file: Path, **more: Any) -> JobSpec:
    settings: dict[str, Any] = {
        "model": "opt-nano", "data": str(corpus_file), "steps": STEPS, "batch": 2, "seq": 8,
        "method": "stages", "state": "devices", "eval_every": 4, "eval_batches": 1,
        "checkpoint_every": 6, "warmup_steps": 2, **more,
    }  # fmt: skip
    return JobSpec(**settings)


class Killer:
    """Calls functions until the run is killed.

    Args:
        at: number of the call in which the run is killed.
        after: whether the function is called before that.
    """

    def __init__(self, at: int, *, after: bool) -> None:
        self._at, self._after = at, after
        self.calls = 0

    def wrapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            self.calls += 1
            if self.calls < self._at or (self.calls == self._at and self._after):
                found = function(*args, **named)
                if self.calls < self._at:
                    return found
            raise KilledError

        return call


def run(job: JobSpec, folder: RunFolder, devices: int = 2) -> list[Record]:
    """Train, or resume, on a fleet of new devices."""
    seen: list[Record] = []
    resume = folder.config_path.exists()
    with (
        emulated(devices, seed=devices) as fleet,
        mock.patch.object(StagePlans, "snapshot_interval", return_value=2),
    ):
        train(job, folder, TrainContext(fleet, seen.append), resume=resume, restart=True)
    return seen


def recorded(folder: RunFolder, event: str) -> list[int]:
    return [record["step"] for record in folder.records() if record.get("event") == event]


FUNCTIONS = {
    "the log": (LogFolder, "write"),
    "the update": (ResidentState, "add"),
    "a record": (RunFolder, "append"),
    "a snapshot": (resident_files, "save_checkpoint"),
    "a checkpoint": (trainer, "save_checkpoint"),
    "removing": (resident_files, "remove_checkpoints"),
    "an evaluation": (trainer.Trainer, "evaluate"),
}


@pytest.mark.parametrize(
    ("function", "at", "after"),
    [
        ("the log", 3, False),
        ("the log", 5, True),
        ("the update", 8, False),
        ("a record", 6, False),
        ("a snapshot", 4, True),
        ("a snapshot", 5, False),
        ("a checkpoint", 1, False),
        ("removing", 3, True),
        ("an evaluation", 1, True),
        *(
            nightly(function, at, after)
            for function in FUNCTIONS
            for at in (1, 2, 7, 8)
            for after in (False, True)
        ),
    ],
)
def test_no_step_is_lost_or_repeated(
    tmp_path: Path, corpus_file: Path, function: str, at: int, after: bool
) -> None:
    job, folder = job_of(corpus_file), RunFolder(tmp_path)
    plain = losses(replace(job, method="local", state="server"), RunFolder(tmp_path / "plain"))
    where, name = FUNCTIONS[function]
    killer = Killer(at, after=after)
    killing = mock.patch.object(where, name, killer.wrapped(getattr(where, name)))
    with killing, contextlib.suppress(KilledError):
        run(job, folder)
    before = recorded(folder, "step")
    reached = resumable_step(folder.path)
    seen = [] if any("steps" in each for each in folder.records()) else run(job, folder)
    assert max(held_steps(folder.path / CHECKPOINTS)) == STEPS
    again = [record.step for record in seen if isinstance(record, StepRecord)]
    assert recorded(folder, "step") == [*range(1, STEPS + 1)]
    assert recorded(folder, "eval") == [4, 8, 9]
    assert again == [*range((again or [STEPS + 1])[0], STEPS + 1)]
    if function not in ("a snapshot", "removing"):  # their thread does not end the run at once
        assert not again or again[0] > min(len(before), reached)
    found = [r["loss"] for r in folder.records() if r.get("event") == "step"]
    assert found == pytest.approx(plain, rel=1e-5)


def killed(job: JobSpec, folder: RunFolder, at: int) -> None:
    """Kill a run after a step is in the log, and before it is recorded."""
    killer = Killer(at, after=True)
    killing = mock.patch.object(LogFolder, "write", killer.wrapped(LogFolder.write))
    with killing, pytest.raises(KilledError):
        run(job, folder)


@pytest.mark.parametrize(
    "change",
    [{"state": "server"}, {"state": "auto"}, {"steps": STEPS + 1, "schedule": "constant"}, {}],
)
def test_the_log_is_used_only_if_the_run_goes_on_as_before(
    tmp_path: Path, corpus_file: Path, change: dict[str, Any]
) -> None:
    """With other settings, it resumes from the snapshot. Old steps are never used later."""
    first = job_of(corpus_file, checkpoint_every=20, schedule="constant")
    folder = RunFolder(tmp_path)
    killed(first, folder, 6)
    base, job = max(held_steps(folder.path / LAYERS)), replace(first, **change)
    assert base < 6
    seen = run(job, folder)
    plain = replace(job, method="local", state="server")
    again = [record.step for record in seen if isinstance(record, StepRecord)]
    assert again[0] == (base + 1 if change.get("state") == "server" else 6)
    found = [r["loss"] for r in folder.records() if r.get("event") == "step"]
    assert found == pytest.approx(losses(plain, RunFolder(tmp_path / "plain")), rel=1e-5)
    assert LogFolder(folder.path / LOG).numbers() == []


def test_another_learning_rate_ends_the_log(tmp_path: Path, corpus_file: Path) -> None:
    """More steps give a linear schedule other rates."""
    first = job_of(corpus_file, checkpoint_every=20, schedule="linear")
    folder = RunFolder(tmp_path)
    killed(first, folder, 6)
    base = max(held_steps(folder.path / LAYERS))
    seen = run(replace(first, steps=STEPS + 2, warmup_steps=2), folder)
    assert next(record.step for record in seen if isinstance(record, StepRecord)) == base + 1


def test_without_checkpoints_nothing_is_kept(tmp_path: Path, corpus_file: Path) -> None:
    folder = RunFolder(tmp_path)
    run(job_of(corpus_file, checkpoint_every=0), folder)
    assert not (folder.path / RESIDENT).exists()
