"""Layers in two parts do what whole layers do, wherever these can be cut."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from cleave.arrays import DType
from cleave.graphs.calls import layer_calls
from cleave.graphs.layer_parts import LayerPart, tensors_of
from cleave.planner.stages.model import NOTHING_KEPT, KeptBatches, PlannedStage
from cleave.planner.stages.prediction import held_bytes
from cleave.planner.stages.search import plan_stages
from cleave.training.stages.audits import Auditor
from cleave.training.stages.stage_work import ModelWork
from emulator.virtual import emulated
from profiles.fleet_device import FleetDevice
from tests.graphs.models import TOKENS, graphs_of, plain_gradients, small_model, with_lora
from tests.training.runs import nightly
from tests.training.test_staged import (
    KEPT,
    ROWS,
    assert_close,
    batches,
    rows,
    staged,
)

IDS = torch.arange(2 * TOKENS).reshape(2, TOKENS)


def cut(family: str) -> list[LayerPart]:
    call = layer_calls(small_model(family), IDS)[0]
    return LayerPart.whole(call, 0).cut()


def test_a_layer_whose_attention_and_mlp_stand_side_by_side_stays_whole() -> None:
    (whole,) = cut("phi")
    assert whole.is_whole


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [nightly("opt"), "llama", "gemma2", nightly("qwen3"), nightly("gpt2")]
)
def test_the_parts_one_after_another_are_the_layer(family: str) -> None:
    parts = cut(family)
    assert [part.attends for part in parts] == [True, False]
    call = parts[0].call
    held = tensors_of(call.layer)
    torch.manual_seed(3)
    x, dy = torch.randn(2, *call.x.shape).unbind()

    def gradients(y: Tensor, given: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(y, [given, *call.layer.parameters()], dy))

    given = x.clone().requires_grad_()
    y = call.run(held, given, call.extras)
    expected = [y.detach(), *gradients(y, given)]
    given = x.clone().requires_grad_()
    y = given
    for part in parts:
        y = part.run(held, y, call.extras)
    for one, other in zip([y.detach(), *gradients(y, given)], expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "pieces", "devices", "kept"),
    [
        nightly("opt", 1, 3, KEPT),
        ("opt", 2, 3, KEPT),
        nightly("opt", 2, 4, KEPT),
        nightly("opt", 4, 4, NOTHING_KEPT),
        nightly("llama-lora", 1, 3, KEPT),
        nightly("llama-lora", 4, 4, KeptBatches(1, 1)),
    ],
)
def test_gradients_of_layers_in_parts_are_those_of_plain_pytorch(
    family: str, pieces: int, devices: int, kept: KeptBatches
) -> None:
    """Four parts on three devices: some have an attention and another layer's MLP.

    On four devices each has a part, and MLPs are computed in pieces. Honest devices pass audits.
    """
    model = with_lora(small_model("llama")) if family == "llama-lora" else small_model(family)
    plain = copy.deepcopy(model)
    graphs = graphs_of(model, in_parts=True, pieces=pieces)
    assert [part.pieces for part in graphs.parts] == [1, pieces, 1, pieces]
    assert [part.layer for part in graphs.parts] == [0, 0, 1, 1]
    assert graphs.layers[0] is graphs.layers[2]
    with emulated(devices, seed=1) as fleet:
        auditor = Auditor(float(ROWS))  # all sums, too
        found = staged(model, fleet, graphs=graphs, loss=False, kept=kept, auditor=auditor)
        (ids,) = batches(1)
        assert found.gradients(rows(ids)) == pytest.approx(plain_gradients(plain, ids), rel=1e-6)
        assert_close(model, plain, 3e-6)
        assert found.plan is not None
        assert len(found.plan.stages) == devices
    assert auditor.counters.sums > 0
    assert auditor.counters.faults == 0


@pytest.mark.slow
def test_layers_are_cut_in_parts_where_no_device_holds_a_whole_one() -> None:
    """Devices that have room for a part, and not for a layer, by the plan's own count."""
    model = small_model("opt")
    plain = copy.deepcopy(model)
    whole, parts = (
        ModelWork(model, graphs_of(model, in_parts=cut), DType.FP32) for cut in (False, True)
    )
    needed = [
        held_bytes(work.costs([TOKENS] * ROWS, TOKENS, DType.FP32), PlannedStage(n, n + 1, (0,)))
        for work, n in ((parts, 0), (parts, 1), (whole, 0))
    ]
    room = (max(needed[:2]) + needed[2]) // 2
    assert max(needed[:2]) < room < needed[2]
    device = FleetDevice("small", 1e10, 1e8, 1e8, 0.001, room)
    said: list[str] = []
    with emulated([device] * 4, seed=1) as fleet:
        found = staged(model, fleet, planner=plan_stages, in_parts=lambda: parts, note=said.append)
        (ids,) = batches(1)
        assert found.gradients(rows(ids)) == pytest.approx(plain_gradients(plain, ids), rel=1e-6)
        assert_close(model, plain, 3e-6)
        assert found.plan is not None
        assert [stage.stop for stage in found.plan.stages] == [1, 2, 3, 4]
    assert "divided into attention and MLP" in said[0]
    assert "stages: part 1 on 1 device, part 2 on 1 device" in said[1]
