"""In fp16 the loss has a scale, and a step whose gradients overflow is left out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import cleave
from cleave.errors import UsageError
from cleave.training.loop import trainer
from cleave.training.loop.job import JobSpec
from cleave.training.loop.optimizer import LossScale, Optimizer, UpdateRule
from cleave.training.loop.run_folder import RunFolder
from tests.training.runs import losses, nightly, notes_of, trained

FACTOR = 2.0**18  # with which some of the first steps overflow
STEPS = 12
RULE = UpdateRule(betas=(0.8, 0.9))


class Small(nn.Module):
    """Layers whose products are in fp16."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))

    def loss(self, step: int) -> torch.Tensor:
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        with torch.autocast("cpu", torch.float16):
            y = self.layers(x)
        loss: torch.Tensor = (y.float() - x).square().mean() * 4
        return loss


def backward(model: Small, optimizer: Optimizer, step: int) -> Callable[[], float]:
    def run() -> float:
        assert optimizer.scale is not None
        loss = model.loss(step)
        torch.autograd.backward(loss * optimizer.scale.factor)
        return float(loss.detach())

    return run


@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_updates_are_those_of_a_scaler_of_torch(clip: float) -> None:
    """After the backward pass and in it, with steps that are left out."""
    model = Small()
    models = [copy.deepcopy(model) for _ in range(2)]
    optimizers = [
        Optimizer(each, RULE, clip=clip, in_backward=lean, scale=LossScale(FACTOR))
        for each, lean in zip(models, (False, True), strict=True)
    ]
    theirs = torch.optim.AdamW(model.parameters(), 0.01, betas=(0.8, 0.9), weight_decay=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=FACTOR)
    left_out = 0
    for step in range(STEPS):
        theirs.zero_grad()
        torch.autograd.backward(scaler.scale(model.loss(step)))
        scaler.unscale_(theirs)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(theirs)
        before = scaler.get_scale()
        scaler.update()
        left_out += scaler.get_scale() < before
        for mine, each in zip(models, optimizers, strict=True):
            each.step(0.01, backward(mine, each, step))
            assert each.scale is not None
            assert each.scale.factor == scaler.get_scale()
    assert 0 < left_out < STEPS
    for mine in models:
        for found, expected in zip(mine.parameters(), model.parameters(), strict=True):
            assert torch.allclose(found, expected, rtol=1e-5, atol=1e-7)


def test_the_factor_grows_after_many_steps_without_overflow() -> None:
    scale, scaler = LossScale(8.0), torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.0)
    for step in range(4001):
        overflows = step == 1500
        gradient = torch.full((1,), float("inf") if overflows else 1.0)
        optimizer.param_groups[0]["params"][0].grad = gradient
        scaler.scale(torch.ones(1))  # which a step needs to have happened
        scaler.step(optimizer)
        scaler.update()
        scale.overflowed() if overflows else scale.updated()
        assert scale.factor == scaler.get_scale()
    assert scale.updates == 4000


JOB = JobSpec(
    "opt-nano", steps=3, batch=2, seq=16, dtype="fp16", learning_rate=1e-3, checkpoint_every=1,
    clip=1.0,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("method", ["tiles", nightly("auto")])
def test_by_tiles_and_alone_it_is_plain_training(
    tmp_path: Path, corpus_file: Path, method: str
) -> None:
    job = replace(JOB, data=str(corpus_file))
    exact = losses(replace(job, dtype="fp32"), RunFolder.create(tmp_path, "fp32"))
    alone = losses(job, RunFolder.create(tmp_path, "alone"))
    assert alone == pytest.approx(exact, rel=4e-3)
    with cleave.emulated(2, seed=1) as fleet:
        run = RunFolder.create(tmp_path, method)
        found = losses(replace(job, method=method, offload="all"), run, fleet)
    assert found == pytest.approx(alone, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [FACTOR, nightly(2.0**60)])
def test_a_run_goes_on_with_its_scale(
    tmp_path: Path, corpus_file: Path, monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    """Also where no step has updated anything yet."""
    monkeypatch.setattr(trainer, "LossScale", lambda: LossScale(factor))
    job = replace(JOB, data=str(corpus_file))
    whole = losses(job, RunFolder.create(tmp_path, "whole"))
    run = RunFolder.create(tmp_path, "parts")
    first = losses(replace(job, steps=1), run)
    assert first + losses(job, run, resume=True) == whole


def test_stages_do_not_travel_in_fp16() -> None:
    with pytest.raises(UsageError, match="stages support only bf16 and fp32"):
        replace(JOB, method="stages")


def test_a_step_that_is_left_out_is_told(
    tmp_path: Path, corpus_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "LossScale", lambda: LossScale(2.0**60))
    job = replace(JOB, data=str(corpus_file), steps=2)
    notes = notes_of(trained(job, RunFolder.create(tmp_path, "run"))).splitlines()
    said = [note for note in notes if "overflow" in note]
    assert said == [
        f"step {step} changed no weights, because its gradients overflow in fp16; the loss scale "
        f"is now {2.0 ** (60 - step):g}"
        for step in (1, 2)
    ]
