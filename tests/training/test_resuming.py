"""A resumed run: nothing of a part that was thrown away is left, and nothing else is there now."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cleave.errors import CleaveError, UsageError
from cleave.training.data.tokenizer import default_tokenizer
from cleave.training.loop.context import TrainContext
from cleave.training.loop.job import JobSpec
from cleave.training.loop.losses import losses_of
from cleave.training.loop.records import EvalRecord, NoteRecord, Record
from cleave.training.loop.run_folder import BEST, CHECKPOINTS, DESCRIPTION, JOURNAL, RunFolder
from cleave.training.loop.start import JobRequest, JobRunner, train
from cleave.training.loop.trainer import Trainer
from cleave.training.results.export import export_run, find_checkpoint
from tests.graphs.models import small_model
from tests.training.runs import nightly

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"


class KilledError(Exception):
    """Ends a run in the middle of a step, as SIGKILL would."""


def job_of(corpus_file: Path, **more: Any) -> JobSpec:
    settings: dict[str, Any] = {
        "model": "opt-nano", "data": str(corpus_file), "steps": 8, "batch": 1, "seq": 8,
        "method": "local", "eval_every": 1, "eval_batches": 1, "checkpoint_every": 3,
        "keep_best": True, **more,
    }  # fmt: skip
    return JobSpec(**settings)


def trained(job: JobSpec, run: RunFolder, kill_at: int = 0, **how: Any) -> list[Record]:
    """Train, or resume where there is a configuration; return what was reported."""
    seen: list[Record] = []

    def report(record: Record) -> None:
        seen.append(record)
        if kill_at and isinstance(record, EvalRecord) and record.step == kill_at:
            raise KilledError

    resume = run.config_path.exists()
    train(job, run, TrainContext(None, report), resume=resume, **how)
    return seen


def notes(seen: list[Record]) -> str:
    return "; ".join(record.text for record in seen if isinstance(record, NoteRecord))


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.iterdir())


@pytest.fixture
def held_out(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """Held-out losses by step, which a test fills."""
    losses: dict[int, float] = {}
    monkeypatch.setattr(Trainer, "evaluate", lambda trainer: losses[trainer.step])
    return losses


@pytest.mark.parametrize("seed", [0, *(nightly(seed) for seed in (1, 2, 3))])
def test_the_best_checkpoint_is_the_best_of_the_run_that_remains(
    tmp_path: Path, corpus_file: Path, held_out: dict[int, float], seed: int
) -> None:
    rng = random.Random(seed)
    held_out.update((step, round(rng.uniform(1, 9), 3)) for step in range(1, 9))
    run = RunFolder.create(tmp_path, "mine")
    job = job_of(corpus_file)
    with pytest.raises(KilledError):
        trained(job, run, kill_at=rng.choice([4, 5, 7]))
    assert len(steps_in(run.path / BEST)) <= 2
    lost = max(held_out)
    held_out.update((step, round(rng.uniform(1, 9), 3)) for step in range(1, lost))
    trained(job, run)
    losses = losses_of(run.records(), 8)
    best = min(losses, key=lambda step: losses[step])
    assert steps_in(run.path / BEST)[-1] == find_checkpoint(run, best=True).step == best
    assert len(losses) == 8


@pytest.mark.usefixtures("plots")
def test_nothing_of_what_was_thrown_away_is_left(
    tmp_path: Path, corpus_file: Path, held_out: dict[int, float]
) -> None:
    held_out.update((step, 9.0 - step) for step in range(1, 9))
    run = RunFolder.create(tmp_path, "mine")
    trained(job_of(corpus_file, save_total_limit=9), run)
    for step in (6, 8):
        shutil.rmtree(run.path / CHECKPOINTS / f"step-{step:06d}")
    held_out.update((step, 20.0 + step) for step in range(4, 9))
    with pytest.raises(KilledError):
        trained(job_of(corpus_file), run, kill_at=5)
    assert [record["step"] for record in run.records()] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert not run.plot_path.exists()
    assert steps_in(run.path / BEST) == [4]  # the best until step 3 had been replaced
    exported = export_run(run, tmp_path / "out", best=True)
    assert (exported.step, exported.remark[:40]) == (4, "the held-out loss was lower after step 3")


def test_early_stopping_counts_what_remains(
    tmp_path: Path, corpus_file: Path, held_out: dict[int, float]
) -> None:
    held_out.update({1: 5.0, 2: 4.0, 3: 3.0, 4: 1.0, 5: 2.0, 6: 2.0, 7: 2.0, 8: 2.0})
    run = RunFolder.create(tmp_path, "mine")
    with pytest.raises(KilledError):
        trained(job_of(corpus_file, early_stop=3), run, kill_at=5)
    held_out.update({4: 3.5, 5: 3.5, 6: 3.5})
    seen = trained(job_of(corpus_file, early_stop=3), run)
    assert "the last 3 held-out losses are not below 3.0000" in notes(seen)
    assert find_checkpoint(run, best=True).step == 3


@pytest.mark.parametrize(("killed", "said"), [(5, "steps 4 to 5 are"), (4, "step 4 is")])
def test_steps_that_are_repeated_are_named(
    tmp_path: Path, corpus_file: Path, held_out: dict[int, float], killed: int, said: str
) -> None:
    held_out.update((step, 19.0 - step) for step in range(1, 10))
    run = RunFolder.create(tmp_path, "mine")
    with pytest.raises(KilledError):
        trained(job_of(corpus_file), run, kill_at=killed)
    assert f"resuming after step 3; {said} repeated" in notes(trained(job_of(corpus_file), run))
    assert " repeated;" not in notes(trained(job_of(corpus_file, steps=9), run))


def test_a_finished_run_is_resumed_only_for_more_steps(run: RunFolder, tmp_path: Path) -> None:
    runner, asked = JobRunner(tmp_path), {"job": {}, "resume": str(run.path)}
    before = run.metrics_path.read_bytes()
    for steps in ({}, {"steps": 1}):
        with pytest.raises(UsageError, match=r"is already at step 1; .*above 1"):
            runner.run({**asked, "job": steps}, None, print, lambda: False)
        with pytest.raises(UsageError, match="is already at step 1;"):
            runner.check({**asked, "job": steps})  # before the job is queued
    missing = {"data": str(tmp_path / "missing.txt")}  # data is read later
    with pytest.raises(UsageError, match="is already at step 1;"):
        runner.run({**asked, "job": missing}, None, print, lambda: False)
    assert run.metrics_path.read_bytes() == before
    with pytest.raises(UsageError, match="--name is 'b', but --resume continues"):
        runner.check({**asked, "job": {"steps": 2}, "name": "b"})
    assert runner.check({**asked, "job": {"steps": 2}}) == ("opt-nano", 2)


def test_a_config_file_explains_numbers_that_stand_for_others(tmp_path: Path) -> None:
    run, job = RunFolder.create(tmp_path, "mine"), JobSpec("opt-nano", batch=2)
    run.write_config(job.to_dict(), job.comments())
    text = run.config_path.read_text()
    assert "learning_rate = 0.0  # Peak learning rate; 0 for the model's published rate.\n" in text
    assert "warmup_steps = -1  # Warm-up steps; -1 for a tenth" in text
    assert "batch = 2\n" in text
    assert JobSpec.from_dict(run.read_config()) == job


def test_an_unknown_run_is_answered_with_each_run_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RunFolder.create(tmp_path / "runs", "mine").write_config({})
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as refused:
        RunFolder(tmp_path / "runs" / "yours").read_config()
    assert str(refused.value).count("runs/mine") == 1


def test_a_run_without_a_checkpoint_is_resumed_only_to_restart(
    tmp_path: Path, corpus_file: Path
) -> None:
    run = RunFolder.create(tmp_path, "mine")
    run.write_config(job_of(corpus_file).to_dict())
    runner, asked = JobRunner(tmp_path), {"job": {}, "resume": str(run.path)}
    with pytest.raises(CleaveError, match=r"has no checkpoint, .*--restart"):
        runner.check(asked)
    for more in ("restart", "begin"):
        runner.check({**asked, more: True})


# --- what else is there now ----------------------------------------------------------------------


def save_model(folder: Path, **config: Any) -> None:
    small: Any = small_model("llama", vocab_size=300)
    small.save_pretrained(folder)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, **config}))
    default_tokenizer(vocab_size=300).library_tokenizer.save(str(folder / "tokenizer.json"))
    tell(folder, eos_token="<|endoftext|>", chat_template=TEMPLATE)


def tell(folder: Path, **config: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def chats(path: Path, answer: str = "yes") -> Path:
    talk = [{"role": "user", "content": "is it?"}, {"role": "assistant", "content": answer}]
    path.write_text(f"{json.dumps({'messages': talk})}\n" * 200)
    return path


def _other_tokenizer(folder: Path, data: Path) -> None:
    whole = json.loads((folder / "tokenizer.json").read_text())
    whole["model"]["merges"].pop()
    (folder / "tokenizer.json").write_text(json.dumps(whole))


def _other_template(folder: Path, data: Path) -> None:
    tell(folder, eos_token="<|endoftext|>", chat_template=TEMPLATE.replace("<", "("))


def _template_in_a_file(folder: Path, data: Path) -> None:
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("<", "["))


def _other_config(folder: Path, data: Path) -> None:
    save_model(folder, rms_norm_eps=0.1)


def _other_text(folder: Path, data: Path) -> None:
    chats(data, "no")


CHANGES = {
    "model configuration": _other_config,  # first, because it saves the whole folder
    "tokenizer": _other_tokenizer,
    "chat template": _other_template,
    "another chat template": _template_in_a_file,
    "training text": _other_text,
}


def test_what_changed_under_the_same_path_is_refused_unless_told(tmp_path: Path) -> None:
    model, data = tmp_path / "model", chats(tmp_path / "chats.jsonl")
    save_model(model)
    run = RunFolder.create(tmp_path, "mine")
    job = job_of(data, model=str(model), steps=1, eval_every=0, keep_best=False)
    trained(job, run)
    for step, (said, change) in enumerate(CHANGES.items(), 2):
        change(model, data)
        before = run.metrics_path.read_bytes()
        more = replace(job, steps=step)
        with pytest.raises(CleaveError, match=f"{said}.*or pass --accept-changes"):
            trained(more, run)
        assert run.metrics_path.read_bytes() == before
        # From now on it is what the run has.
        assert said in notes(trained(more, run, accept_changes=True))
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            assert (run.path / DESCRIPTION / name).read_bytes() == (model / name).read_bytes()
    trained(replace(job, steps=step + 1), run)


def test_a_folder_of_texts_and_held_out_text_are_looked_at(
    tmp_path: Path, corpus_file: Path, held_out: dict[int, float]
) -> None:
    held_out.update({1: 1.0, 2: 5.0, 3: 4.0})
    texts, other = tmp_path / "texts", tmp_path / "held-out.txt"
    texts.mkdir()
    for name in "ab":
        (texts / f"{name}.txt").write_text(f"what is in {name}, and more of it\n" * 99)
    other.write_text("what was never seen before\n" * 99)
    run = RunFolder.create(tmp_path, "mine")
    job = job_of(texts, eval_data=str(other), steps=1)
    trained(job, run)
    moved = tmp_path / "moved"
    texts.rename(moved)
    job = replace(job, data=str(moved))
    trained(replace(job, steps=2), run)  # the same text elsewhere
    other.write_text("what was never seen until now\n" * 99)
    with pytest.raises(CleaveError, match="used another held-out text up to step 2"):
        trained(replace(job, steps=3), run)
    trained(replace(job, steps=3), run, accept_changes=True)
    assert find_checkpoint(run, best=True).step == 3  # losses of other texts are not compared
    (moved / "c.txt").write_text("one more\n" * 99)
    with pytest.raises(CleaveError, match="another training text"):
        trained(replace(job, steps=4), run)


@pytest.fixture(scope="module")
def one_step(tmp_path_factory: pytest.TempPathFactory, corpus_file: Path) -> RunFolder:
    """A run of one step, which tests copy."""
    run = RunFolder.create(tmp_path_factory.mktemp("one-step"), "mine")
    trained(one_step_job(corpus_file), run)
    return run


def one_step_job(corpus_file: Path) -> JobSpec:
    return job_of(corpus_file, steps=1, keep_best=False, eval_every=0)


@pytest.fixture
def run(tmp_path: Path, one_step: RunFolder) -> RunFolder:
    """A run of one step."""
    return RunFolder(Path(shutil.copytree(one_step.path, tmp_path / "mine")))


def test_other_settings_are_refused_even_so(run: RunFolder, corpus_file: Path) -> None:
    job = one_step_job(corpus_file)
    with pytest.raises(CleaveError, match="made with batch 1, but this run has 2"):
        trained(replace(job, steps=2, batch=2), run, accept_changes=True)
    with pytest.raises(UsageError, match="--accept-changes needs --resume"):
        JobRequest.from_dict({"job": job.to_dict(), "accept_changes": True})
    request: Mapping[str, Any] = {"job": {"steps": 2}, "resume": str(run.path)}
    assert not JobRequest.from_dict(request).accept_changes
    assert JobRequest.from_dict({**request, "accept_changes": True}).accept_changes


# --- links -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [CHECKPOINTS, BEST, JOURNAL, DESCRIPTION, "metrics.jsonl"])
def test_a_run_folder_with_a_link_is_refused_and_what_it_leads_to_stays(
    tmp_path: Path, run: RunFolder, corpus_file: Path, name: str
) -> None:
    place, elsewhere = run.path / name, tmp_path / "elsewhere"
    if place.exists():
        place.rename(elsewhere)
    else:
        elsewhere.mkdir()
    place.symlink_to(elsewhere)
    before = {path: path.read_bytes() for path in elsewhere.rglob("*") if path.is_file()}
    content = elsewhere.read_bytes() if elsewhere.is_file() else b""
    with pytest.raises(CleaveError, match="it is a link, and Cleave does not write through links"):
        trained(replace(one_step_job(corpus_file), steps=2), run)
    assert before == {path: path.read_bytes() for path in elsewhere.rglob("*") if path.is_file()}
    assert not elsewhere.is_file() or elsewhere.read_bytes() == content


def test_a_foreign_file_in_place_of_the_metrics_is_left_alone(
    run: RunFolder, corpus_file: Path
) -> None:
    run.metrics_path.write_text("years of work\n")
    with pytest.raises(CleaveError, match="is not the metrics file of a run; move it away"):
        trained(replace(one_step_job(corpus_file), steps=2), run)
    assert run.metrics_path.read_text() == "years of work\n"


def test_two_jobs_of_one_process_do_not_share_a_run(tmp_path: Path, run: RunFolder) -> None:
    arguments = {"job": {"steps": 2}, "resume": str(run.path)}
    runner, seen = JobRunner(tmp_path), list[dict[str, Any]]()
    with run.lock(), pytest.raises(CleaveError, match=r"process \d+ is using the run folder"):
        runner.run(arguments, None, seen.append, lambda: False)
    runner.run(arguments, None, seen.append, lambda: False)
    assert [record["step"] for record in seen if record["event"] == "step"] == [2]
