"""Nothing that is not finite is used or saved, and a run that diverges says so and can go on."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from cleave.errors import CleaveError
from cleave.training.loop.checkpoint import (
    DamagedCheckpointError,
    load_checkpoint,
    load_latest,
    save_checkpoint,
)
from cleave.training.loop.context import TrainContext
from cleave.training.loop.finite import DivergedError, first_not_finite, is_finite
from cleave.training.loop.job import JobSpec
from cleave.training.loop.losses import HeldOut
from cleave.training.loop.optimizer import LossScale, Optimizer, UpdateRule
from cleave.training.loop.records import EvalRecord, Record
from cleave.training.loop.run_folder import BEST, CHECKPOINTS, RunFolder
from cleave.training.loop.start import train
from cleave.training.loop.trainer import Trainer
from cleave_cli.main import app
from emulator.virtual import emulated
from tests.training.runs import nightly
from tests.training.test_optimizer import Small, backward

HUGE = 1e18  # a learning rate whose first update leaves weights of that size

JOB = JobSpec(
    "opt-nano", steps=6, batch=2, seq=16, method="local", checkpoint_every=1, save_total_limit=1,
    learning_rate=HUGE, warmup_steps=0, schedule="constant", clip=0.0,
)  # fmt: skip


def checkpoints(run: RunFolder) -> dict[str, str]:
    return {
        f"{path.parent.name}/{path.name}": first_not_finite(load_checkpoint(path).tensors)
        for name in (CHECKPOINTS, BEST)
        for path in sorted((run.path / name).glob("step-*"))
    }


def refuse(constant: str) -> Any:
    raise AssertionError(f"{constant} is not JSON")


def lines(run: RunFolder) -> list[dict[str, Any]]:
    lines = run.metrics_path.read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def diverging(job: JobSpec, run: RunFolder, *, resume: bool = False) -> str:
    """Train until the run diverges; return what is said."""
    with emulated(2, seed=1) as fleet:
        context = TrainContext(None if job.method == "local" else fleet, lambda record: None)
        with pytest.raises(CleaveError) as said:
            train(job, run, context, resume=resume)
        assert fleet.device_count == 2  # nobody was blamed
    return str(said.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed",
    [
        nightly({"clip": 1.0}),
        nightly({"memory": "lean"}),
        nightly({"accumulate": 2, "optimizer": "sgd"}),
        nightly({"method": "stages", "dtype": "bf16"}),
        {"method": "tiles", "clip": 1.0},
        nightly({"lora": "r=2"}),
    ],
    ids=str,
)
def test_the_last_good_checkpoint_stays_and_the_run_goes_on_from_it(
    changed: dict[str, Any], tmp_path: Path, corpus_file: Path
) -> None:
    job = replace(JOB, data=str(corpus_file), **changed)
    run = RunFolder(tmp_path)
    said = diverging(job, run)
    step = max(record["step"] for record in lines(run) if record["event"] == "step")
    assert f"the run diverged in step {step + 1}: " in said
    assert "a lower --learning-rate (now 1e+18)" in said
    assert checkpoints(run) == {f"checkpoints/step-{step:06d}": ""}
    assert all(record["loss"] is not None for record in lines(run) if record["event"] == "step")
    assert diverging(job, run, resume=True) == said
    assert checkpoints(run) == {f"checkpoints/step-{step:06d}": ""}


@pytest.mark.slow
def test_a_held_out_loss_that_is_not_finite_displaces_nothing(
    tmp_path: Path, corpus_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = iter([3.0, 2.0, math.nan, math.nan, 1.5, 1.0])
    monkeypatch.setattr(Trainer, "evaluate", lambda self: next(found))
    job = replace(
        JOB, data=str(corpus_file), learning_rate=1e-3, eval_every=1, eval_batches=1, keep_best=True
    )
    run = RunFolder(tmp_path)
    kept: list[set[str]] = []
    notes: list[str] = []

    def report(record: Record) -> None:
        if isinstance(record, EvalRecord):
            kept.append(set(checkpoints(run)))
        notes.append(getattr(record, "text", ""))

    train(job, run, TrainContext(None, report))
    # As each held-out loss is reported, before the checkpoint of that step.
    folders = [{name.split("/")[1] for name in names if CHECKPOINTS in name} for names in kept]
    assert folders == [
        set(),
        {"step-000001"},
        {"step-000002"},
        {"step-000002", "step-000003"},
        {"step-000002", "step-000004"},
        {"step-000005"},
    ]
    assert checkpoints(run) == {"checkpoints/step-000006": "", "best/step-000006": ""}
    assert sum("the run may have diverged" in note for note in notes) == 1
    evals = [record["eval_loss"] for record in lines(run) if record["event"] == "eval"]
    assert evals == [3.0, 2.0, None, None, 1.5, 1.0]
    assert HeldOut.of(lines(run), 4) == HeldOut(2.0, 2, 3)
    assert HeldOut.of(lines(run), 6) == HeldOut(1.0, 0, None)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["weights", "state"])
def test_what_is_not_finite_is_not_saved(
    part: str, tmp_path: Path, corpus_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one flipped bit makes it, in a row that no batch uses."""
    update = Optimizer._update

    def spoiled(self: Optimizer, name: str) -> None:
        update(self, name)
        parameter = self.parameters[name]
        state = self._optimizers[name].state[parameter]
        if name.endswith("embed_tokens.weight") and state["step"] >= 2:
            with torch.no_grad():
                (parameter if part == "weights" else state["exp_avg"])[-1, -1] = math.inf

    monkeypatch.setattr(Optimizer, "_update", spoiled)
    job = replace(JOB, data=str(corpus_file), learning_rate=1e-4)
    run = RunFolder(tmp_path)
    said = diverging(job, run)
    assert "embed_tokens.weight' is not finite" in said
    assert checkpoints(run) == {"checkpoints/step-000001": ""}


def saved(folder: Path, step: int, value: float, **how: Any) -> Path:
    return save_checkpoint(
        folder, step=step, tensors={"model.w": torch.tensor([1.0, value])}, meta={}, **how
    )


def test_a_checkpoint_that_is_not_finite_is_passed_over(tmp_path: Path) -> None:
    """As earlier versions wrote them."""
    saved(tmp_path, 1, 2.0)
    path = saved(tmp_path, 2, math.nan)
    with pytest.raises(DamagedCheckpointError, match=r"'model.w' is not finite"):
        load_checkpoint(path)
    passed: list[DamagedCheckpointError] = []
    found = load_latest(tmp_path, passed.append)
    assert found is not None
    assert found.step == 1
    assert [fault.path for fault in passed] == [path]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_one_element_that_is_not_finite_is_found(value: float, dtype: torch.dtype) -> None:
    tensor = torch.randn(7, 5).to(dtype)
    assert is_finite(tensor)
    assert is_finite(torch.empty(0, dtype=dtype))
    assert is_finite(torch.arange(3))
    tensor[3, 2] = value
    assert not is_finite(tensor)
    assert first_not_finite({"a": torch.zeros(2), "b": tensor.T}) == "b"


def spoiling(model: Small, seed: int, name: str, value: float) -> Callable[[], float]:
    """Return a backward pass in which one gradient is not finite."""
    honest = backward(model, seed)
    parameter = dict(model.named_parameters())[name]

    def run() -> float:
        def spoil(gradient: torch.Tensor) -> torch.Tensor:
            spoiled = gradient.clone()
            spoiled.view(-1)[0] = value
            return spoiled

        handle = parameter.register_hook(spoil)  # type: ignore[no-untyped-call]
        try:
            return honest()
        finally:
            handle.remove()

    return run


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_no_parameter_is_updated_by_gradients_that_are_not_finite(
    clip: float, in_backward: bool, value: float
) -> None:
    """1e30 has a square that is not finite, as AdamW's second moment would be."""
    model = Small()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = Optimizer(model, UpdateRule(), clip=clip, in_backward=in_backward)
    name = "layers.0.weight"  # whose gradient comes after that of the second layer
    with pytest.raises(DivergedError, match="the norm of its gradients is"):
        optimizer.step(1e-3, spoiling(model, 1, name, value))
    same = {n: torch.equal(p, before[n]) for n, p in model.named_parameters()}
    assert same[name]
    assert all(same.values()) or (in_backward and not clip)
    assert not first_not_finite({n: p.detach() for n, p in model.named_parameters()})
    assert not first_not_finite(optimizer.tensors())


def test_a_loss_that_is_not_finite_updates_nothing() -> None:
    model = Small()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = Optimizer(model, UpdateRule(), clip=1.0, in_backward=False)

    def lost() -> float:
        backward(model, 1)()
        return math.nan

    with pytest.raises(DivergedError, match="its loss is nan"):
        optimizer.step(1e-3, lost)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("in_backward", [False, True])
def test_gradients_that_overflow_in_fp16_are_left_out_until_no_scale_helps(
    in_backward: bool,
) -> None:
    model = Small()
    scale = LossScale()
    optimizer = Optimizer(model, UpdateRule(), clip=1.0, in_backward=in_backward, scale=scale)
    overflowing = spoiling(model, 1, "layers.0.weight", math.inf)
    for _ in range(30):  # from 2**16 to 2**-14
        optimizer.step(1e-3, overflowing)
    with pytest.raises(DivergedError, match="overflow in fp16"):
        optimizer.step(1e-3, overflowing)
    assert scale.updates == 0


@pytest.mark.slow
def test_an_export_that_would_overflow_is_refused(tmp_path: Path, corpus_file: Path) -> None:
    run = RunFolder(tmp_path / "run")
    job = replace(JOB, data=str(corpus_file), steps=1)
    train(job, run, TrainContext(None, lambda record: None))
    command = ["export", str(run.path), str(tmp_path / "out"), "--dtype"]
    done = CliRunner().invoke(app, [*command, "fp16"])
    assert done.exit_code == 1
    assert isinstance(done.exception, CleaveError)
    assert "is not finite in fp16" in str(done.exception)
    assert not (tmp_path / "out").exists()
    assert CliRunner().invoke(app, [*command, "bf16"]).exit_code == 0
