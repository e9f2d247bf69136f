"""The loss on an accelerator of the PS follows plain PyTorch. Processors here stand for a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from cleave.arrays import DType
from cleave.machine import webgpu_session
from cleave.machine.graph_choice import MakeGraph, open_in_torch, open_on_webgpu
from cleave.machine.graph_session import GraphError
from cleave.machine.torch_session import TorchSession
from cleave.training.stages import ps_loss
from cleave.training.stages.ps_loss import PsLoss
from cleave.training.stages.stage_work import ModelWork
from emulator.virtual import emulated
from tests.graphs.models import (
    WIDTH,
    graphs_of,
    small_model,
    with_lora,
)
from tests.machine.swiftshader import environment
from tests.training.runs import nightly
from tests.training.test_staged import (
    assert_same_gradients,
    assert_steps_lose_as_plain,
    batches,
    staged,
    twice,
)

pytestmark = pytest.mark.slow

IN_TORCH: Final = partial(open_in_torch, "cpu")


class Failing(TorchSession):
    """A torch runner whose memory is used up after some runs, or that cannot store parameters."""

    left = 0

    def upload(self, array: Any) -> Tensor:
        if Failing.left < 0:
            raise RuntimeError("out of memory\nmore about memory")
        return super().upload(array)

    def run_into(
        self,
        given: Mapping[str, Tensor],
        into: Mapping[str, Tensor],
        wanted: Sequence[str] | None = None,
    ) -> dict[str, Tensor]:
        if Failing.left == 0:
            raise GraphError("the graph cannot be run: out of memory")
        Failing.left -= 1
        return super().run_into(given, into, wanted)


@pytest.mark.parametrize(
    ("family", "dtype", "most"),
    [
        ("opt", DType.FP32, 1e-5),
        nightly("llama", DType.FP32, 1e-5),
        ("llama", DType.BF16, 2e-2),
    ],
)
def test_steps_lose_as_plain_pytorch_does(family: str, dtype: DType, most: float) -> None:
    how: Any = {"dtype": dtype, "loss": False, "loss_on": IN_TORCH}
    assert_steps_lose_as_plain(small_model(family), 3, most, **how)


def on_failing(model: Any, fleet: Any, notes: list[str]) -> Any:
    """By stages, with the loss on an accelerator that fails as `Failing.left` says."""
    return staged(
        model,
        fleet,
        loss=False,
        note=notes.append,
        loss_on=lambda graph, given, products: Failing(graph, given),
    )


@pytest.mark.parametrize("runs", [-1, 0, 1])
def test_a_full_accelerator_costs_no_exactness(runs: int) -> None:
    """The CPU computes the other losses. What the accelerator has added up counts."""
    model, plain = twice(small_model("opt"))
    notes: list[str] = []
    Failing.left = runs
    with emulated(3, seed=1) as fleet:
        assert_same_gradients(on_failing(model, fleet, notes), plain, batches(1)[0])
    reason = "out of memory" if runs < 0 else "the graph cannot be run: out of memory"
    assert notes[1:] == [f"from now on, the CPU computes the loss: {reason}"]


@pytest.mark.parametrize("runs", [1, 99])
def test_a_step_whose_gradients_are_lost_is_repeated(
    runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are lost with the accelerator: in the middle of the step, or at its end."""
    model, plain = twice(small_model("opt"))
    head: Any = model.lm_head
    notes: list[str] = []

    def lost(value: Tensor) -> Any:
        if value.shape == head.weight.shape:
            raise RuntimeError("no such device")
        return value.numpy()

    monkeypatch.setattr(ps_loss, "on_host", lost)
    Failing.left = runs
    with emulated(3, seed=1) as fleet:
        found = on_failing(model, fleet, notes)
        for (ids,) in [batches(1)] * 2:
            model.zero_grad()
            plain.zero_grad()
            assert_same_gradients(found, plain, ids)
    said = [each for each in notes if each.endswith("lost: no such device")]
    assert len(said) == 1


def test_a_frozen_head_may_be_in_bf16() -> None:
    model: Any = with_lora(small_model("llama")).to(torch.bfloat16)
    work = ModelWork(model, graphs_of(model), DType.FP32)
    y, targets = torch.randn(2, 5, WIDTH), torch.randint(9, (2, 5))
    loss, found = PsLoss(work, IN_TORCH), y.clone().requires_grad_()
    value, dy = loss(y, targets, 1.0)
    head = model.get_output_embeddings().weight.float()
    norm = model.model.norm
    x = torch.nn.functional.rms_norm(found, (WIDTH,), norm.weight.float(), norm.variance_epsilon)
    exact = torch.nn.functional.cross_entropy(
        (x @ head.T).flatten(0, 1), targets.flatten(), reduction="sum"
    )
    (wanted,) = torch.autograd.grad(exact, found)
    assert value == pytest.approx(float(exact.detach()), rel=1e-5)
    assert float((dy - wanted).norm() / wanted.norm()) < 1e-4
    assert loss.take() == {}


def _errors(open_graph: MakeGraph, dtype: DType = DType.FP32) -> tuple[float, float, float]:
    """Return the errors of a loss, of dy, and of the head's gradient, by norm."""
    model: Any = small_model("opt")
    work = ModelWork(model, graphs_of(model), dtype)
    random = torch.Generator().manual_seed(3)
    y = torch.randn(2, 5, WIDTH, generator=random)
    targets = torch.randint(9, (2, 5), generator=random)
    targets[0, 0] = -100
    loss = PsLoss(work, open_graph)
    loss(y, targets, 0.5)
    loss.forget()
    values = [loss(part, wanted, 0.5) for part, wanted in zip(y[:, None], targets, strict=True)]
    head = model.get_output_embeddings().weight
    total = loss.take()[id(head)]
    assert loss.take() == {}
    x = y.clone().requires_grad_()
    logits = model.get_output_embeddings()(model.model.decoder.final_layer_norm(x))
    wanted = 0.5 * torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
    )
    dx, gradient = torch.autograd.grad(wanted, [x, head])

    def error(found: Tensor, exact: Tensor) -> float:
        return float((found - exact).norm() / exact.norm())

    found = torch.cat([dy for _, dy in values])
    off = abs(sum(value for value, _ in values) / float(wanted.detach()) - 1)
    return off, error(found, dx), error(total, gradient)


@pytest.mark.parametrize("logits_bytes", [2**28, 1])
def test_a_loss_and_its_gradients_are_those_of_plain_pytorch(
    logits_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the logits of one token at a time fit in memory."""
    monkeypatch.setattr(ps_loss, "_MOST_LOGITS_BYTES", logits_bytes)
    assert max(_errors(IN_TORCH)) < 1e-6
    assert 1e-6 < max(_errors(IN_TORCH, DType.BF16)) < 2e-2


@pytest.mark.skipif(environment() is None, reason="SwiftShader is not installed")
@pytest.mark.skipif(not webgpu_session.installed(), reason="the extra gpu is not installed")
def test_a_loss_on_a_gpu_in_software(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (environment() or {}).items():
        monkeypatch.setenv(name, value)
    assert max(_errors(open_on_webgpu)) < 1e-5
