"""Curves for TensorBoard and Weights & Biases: those of the run, and never a reason to stop."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cleave.errors import UsageError, to_install
from cleave.training.loop import trackers
from cleave.training.loop.context import TrainContext
from cleave.training.loop.inputs import prepare
from cleave.training.loop.job import JobSpec
from cleave.training.loop.records import EvalRecord, NoteRecord
from cleave.training.loop.run_folder import RunFolder
from cleave.training.loop.trackers import Trackers, tracker_names
from tests.training.runs import steps_of, trained


def test_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: "there")
    assert tracker_names("") == []
    assert tracker_names("wandb") == ["wandb"]
    assert tracker_names("tensorboard+wandb+tensorboard") == ["tensorboard", "wandb"]


@pytest.mark.parametrize("text", ["tensorbord", "tensorboard,wandb", "wandb+", " "])
def test_what_it_refuses(text: str) -> None:
    with pytest.raises(UsageError, match="use tensorboard or wandb, or both with"):
        prepare(JobSpec("opt-nano", report_to=text), TrainContext(None, lambda record: None))


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=re.escape(to_install("wandb"))):
        tracker_names("wandb")


def job_of(corpus: Path, **more: Any) -> JobSpec:
    settings = {"steps": 2, "eval_every": 2, "eval_batches": 1, "checkpoint_every": 1, **more}
    return JobSpec("opt-nano", str(corpus), batch=2, seq=16, method="local", **settings)


def curves(run: RunFolder) -> dict[str, list[tuple[int, float]]]:
    """Read TensorBoard's files as TensorBoard does."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: Any = EventAccumulator(str(run.path / "tensorboard"))
    found.Reload()
    return {
        name: [(point.step, point.value) for point in found.Scalars(name)]
        for name in found.Tags()["scalars"]
    }


@pytest.mark.slow
def test_tensorboard_shows_the_losses_of_a_run_and_of_its_continuation(
    tmp_path: Path, corpus_file: Path
) -> None:
    run = RunFolder.create(tmp_path, "mine")
    job = job_of(corpus_file, report_to="tensorboard")
    seen = trained(job, run) + trained(replace(job, steps=4), run, resume=True)
    steps = steps_of(seen)
    evals = [record for record in seen if isinstance(record, EvalRecord)]
    found = curves(run)
    assert [step for step, _ in found["train/loss"]] == [1, 2, 3, 4]
    assert [loss for _, loss in found["train/loss"]] == pytest.approx([r.loss for r in steps])
    rates = [r.learning_rate for r in steps]
    assert [rate for _, rate in found["train/learning_rate"]] == pytest.approx(rates)
    assert [step for step, _ in found["eval/loss"]] == [r.step for r in evals]
    assert [loss for _, loss in found["eval/loss"]] == pytest.approx([r.eval_loss for r in evals])


@pytest.mark.slow
def test_wandb_keeps_a_run_without_a_network(
    tmp_path: Path, corpus_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed: pip install 'cleave-train[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = RunFolder.create(tmp_path, "mine")
    job = job_of(corpus_file, report_to="wandb")
    seen = trained(job, run)
    assert not [r.text for r in seen if isinstance(r, NoteRecord) and "curves" in r.text]
    (kept,) = (run.path / "wandb").glob("offline-run-*/run-*.wandb")
    assert (run.path / "wandb-run-id").read_text() in kept.name
    assert b"train/loss" in kept.read_bytes()


class _Failing:
    """Draws one point, and fails from then on."""

    def __init__(self) -> None:
        self.points = 0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.points += 1
        if self.points > 1:
            raise OSError("No space left on device")

    def close(self) -> None:
        raise AssertionError("it was left out")


def test_one_that_fails_is_left_out_and_said_once() -> None:
    said: list[str] = []
    failing = _Failing()
    both = Trackers({"wandb": failing}, said.append)
    for step in (1, 2, 3):
        both.report(EvalRecord(step, 2.0))
    both.close()
    assert failing.points == 2
    assert said == [
        "wandb gets no more metrics (OSError: No space left on device); training continues"
    ]


def test_one_that_cannot_begin_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, corpus_file: Path
) -> None:
    def refuse(*given: object) -> None:
        raise RuntimeError("no key\nmore")

    monkeypatch.setattr(trackers, "_OPEN", {"tensorboard": refuse})
    run, said = RunFolder.create(tmp_path, "mine"), list[str]()
    Trackers.open(job_of(corpus_file, report_to="tensorboard"), run, 0, said.append)
    assert said == ["tensorboard gets no more metrics (RuntimeError: no key); training continues"]
