"""Layers that cannot become graphs are done by the server, between stages of the others."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import cleave
from cleave.arrays import DType
from cleave.errors import DeviceMemoryError, LayerGraphError
from cleave.planner.plan import DeviceRates
from cleave.planner.stages.model import PsCompute, StageModel, StagePlan
from cleave.planner.stages.search import plan_stages
from cleave.training.stages.stage_work import ModelWork
from tests.graphs.models import graphs_of, plain_gradients, small_model, trained, with_lora
from tests.training.runs import nightly
from tests.training.test_staged import (
    assert_close,
    assert_same_gradients,
    assert_steps_lose_as_plain,
    batches,
    rows,
    staged,
)

pytestmark = pytest.mark.slow

LAYERS = 4
MORE_SETS = [{1}, {0}, {3}, {1, 3}, {1, 2}]


def with_hooks(model: Any, refused: set[int]) -> nn.Module:
    """The model with hooks within some layers, of which no graph could know."""
    for number in refused:
        model.model.layers[number].mlp.register_forward_hook(lambda *given: None)
    return model  # type: ignore[no-any-return]


@pytest.mark.nightly
@pytest.mark.parametrize("refused", [{0, 2}, *(refused for refused in MORE_SETS)], ids=str)
def test_gradients_are_those_of_plain_pytorch(refused: set[int]) -> None:
    plain = small_model("llama", num_hidden_layers=LAYERS)
    model = with_hooks(copy.deepcopy(plain), refused)
    with cleave.emulated(5, seed=1) as fleet:
        found = staged(model, fleet, planner=plan_stages)
        assert_same_gradients(found, plain, batches(1)[0])
        assert found.plan is not None
        assert found.plan.stages[-1].stop == LAYERS - len(refused)


@pytest.mark.nightly
def test_layers_in_parts_are_counted_as_such() -> None:
    """Devices that hold no whole layer get parts: then a run is before another number."""
    plain = small_model("llama", num_hidden_layers=LAYERS)
    model = with_hooks(copy.deepcopy(plain), {1, 3})
    (ids,) = batches(1)

    def in_parts() -> ModelWork:
        return ModelWork(model, graphs_of(model, in_parts=True), DType.FP32)

    def planner(model: StageModel, devices: Sequence[DeviceRates], ps: PsCompute) -> StagePlan:
        if not model.in_parts:
            raise DeviceMemoryError("no device holds a layer")
        return plan_stages(model, devices, ps)

    with cleave.emulated(5, seed=1) as fleet:
        found = staged(model, fleet, planner=planner, in_parts=in_parts)
        assert_same_gradients(found, plain, ids)
        assert found.passes.runs == {2: [1], 4: [3]}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("dtype", "lora", "most"), [(DType.BF16, False, 2e-2), (DType.FP32, True, 1e-5)]
)
def test_steps_lose_as_plain_pytorch_does(dtype: DType, lora: bool, most: float) -> None:
    plain: Any = small_model("llama", num_hidden_layers=LAYERS)
    plain = with_lora(plain) if lora else plain
    model = with_hooks(copy.deepcopy(plain), {0, 2})
    assert_steps_lose_as_plain(model, 5, most, plain=plain, dtype=dtype, planner=plan_stages)


@pytest.mark.nightly  # makes graphs of a bf16 model
@pytest.mark.parametrize("refused", [{0}, {1}, {3}], ids=str)
def test_layers_that_stay_here_get_their_inputs_in_the_dtype_of_the_model(
    refused: set[int],
) -> None:
    plain: Any = small_model("llama", num_hidden_layers=LAYERS).to(torch.bfloat16)
    model: Any = with_hooks(copy.deepcopy(plain), refused)
    (ids,) = batches(1)
    with cleave.emulated(5, seed=1) as fleet:
        cleave.offload(model, fleet, method="stages")
        assert plain_gradients(model, ids) == pytest.approx(plain_gradients(plain, ids), rel=1e-2)
    assert_close(model, plain, 0.05)


@pytest.mark.parametrize(
    ("refused", "said"),
    [({1}, "layer 2 of 4: "), nightly({0, 3}, "layers 1 and 4 of 4: ")],
    ids=str,
)
def test_a_loop_of_ones_own_trains_as_plain_pytorch_does(
    refused: set[int], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain = small_model("llama", num_hidden_layers=LAYERS)
    model = with_hooks(copy.deepcopy(plain), refused)
    with cleave.emulated(5, seed=1) as fleet, caplog.at_level(logging.WARNING, "cleave"):
        cleave.offload(model, fleet, method="stages")
        mine = trained(model, lambda ids: plain_gradients(model, ids), batches(3), clip=1.0)
        with torch.no_grad():
            logits = model(input_ids=batches(1)[0]).logits
    expected = trained(plain, lambda ids: plain_gradients(plain, ids), batches(3), clip=1.0)
    assert mine == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(logits, plain(input_ids=batches(1)[0]).logits, rtol=0, atol=1e-4)
    assert f"{said}its module mlp has hooks" in caplog.text


def test_a_layer_that_is_tried_again_gives_its_gradients_once() -> None:
    model = with_hooks(small_model("llama", num_hidden_layers=LAYERS), {1})
    (ids,) = batches(1)
    with cleave.emulated(3, seed=1) as fleet:
        found = staged(model, fleet, planner=plan_stages)
        found.gradients(rows(ids))
        once = [p.grad for p in model.parameters()]
        model.zero_grad()
        found.gradients(rows(ids))
    for first, again in zip(once, (p.grad for p in model.parameters()), strict=True):
        assert first is None or torch.equal(first, again)  # type: ignore[arg-type]


def test_a_model_of_which_no_layer_can_is_refused() -> None:
    model = with_hooks(small_model("llama"), {0, 1})
    with pytest.raises(LayerGraphError, match="its module mlp has hooks"):
        graphs_of(model)
