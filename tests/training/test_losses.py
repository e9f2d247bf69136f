"""Held-out losses decide which checkpoint is kept, and when a run stops."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cleave.errors import UsageError
from cleave.training.loop import inputs
from cleave.training.loop.context import TrainContext
from cleave.training.loop.job import JobSpec
from cleave.training.loop.losses import ComparedRun
from cleave.training.loop.records import Record, to_dict
from cleave.training.loop.run_folder import BEST, CHECKPOINTS, RunFolder
from cleave.training.loop.start import JobRequest, JobRunner
from cleave.training.results.export import find_checkpoint
from cleave_cli.main import app
from emulator.virtual import emulated
from profiles.fleets import paper_fleet
from tests.training.runs import notes_of, steps_of, trained


@pytest.mark.parametrize("name", ["eval_data", "keep_best", "early_stop"])
def test_without_held_out_losses_it_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="needs held-out losses; add --eval-every"):
        JobSpec("opt-nano", **{name: 1})  # type: ignore[arg-type]


@pytest.mark.parametrize("changed", [{"keep_best": True}, {"early_stop": 2}])
def test_a_resumed_run_may_have_held_out_losses_already(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    run = RunFolder.create(tmp_path, "mine")
    run.write_config(JobSpec("opt-nano", eval_every=5).to_dict())
    spec = JobRequest(changed, resume=str(run.path)).spec()
    assert spec == JobSpec("opt-nano", eval_every=5, **changed)
    with pytest.raises(UsageError, match="setting 'steps' of a job must be of type int, not 'x'"):
        JobRequest({"steps": "x"}, resume=str(run.path)).spec()


def run_of(tmp_path: Path, **job: Any) -> tuple[RunFolder, list[Any]]:
    run = RunFolder.create(tmp_path, "mine")
    changed: dict[str, Any] = {
        "steps": 9, "batch": 2, "seq": 16, "method": "local", "eval_every": 1, "eval_batches": 1,
        "checkpoint_every": 1, **job,
    }  # fmt: skip
    return run, trained(JobSpec("opt-nano", **changed), run)


@pytest.mark.parametrize("given", ["data", "eval_data"])
def test_a_wrong_path_is_refused_before_a_tokenizer_is_made(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "default_tokenizer", lambda **_: pytest.fail("it was made"))
    none = str(tmp_path / "none.txt")
    job = JobSpec("opt-nano", **{given: none}, eval_every=1)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="there is no file or folder"):
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


@pytest.mark.slow
@pytest.mark.usefixtures("plots")
def test_a_fleets_losses_are_shown_beside_plain_pytorchs(tmp_path: Path) -> None:
    plain = steps_of(trained(replace(JOB, steps=2), RunFolder(tmp_path / "plain")))
    job = replace(JOB, method="tiles", steps=3, against=str(tmp_path / "plain"), warmup_steps=1)
    with emulated(paper_fleet(1)) as fleet:
        said = trained(job, RunFolder(tmp_path / "fleet"), fleet)
    found = steps_of(said)
    assert [record.against_loss for record in found] == [*(r.loss for r in plain), None]
    assert "against_loss" not in to_dict(found[-1])
    assert "steps 2, here 3" in notes_of(said)
    assert "warmup_steps -1, here 1" in notes_of(said)
    assert "losses of 2 steps differ from" in notes_of(said)
    records = list(RunFolder(tmp_path / "fleet").records())
    assert [r["against_loss"] for r in records if "against_loss" in r] == [r.loss for r in plain]
    assert (tmp_path / "fleet" / "loss.png").is_file()


def test_a_loss_that_is_no_number_is_as_far_off_as_can_be() -> None:
    run = ComparedRun({1: 5.0, 2: 4.0})
    assert run.against(1, 5.0) == 5.0
    assert run.against(2, float("nan")) == 4.0
    assert run.against(3, 4.0) is None
    assert run.found("it") == "losses of 2 steps differ from it by at most inf"


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    job = replace(JOB, against=str(tmp_path))

    def refused(said: str) -> None:
        with pytest.raises(UsageError, match=said):
            JobRequest(job.to_dict()).spec()

    refused("there is no run folder")
    RunFolder(tmp_path).write_config(JOB.to_dict())
    refused("no completed step")
    (tmp_path / "metrics.jsonl").write_text("no JSON\n")
    refused("damaged")


@pytest.mark.slow
def test_a_run_goes_on_without_the_compared_one(tmp_path: Path) -> None:
    trained(JOB, RunFolder(tmp_path / "plain"))
    job = replace(JOB, against=str(tmp_path / "plain"), checkpoint_every=1)
    again = RunFolder(tmp_path / "again")
    assert "by at most 0.0e+00" in notes_of(trained(job, again))
    shutil.rmtree(tmp_path / "plain")
    goes_on = JobRequest({"steps": 4}, resume=str(again.path))
    said: list[Record] = []
    JobRunner(tmp_path).train(goes_on, TrainContext(None, said.append))
    assert "not compared: " in notes_of(said)
    assert [record.step for record in steps_of(said)] == [4]
