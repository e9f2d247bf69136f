"""Held-out losses decide which checkpoint is kept, and when a run stops."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cleave.errors import UsageError
from cleave.training.loop import inputs
from cleave.training.loop.context import TrainContext
from cleave.training.loop.job import JobSpec
from cleave.training.loop.losses import ComparedRun, HeldOut
from cleave.training.loop.records import NoteRecord, Record, StepRecord, to_dict
from cleave.training.loop.run_folder import BEST, CHECKPOINTS, RunFolder
from cleave.training.loop.run_job import JobRequest, JobRunner
from cleave.training.loop.trainer import train
from cleave.training.results.export import find_checkpoint
from cleave_cli.main import app
from emulator.virtual import emulated
from profiles.fleets import paper_fleet


def test_the_lowest_and_how_many_came_after_it() -> None:
    found = HeldOut()
    assert [found.lowest(loss, 1) for loss in (3.0, 2.0, 2.0, nan, 1.0, 1.5)] == [
        True, True, False, False, True, False,
    ]  # fmt: skip
    assert (found.best, found.since) == (1.0, 1)


def test_a_resumed_run_stands_where_it_stood() -> None:
    records: list[dict[str, Any]] = [{"event": "step", "step": 1}]
    records += [{"event": "eval", "step": n, "eval_loss": loss} for n, loss in enumerate((5, 4, 6))]
    assert HeldOut.of(records, 1) == HeldOut(4.0, 0)
    assert HeldOut.of(records, 2) == HeldOut(4.0, 1)
    assert HeldOut.of([], 9) == HeldOut(inf, 0)


@pytest.mark.parametrize("name", ["eval_data", "keep_best", "early_stop"])
def test_without_held_out_losses_it_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="is of use with held-out losses; give --eval-every"):
        JobSpec("opt-nano", **{name: 1})  # type: ignore[arg-type]


@pytest.mark.parametrize("changed", [{"keep_best": True}, {"early_stop": 2}])
def test_a_resumed_run_may_have_held_out_losses_already(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    run = RunFolder.create(tmp_path, "mine")
    run.write_config(JobSpec("opt-nano", eval_every=5).to_dict())
    spec = JobRequest(changed, resume=str(run.path)).spec()
    assert spec == JobSpec("opt-nano", eval_every=5, **changed)
    with pytest.raises(UsageError, match="setting 'steps' of a job is 'x', not int"):
        JobRequest({"steps": "x"}, resume=str(run.path)).spec()


def run_of(tmp_path: Path, **job: Any) -> tuple[RunFolder, list[Any]]:
    run, seen = RunFolder.create(tmp_path, "mine"), list[Any]()
    changed: dict[str, Any] = {
        "steps": 9, "batch": 2, "seq": 16, "method": "local", "eval_every": 1, "eval_batches": 1,
        "checkpoint_every": 1, **job,
    }  # fmt: skip
    train(JobSpec("opt-nano", **changed), run, TrainContext(None, seen.append))
    return run, seen


@pytest.mark.parametrize("given", ["data", "eval_data"])
def test_a_wrong_path_is_refused_before_a_tokenizer_is_made(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "default_tokenizer", lambda **_: pytest.fail("it was made"))
    none = str(tmp_path / "none.txt")
    job = JobSpec("opt-nano", **{given: none}, eval_every=1)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="There is no file or folder"):
        inputs.prepare(job, TrainContext(None, lambda record: None))


@pytest.mark.slow
def test_a_run_whose_losses_do_not_fall_stops(tmp_path: Path, corpus_file: Path) -> None:
    run, seen = run_of(
        tmp_path, data=str(corpus_file), learning_rate=1e-30, early_stop=3, save_total_limit=3,
        keep_best=True,
    )  # fmt: skip
    done = seen[-1]
    assert (done.steps, done.stopped) == (4, True)
    assert any("the last 3 held-out losses are not below" in getattr(r, "text", "") for r in seen)
    names = sorted(path.name for path in (run.path / CHECKPOINTS).iterdir())
    assert names == ["step-000002", "step-000003", "step-000004"]
    assert [path.name for path in (run.path / BEST).iterdir()] == ["step-000001"]
    assert find_checkpoint(run, best=True).step == 1
    into = str(tmp_path / "out")
    done = CliRunner().invoke(app, ["export", str(run.path), into, "--best", "--json"])
    assert json.loads(done.stdout)["step"] == 1


@pytest.mark.slow
def test_a_run_has_the_settings_of_a_file(tmp_path: Path, corpus_file: Path) -> None:
    run, _ = run_of(tmp_path, data=str(corpus_file), steps=1, seed=4)
    command = ["train", "--config", str(run.config_path), "--seed", "5", "--devices", "0"]
    command += ["--runs", str(tmp_path), "--name", "again", "--json"]
    CliRunner().invoke(app, command, catch_exceptions=False)
    expected = {**run.read_config(), "seed": 5}
    assert RunFolder(tmp_path / "again").read_config() == expected
    (tmp_path / "odd.toml").write_text("stepz = 3\nmodel = 'opt-nano'\n")
    for config, said in (
        ("odd.toml", "a job has no setting 'stepz'"),
        ("no.toml", "cannot be read"),
    ):
        done = CliRunner().invoke(app, ["train", "--config", str(tmp_path / config)])
        assert isinstance(done.exception, UsageError)
        assert said in str(done.exception)


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
    said = trained(job, tmp_path / "fleet", devices=1)
    found = steps(said)
    assert [record.against_loss for record in found] == [*(r.loss for r in plain), None]
    assert "against_loss" not in to_dict(found[-1])
    assert "steps 2, here 3" in notes(said)
    assert "warmup_steps -1, here 1" in notes(said)
    assert "losses of 2 steps are at most" in notes(said)
    records = list(RunFolder(tmp_path / "fleet").records())
    assert [r["against_loss"] for r in records if "against_loss" in r] == [r.loss for r in plain]
    assert (tmp_path / "fleet" / "loss.png").is_file()


def test_a_loss_that_is_no_number_is_as_far_off_as_can_be() -> None:
    run = ComparedRun({1: 5.0, 2: 4.0})
    assert run.against(1, 5.0) == 5.0
    assert run.against(2, float("nan")) == 4.0
    assert run.against(3, 4.0) is None
    assert run.found("it") == "losses of 2 steps are at most inf off those of it"


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    job = replace(JOB, against=str(tmp_path))

    def refused(said: str) -> None:
        with pytest.raises(UsageError, match=said):
            JobRequest(job.to_dict()).spec()

    refused("not the folder of a run")
    RunFolder(tmp_path).write_config(JOB.to_dict())
    refused("no step")
    (tmp_path / "metrics.jsonl").write_text("no JSON\n")
    refused("damaged")


def test_a_run_goes_on_without_the_compared_one(tmp_path: Path) -> None:
    trained(JOB, tmp_path / "plain")
    job = replace(JOB, against=str(tmp_path / "plain"), checkpoint_every=1)
    assert "losses of 3 steps are at most 0.0e+00 off" in notes(trained(job, tmp_path / "again"))
    shutil.rmtree(tmp_path / "plain")
    goes_on = JobRequest({"steps": 4}, resume=str(tmp_path / "again"))
    said: list[Record] = []
    JobRunner(tmp_path).train(goes_on, TrainContext(None, said.append))
    assert "not compared: " in notes(said)
    assert [record.step for record in steps(said)] == [4]
