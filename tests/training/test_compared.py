"""A run shows the losses of another one beside its own, and how far they are from each other."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cleave.errors import UsageError
from cleave.training.loop.job import JobSpec
from cleave.training.loop.losses import ComparedRun
from cleave.training.loop.records import NoteRecord, Record, StepRecord, to_dict
from cleave.training.loop.run_folder import RunFolder
from cleave.training.loop.run_job import JobRequest, JobRunner
from cleave.training.loop.trainer import TrainContext, train
from emulator.virtual import emulated
from profiles.fleets import paper_fleet

JOB = JobSpec("opt-nano", steps=3, batch=2, seq=32, checkpoint_every=0, method="local")


def trained(job: JobSpec, folder: Path, devices: int = 0) -> list[Record]:
    said: list[Record] = []
    folder.mkdir()
    fleet = emulated(paper_fleet(devices)) if devices else None
    try:
        train(job, RunFolder(folder), TrainContext(fleet, said.append))
    finally:
        if fleet is not None:
            fleet.close()
    return said


def steps(said: list[Record]) -> list[StepRecord]:
    return [record for record in said if isinstance(record, StepRecord)]


def notes(said: list[Record]) -> str:
    return "\n".join(record.text for record in said if isinstance(record, NoteRecord))


def test_a_fleets_losses_are_shown_beside_plain_pytorchs(tmp_path: Path) -> None:
    plain = steps(trained(replace(JOB, steps=2), tmp_path / "plain"))
    job = replace(JOB, method="tiles", steps=3, against=str(tmp_path / "plain"), warmup_steps=1)
    said = trained(job, tmp_path / "fleet", devices=3)
    found = steps(said)
    assert [record.against_loss for record in found] == [*(r.loss for r in plain), None]
    assert "against_loss" not in to_dict(found[-1])
    assert "steps 2, here 3" in notes(said)
    assert "warmup_steps -1, here 1" in notes(said)
    assert "losses of 2 steps are at most" in notes(said)
    records = list(RunFolder(tmp_path / "fleet").records())
    assert [r["against_loss"] for r in records if "against_loss" in r] == [r.loss for r in plain]
    assert (tmp_path / "fleet" / "loss.png").is_file()


def test_the_largest_difference_is_said(tmp_path: Path) -> None:
    trained(JOB, tmp_path / "plain")
    said = trained(replace(JOB, against=str(tmp_path / "plain")), tmp_path / "again")
    assert f"losses of 3 steps are at most 0.0e+00 off those of {tmp_path / 'plain'}" in notes(said)
    assert "other settings" not in notes(said)


def test_a_loss_that_is_no_number_is_as_far_off_as_can_be() -> None:
    run = ComparedRun({1: 5.0, 2: 4.0})
    assert run.against(1, 5.0) == 5.0
    assert run.against(2, float("nan")) == 4.0
    assert run.against(3, 4.0) is None
    assert run.found("it") == "losses of 2 steps are at most inf off those of it"


def nothing(folder: Path) -> None:
    folder.mkdir()


def without_a_step(folder: Path) -> None:
    folder.mkdir()
    RunFolder(folder).write_config(JOB.to_dict())


def damaged(folder: Path) -> None:
    without_a_step(folder)
    (folder / "metrics.jsonl").write_text("no JSON\n")


@pytest.mark.parametrize(
    ("made", "said"),
    [(nothing, "not the folder of a run"), (without_a_step, "no step"), (damaged, "damaged")],
)
def test_what_is_no_run_is_refused(tmp_path: Path, made: Callable[[Path], None], said: str) -> None:
    made(tmp_path / "other")
    job = replace(JOB, against=str(tmp_path / "other"))
    with pytest.raises(UsageError, match=said):
        JobRequest(job.to_dict()).spec()


def test_a_run_goes_on_without_the_compared_one(tmp_path: Path) -> None:
    trained(JOB, tmp_path / "plain")
    job = replace(JOB, against=str(tmp_path / "plain"), checkpoint_every=1)
    trained(job, tmp_path / "again")
    shutil.rmtree(tmp_path / "plain")
    goes_on = JobRequest({"steps": 4}, resume=str(tmp_path / "again"))
    said: list[Record] = []
    JobRunner(tmp_path).train(goes_on, TrainContext(None, said.append))
    assert "not compared: " in notes(said)
    assert [record.step for record in steps(said)] == [4]
