"""Training through Cleave against training in plain PyTorch, in this process."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import cleave
from cleave.errors import CleaveError, UsageError, to_install
from cleave.fleet.fleet import Fleet
from cleave.planner.tiles.planner import TilePlanner
from cleave.training.loop.context import TrainContext
from cleave.training.loop.job import JobSpec
from cleave.training.loop.records import DoneRecord, NoteRecord, Record, StepRecord
from cleave.training.loop.run_folder import CHECKPOINTS, RunFolder
from cleave.training.loop.start import JobRequest, JobRunner, train
from tests.integration.processes import here, training_job
from tests.training.runs import losses_of, steps_of


def run(
    job: JobSpec,
    folder: Path,
    fleet: Fleet | None = None,
    *,
    resume: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> list[StepRecord]:
    """Train and return the steps."""
    seen: list[Record] = []
    train(job, RunFolder(folder), TrainContext(fleet, seen.append, stop), resume=resume)
    return steps_of(seen)


@pytest.fixture
def job(corpus_file: Path) -> JobSpec:
    return replace(training_job(corpus_file, 4, "opt-nano"), batch=3)


@pytest.fixture(scope="module")
def planner() -> TilePlanner:
    """Return one planner for all fleets of four devices, because their plans are equal."""
    return TilePlanner()


def case(
    model: str, dtype: str, tolerance: float, *, whole_tiles: bool, nightly: bool = True
) -> Any:
    return pytest.param(
        model, dtype, tolerance, whole_tiles, marks=pytest.mark.nightly if nightly else (),
        id=f"{model}-{dtype}-{'whole-tiles' if whole_tiles else 'block-by-block'}",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("model", "dtype", "tolerance", "whole_tiles"),
    [
        case("opt-nano", "fp32", 1e-4, whole_tiles=True, nightly=False),
        case("llama-nano", "bf16", 2e-2, whole_tiles=False, nightly=False),
        case("opt-nano", "fp32", 1e-4, whole_tiles=False),
        case("opt-nano", "bf16", 2e-2, whole_tiles=True),
        case("llama-nano", "fp32", 1e-4, whole_tiles=True),
    ],
)
def test_losses_are_those_of_plain_pytorch(
    job: JobSpec,
    tmp_path: Path,
    planner: TilePlanner,
    plain_losses: Callable[[JobSpec], list[float]],
    model: str,
    dtype: str,
    tolerance: float,
    whole_tiles: bool,
) -> None:
    job = replace(job, model=model, dtype=dtype)
    plain = plain_losses(job)
    with cleave.emulated(4, whole_tiles=whole_tiles) as fleet:
        fleet.planner = planner
        ours = run(job, tmp_path / "ours", fleet)
    assert losses_of(ours) == pytest.approx(plain, rel=tolerance)
    assert plain[-1] < plain[0]
    assert all(record.tiles > 0 and record.clock == "virtual" for record in ours)


@pytest.mark.parametrize("clip", [pytest.param(0.0, marks=pytest.mark.nightly), 0.05])
def test_stepping_inside_the_backward_pass_is_the_usual_update(
    job: JobSpec, tmp_path: Path, clip: float
) -> None:
    job = replace(job, clip=clip, steps=3)
    plain = run(replace(job, memory="plain"), tmp_path / "plain")
    for memory in ("recompute", "lean"):
        found = run(replace(job, memory=memory), tmp_path / memory)
        assert losses_of(found) == pytest.approx(losses_of(plain), rel=1e-5)


def test_accumulated_micro_batches_equal_one_large_batch(
    job: JobSpec, tmp_path: Path, planner: TilePlanner
) -> None:
    large = run(replace(job, batch=6, steps=2), tmp_path / "large")
    with cleave.emulated(4) as fleet:
        fleet.planner = planner
        small = run(replace(job, accumulate=2, steps=2), tmp_path / "small", fleet)
    assert losses_of(small) == pytest.approx(losses_of(large), rel=1e-4)
    assert {record.tokens for record in small} == {record.tokens for record in large}


def test_resuming_continues_to_the_same_losses_of(
    job: JobSpec, tmp_path: Path, plain_losses: Callable[[JobSpec], list[float]]
) -> None:
    whole = plain_losses(job)
    job = replace(job, checkpoint_every=2)
    seen = 0

    def stop() -> bool:
        nonlocal seen
        seen += 1
        return seen == 3

    assert losses_of(run(job, tmp_path / "cut", stop=stop)) == whole[:3]
    assert losses_of(run(job, tmp_path / "cut", resume=True)) == whole[3:]
    written = [r["step"] for r in RunFolder(tmp_path / "cut").records() if r["event"] == "step"]
    assert written == [1, 2, 3, 4]


@pytest.mark.usefixtures("plots")
def test_a_run_folder_holds_what_was_done(
    job: JobSpec, tmp_path: Path, planner: TilePlanner
) -> None:
    seen: list[Record] = []
    folder = RunFolder(tmp_path / "run")
    with cleave.emulated(4) as fleet:
        fleet.planner = planner
        done = train(replace(job, eval_every=2), folder, TrainContext(fleet, seen.append))
    assert isinstance(done, DoneRecord)
    assert seen[-1] == done
    assert any(isinstance(record, NoteRecord) for record in seen)
    assert done.tokens == job.steps * job.batch * job.seq
    assert not (folder.path / CHECKPOINTS).exists()
    assert torch.is_grad_enabled()
    assert JobSpec.from_dict(folder.read_config()).eval_every == 2
    lines = [json.loads(line) for line in folder.metrics_path.read_text().splitlines()]
    assert [line["event"] for line in lines].count("eval") == 2
    assert lines[-1]["event"] == "done"
    assert lines[-1]["run_folder"] == str(folder.path)
    assert folder.plot_path.read_bytes().startswith(b"\x89PNG")
    fields = "step loss tokens clock wall_s fleet_s ps_s verify_s downlink_bytes uplink_bytes tiles"
    assert set(f"{fields} blocks reissued".split()) <= lines[0].keys()


def test_a_local_folder_brings_weights_and_tokenizer(job: JobSpec, tmp_path: Path) -> None:
    from cleave.training.data.tokenizer import default_tokenizer
    from cleave.workload.build import build_model
    from cleave.workload.registry import find_model

    spec = find_model("opt-nano")
    model = build_model(spec, seed=7)
    model.save_pretrained(tmp_path / "model")
    tokenizer = default_tokenizer(vocab_size=spec.vocabulary)
    tokenizer._tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    job = replace(job, steps=1)
    seeded = losses_of(run(replace(job, seed=7), tmp_path / "seeded"))
    # The same weights and the same data order, from a folder.
    loaded = replace(job, seed=7, model=str(tmp_path / "model"), learning_rate=1e-3)
    assert losses_of(run(loaded, tmp_path / "loaded")) == pytest.approx(seeded, rel=1e-5)


# --- what is refused ---


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"batch": 0}, "--batch must be 1 or more, not 0"),
        ({"steps": -1}, "--steps must be 1 or more, not -1"),
        ({"dtype": "fp8"}, "fp8"),
        ({"learning_rate": -1.0}, "--learning-rate must be 0 or more, not -1"),
        ({"learning_rate": math.nan}, "--learning-rate must be 0 or more, not nan"),
        ({"seed": -1}, "--seed must be 0 or more, not -1"),
        ({"memory": "huge"}, "huge"),
    ],
)
def test_a_job_that_makes_no_sense_is_refused(
    job: JobSpec, change: dict[str, object], complaint: str
) -> None:
    with pytest.raises(UsageError, match=complaint):
        replace(job, **change)  # type: ignore[arg-type]


def test_a_job_that_cannot_be_run_leaves_no_folder(job: JobSpec, tmp_path: Path) -> None:
    runner = JobRunner(tmp_path / "runs")
    context = TrainContext(None, lambda record: None)
    for change in (
        {"model": "opt-1t"},
        {"seq": 100_000},
        {"model": str(tmp_path / "nothing")},
        {"data": "/no/such"},
    ):
        with pytest.raises(UsageError):
            runner.train(JobRequest({**job.to_dict(), **change}), context)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        *(
            ({"job": {name: source}}, "there is no file or folder")
            for name in ("data", "eval_data")
            for source in ("/no/such", "corpus.txt")
        ),
        ({"name": "night"}, "already exists"),
    ],
)
def test_a_job_that_cannot_begin_is_refused_before_it_is_queued(
    job: JobSpec, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    runner = JobRunner(tmp_path)
    (tmp_path / "night").mkdir()
    spec = {**job.to_dict(), "eval_every": 1}
    assert runner.check({"job": spec, "name": "day"}) == (job.model, job.steps)
    asked = {"name": "day", **change, "job": {**spec, **change.get("job", {})}}
    with pytest.raises(UsageError, match=said):
        runner.check(asked)


def test_a_run_that_has_no_checkpoint_yet_begins_where_it_may(job: JobSpec, tmp_path: Path) -> None:
    runner, seen = JobRunner(tmp_path), list[dict[str, Any]]()
    folder = RunFolder.create(tmp_path, "cut")
    folder.write_config(replace(job, steps=1, checkpoint_every=1).to_dict())
    request = {"job": {}, "resume": str(folder.path)}
    with pytest.raises(CleaveError, match=r"has no checkpoint.*--restart"):
        runner.run(request, None, seen.append, lambda: False)
    assert not folder.metrics_path.exists()
    runner.run({**request, "begin": True}, None, seen.append, lambda: False)
    assert (seen[-1]["event"], seen[-1]["steps"]) == ("done", 1)
    # What is damaged is not passed over: it may be mended.
    for file in (folder.path / "checkpoints").rglob("*.*"):
        file.write_bytes(b"")
    with pytest.raises(CleaveError, match=r"no checkpoint of .* is intact"):
        runner.run({**request, "begin": True}, None, seen.append, lambda: False)


def test_a_checkpoint_of_another_model_is_refused(job: JobSpec, tmp_path: Path) -> None:
    run(replace(job, steps=1, checkpoint_every=2), tmp_path / "run")
    before = sorted(path.name for path in (tmp_path / "run").rglob("*"))
    for change in ({"model": "llama-nano"}, {"seed": 5}, {"batch": 2}):
        with pytest.raises(CleaveError, match=next(iter(change))):
            run(replace(job, checkpoint_every=2, **change), tmp_path / "run", resume=True)
    assert sorted(path.name for path in (tmp_path / "run").rglob("*")) == before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--servers", "0"), "--servers must be 1 or more, not 0"),
        (("--ray", "auto"), "--ray needs --servers with at least 2 servers"),
        (("--listen", "8765"), "--listen needs --servers with at least 2 servers"),
        (("--servers", "2", "--listen", "8765", "--devices", "4"), "--listen is for real devices"),
        (
            ("--servers", "2", "--server", "ws://127.0.0.1:1/ws#c=x"),
            "cannot be combined with --server",
        ),
    ],
)
def test_several_servers_that_cannot_be_are_refused(options: tuple[str, ...], said: str) -> None:
    done = here("train", "--model", "opt-nano", *options)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed here")
def test_several_servers_without_ray_say_what_to_install() -> None:
    done = here("train", "--model", "opt-nano", "--servers", "2")
    assert done.returncode == 2
    assert to_install("ray") in done.stderr


def test_a_folder_without_a_run_is_refused_in_one_sentence(tmp_path: Path) -> None:
    done = here("train", "--resume", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith("cleave: there is no run folder")
