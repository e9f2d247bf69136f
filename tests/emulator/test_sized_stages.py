"""Steps by stages of sizes alone: figures of real models, what travels, what it takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from cleave.arrays import DType
from cleave.errors import FleetError, ProtocolError, UsageError
from cleave.planner.plan import PsRates
from cleave.planner.stages.model import (
    HeadSlice,
    KeptBatches,
    LayerCost,
    PlannedStage,
    PsCompute,
    StagePlan,
)
from cleave.planner.stages.prediction import held_bytes, predict
from cleave.scheduler.stages.arrays import StageArray
from cleave.workload.registry import find_model, spec_from_config
from cleave.workload.stages import Adapters
from emulator.activity import GraphExecution
from emulator.sized_stages import EmulatedSteps, SizedModel, run_steps
from emulator.virtual import Arithmetic, VirtualRuntime
from profiles.fleet_device import FleetDevice

SEQUENCE = 16
FEW = ("q_proj", "v_proj", "down_proj")  # targets of `with_lora`
MB = 10**6


def device(number: int, **changed: Any) -> FleetDevice:
    values: dict[str, Any] = {
        "flops_per_s": 1e9, "downlink_bytes_per_s": 4e6, "uplink_bytes_per_s": 2e6,
        "latency_s": 0.002, "memory_bytes": 100 * MB, **changed,
    }  # fmt: skip
    return FleetDevice(name=f"device-{number}", **values)


def runtime_of(devices: int, **changed: Any) -> VirtualRuntime:
    profiles = [device(number, **changed) for number in range(devices)]
    return VirtualRuntime(profiles, None, Arithmetic.NONE, verify=False, coding="off")


def plan_of(*stages: PlannedStage, kept_batches: int = 2) -> StagePlan:
    kept = {device: KeptBatches(kept_batches) for stage in stages for device in stage.devices}
    return StagePlan(stages, kept, 0.0, {}, 0, 0)


def run(
    runtime: VirtualRuntime, model: SizedModel, plan: StagePlan, loss_s: float = 0.0, steps: int = 2
) -> EmulatedSteps:
    return run_steps(runtime, lambda: model.work(plan), [loss_s] * len(model.tokens), steps)


def nbytes(arrays: Sequence[StageArray]) -> int:
    return sum(array.nbytes for array in arrays)


TWO = PlannedStage(0, 1, (1,)), PlannedStage(1, 2, (2,))
TWO_WITH_LOSS = PlannedStage(0, 1, (1,)), PlannedStage(1, 2, (2,), loss=True)


# --- against real models ---


def real_model(family: str, *, lora: bool, targets: Any = FEW) -> tuple[Any, Any]:
    """The work of a real model whose layers have no graphs, and the model."""
    import torch
    from onnx import helper

    from cleave.graphs.calls import layer_calls
    from cleave.graphs.layer_parts import LayerGraphs, LayerPart
    from cleave.graphs.loss_graph import export_loss
    from cleave.graphs.model_graphs import ModelGraphs
    from cleave.training.stages.stage_work import ModelWork
    from tests.graphs.models import small_model, with_lora

    # As many key-value heads as heads: with fewer, a real model's attention is counted too low.
    changed = {"num_key_value_heads": 4} if family == "llama" else {}
    model = small_model(family, **changed)
    if lora:
        model = with_lora(model, targets or "all-linear")
    calls = layer_calls(model, torch.arange(2 * SEQUENCE).reshape(2, SEQUENCE))
    nothing = helper.make_model(helper.make_graph([], "nothing", [], [])).SerializeToString()
    parts = [LayerPart.whole(call, number) for number, call in enumerate(calls)]
    layers = [
        LayerGraphs(nothing, nothing, nothing, {}, tuple(part.held), part.trainable())
        for part in parts
    ]
    graphs = ModelGraphs(calls, parts, layers, export_loss(model, calls))
    return ModelWork(model, graphs, DType.BF16), model


def in_bytes(cost: LayerCost) -> tuple[int, int, int, int]:
    return cost.frozen_bytes, cost.weight_bytes, cost.gradient_bytes, cost.sum_bytes


def sizes(arrays: dict[str, StageArray]) -> Counter[tuple[int, int]]:
    return Counter((array.rows, array.columns) for array in arrays.values())


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("family", ["opt", "llama"])
def test_figures_are_those_of_a_real_model(family: str) -> None:
    real, model = real_model(family, lora=False)
    spec = spec_from_config(model.config.to_dict(), family)
    sized = SizedModel(spec, 5, SEQUENCE, 2, DType.BF16, DType.FP32)
    mine = sized.costs()
    theirs = real.costs([3 * SEQUENCE, 2 * SEQUENCE], SEQUENCE, DType.FP32)
    assert (mine.tokens, mine.width, mine.element_bytes) == ([48, 32], 32, 2)
    assert mine.embeds == theirs.embeds
    assert len(mine.layers) == len(theirs.layers)
    for cost, expected in zip(
        [*mine.layers, mine.loss], [*theirs.layers, theirs.loss], strict=True
    ):
        assert in_bytes(cost) == in_bytes(expected)
        assert cost.spared_flops == pytest.approx(expected.spared_flops, rel=0.02)
        assert cost.flops == pytest.approx(expected.flops, rel=0.02)
        assert cost.forward_flops == pytest.approx(expected.forward_flops, rel=0.02)
        assert cost.working_bytes == pytest.approx(expected.working_bytes, rel=0.02)
    held = real.model.model.decoder.layers[0] if family == "opt" else real.model.model.layers[0]
    shapes = Counter(tuple(p.shape) if p.dim() > 1 else (1, p.numel()) for p in held.parameters())
    assert sizes(dict(sized.work(plan_of(*TWO)).layers[0].parameters)) == shapes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "lora"),
    [
        pytest.param("opt", False, marks=pytest.mark.nightly),
        pytest.param("llama", False, marks=pytest.mark.nightly),
        ("llama", True),
    ],
)
def test_flops_are_those_that_torch_counts(family: str, lora: bool) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    from cleave.graphs.calls import Embedded

    real, model = real_model(family, lora=lora)
    spec = spec_from_config(model.config.to_dict(), family)
    adapters = Adapters(4, targets=FEW) if lora else None
    mine = SizedModel(spec, 2, SEQUENCE, 1, adapters=adapters)
    theirs = real.costs([2 * SEQUENCE], SEQUENCE, DType.BF16)
    part = real.graphs.parts[1]
    batch = Embedded(part.x, [call.extras for call in real.graphs.calls])
    x = part.x.detach().requires_grad_()
    with FlopCounterMode(display=False) as through:
        y = part.call.run(part.held, x, part.call.extras)
    with FlopCounterMode(display=False) as back:
        y.sum().backward()
    tokens = 2 * SEQUENCE
    forward = through.get_total_flops()
    expected = forward / tokens, (forward + back.get_total_flops()) / tokens  # forward again
    for layer in (mine.work(plan_of(*TWO)).layers[1], real.layers([batch])[1]):
        assert (layer.forward_flops, layer.backward_flops) == expected
    for cost in (mine.costs().layers[1], theirs.layers[1]):
        assert (cost.forward_flops, cost.flops - cost.forward_flops) == expected


@pytest.mark.slow
@pytest.mark.parametrize("targets", [FEW, ()])
def test_bytes_are_those_of_a_real_model_with_adapters(targets: tuple[str, ...]) -> None:
    real, model = real_model("llama", lora=True, targets=targets)
    spec = spec_from_config(model.config.to_dict(), "llama")
    mine = SizedModel(spec, 4, SEQUENCE, 2, adapters=Adapters(4, targets)).costs()
    theirs = real.costs([32, 32], SEQUENCE, DType.BF16)
    for cost, expected in zip(
        [*mine.layers, mine.loss], [*theirs.layers, theirs.loss], strict=True
    ):
        assert in_bytes(cost) == in_bytes(expected)
    assert mine.embeds == theirs.embeds == False  # noqa: E712


# --- the model ---


@pytest.mark.parametrize("parts", [0, 5])
def test_a_batch_is_cut_into_its_sequences_at_most(parts: int) -> None:
    with pytest.raises(
        UsageError, match=f"4 sequences cannot be divided into {parts} micro-batches"
    ):
        SizedModel(find_model("opt-nano"), 4, 8, parts)


def test_only_trained_parameters_are_new_in_every_step() -> None:
    model = SizedModel(find_model("llama-nano"), 4, 8, 2, adapters=Adapters(2, FEW[:2]))
    one, other = model.work(plan_of(*TWO_WITH_LOSS)), model.work(plan_of(*TWO_WITH_LOSS))
    for first, second in zip(one.layers, other.layers, strict=True):
        assert first.forward is second.forward
        assert first.extras == second.extras
        new = {
            name for name, array in first.parameters.items() if array is not second.parameters[name]
        }
        assert new == {f"parameter:{name}" for name in first.sums}
        assert len(new) == 4
    assert one.loss is not None
    assert other.loss is not None
    assert one.loss.parameters == other.loss.parameters
    assert not one.embeds


# --- steps ---


def test_what_travels_in_a_step() -> None:
    model = SizedModel(find_model("opt-nano"), 4, 32, 4)
    with_ps, with_loss = (
        run(runtime_of(2), model, plan_of(*stages, kept_batches=4)).steps[1]
        for stages in (TWO, TWO_WITH_LOSS)
    )
    costs = model.costs()
    layers = sum(cost.weight_bytes for cost in costs.layers)
    activations = 4 * 32 * 64 * 2
    messages = 30_000
    down = layers + 4 * activations  # x and dy of two stages
    assert down < with_ps.downlink_bytes < down + messages
    assert down < with_ps.uplink_bytes < down + messages  # y and dx, and gradients
    down = layers + costs.loss.weight_bytes + 3 * activations  # the loss makes its own dy
    targets = 4 * 32 * 8
    assert down + targets < with_loss.downlink_bytes < down + targets + messages
    assert down < with_loss.uplink_bytes < down + messages


def test_devices_sessions_and_the_fleet_count_the_same_work() -> None:
    runtime = runtime_of(2)
    run(runtime, SizedModel(find_model("opt-nano"), 4, 32, 4), plan_of(*TWO_WITH_LOSS))
    cores = [device.core for device in runtime.devices.values()]
    sessions = [session.counters for session in runtime.manager.sessions.values()]
    blocks = sum(core.blocks for core in cores)
    assert blocks == sum(done.blocks for done in sessions) == runtime.counters().blocks > 0
    flops = sum(core.flops for core in cores)
    assert flops == sum(done.flops for done in sessions) == runtime.manager.stages.flops > 0


def test_frozen_parameters_travel_once() -> None:
    model = SizedModel(find_model("opt-nano"), 4, 32, 4, adapters=Adapters(2))
    first, second, third = run(runtime_of(2), model, plan_of(*TWO_WITH_LOSS), steps=3).steps
    frozen = sum(cost.frozen_bytes for cost in (*model.costs().layers, model.costs().loss))
    graphs = 2 * 30_000 + 6_000  # of layers to both devices, and of the loss
    assert first.downlink_bytes - second.downlink_bytes == pytest.approx(frozen + graphs, rel=0.02)
    assert second.downlink_bytes == pytest.approx(third.downlink_bytes, rel=1e-2)
    assert first.seconds > 1.1 * second.seconds
    assert second.seconds == pytest.approx(third.seconds, rel=1e-3)


def test_the_ps_computes_losses_one_after_another_while_devices_go_on() -> None:
    model = SizedModel(find_model("opt-nano"), 4, 32, 4)
    seconds = [
        run(runtime_of(2), model, plan_of(*TWO), loss_s).steps[1].seconds
        for loss_s in (0.0, 0.01, 10.0)
    ]
    assert seconds[1] < seconds[0] + 0.02  # of the four losses, one or two are waited for
    assert seconds[2] == pytest.approx(40.0 + seconds[0], abs=seconds[0])
    assert seconds[2] > 40.0


def test_layers_of_opt_13b_take_what_the_documentation_says() -> None:
    """docs/when-not.md, docs/simulation.md: in GB, of a layer, its attention, and its MLP."""
    spec, whole = find_model("opt-13b"), PlannedStage(2, 3, (0,))
    attention, mlp = whole, PlannedStage(3, 4, (0,), pieces=4)
    layers, parts = (
        SizedModel(spec, 128, 1024, 128, DType.BF16, None, None, in_parts).costs()
        for in_parts in (False, True)
    )
    assert parts.most_pieces(mlp) == mlp.pieces
    needed = held_bytes(layers, whole), held_bytes(parts, attention), held_bytes(parts, mlp)
    assert [round(each / 1e9, 1) for each in needed] == [3.3, 1.4, 2.2]


def test_memory_is_that_of_the_schedulers_own_account_and_as_predicted() -> None:
    model = SizedModel(find_model("llama-nano"), 4, 32, 4)
    runtime = runtime_of(2)
    found = run(runtime, model, plan_of(*TWO_WITH_LOSS))
    costs = model.costs()
    for number, stage in enumerate(TWO_WITH_LOSS, 1):
        rates = runtime.stage_devices()
        plan = predict(costs, [stage], rates, PsCompute(1e9, 0.0)) if stage.first else None
        held = runtime.manager.stages.occupied_bytes(number)
        assert held <= found.memory_bytes[number]
        if plan is not None:
            assert found.memory_bytes[number] <= plan.memory_bytes[number]
    (first, _) = found.steps
    activations = 4 * 32 * 64 * 2
    gradients = sum(cost.gradient_bytes for cost in (*costs.layers, costs.loss))
    losses = 4 * 4
    assert first.kept_bytes == 4 * activations + gradients + losses


@pytest.mark.parametrize("loss", ["server", "device", "slices"])
@pytest.mark.parametrize("adapters", [None, Adapters(4)], ids=["whole", "adapters"])
def test_a_step_takes_as_long_as_predicted(adapters: Adapters | None, loss: str) -> None:
    model = SizedModel(find_model("opt-tiny"), 12, 64, 12, adapters=adapters)
    runtime = runtime_of(7, flops_per_s=2e10)
    last = model.spec.layers
    stages = PlannedStage(0, 2, (1, 3)), PlannedStage(2, last, (2,), loss == "device")
    slices = [
        PlannedStage(last, last, devices, slice=HeadSlice(number, 2))
        for number, devices in enumerate([(4, 5), (6, 7)] if loss == "slices" else [])
    ]
    ps = PsCompute(2e10, 0.0, PsRates())
    plan = predict(model.costs(), stages, runtime.stage_devices(), ps, slices)
    assert plan.loss_at_ps == (loss == "server")
    loss_s = [model.sizes.loss_flops * tokens / ps.flops_per_s for tokens in model.tokens]
    found = run_steps(runtime, lambda: model.work(plan), loss_s)
    step = found.steps[1]
    assert step.seconds == pytest.approx(plan.step_s, rel=0.05)
    assert step.downlink_bytes == pytest.approx(plan.downlink_bytes, rel=0.05)
    assert step.uplink_bytes == pytest.approx(plan.uplink_bytes, rel=0.05)
    for device, nbytes in plan.memory_bytes.items():
        assert found.memory_bytes[device] <= nbytes


def test_a_device_is_never_sent_more_than_it_offers() -> None:
    model = SizedModel(find_model("opt-125m"), 2, 64, 2)
    plan = plan_of(PlannedStage(0, 12, (1, 2)))
    with pytest.raises(ProtocolError, match="bytes are in use"):
        run(runtime_of(2, memory_bytes=20 * MB), model, plan)


def test_a_step_without_devices_ends() -> None:
    runtime = runtime_of(2)
    for number in (1, 2):
        runtime.lose(number, in_s=0.05)
    with pytest.raises(FleetError, match="all emulated devices have left"):
        run(runtime, SizedModel(find_model("opt-nano"), 2, 8, 2), plan_of(*TWO))


def test_what_devices_compute_is_observed() -> None:
    model = SizedModel(find_model("opt-nano"), 4, 32, 4)
    runtime, seen = runtime_of(2), list[GraphExecution]()
    runtime.observers.append(lambda a: seen.append(a) if isinstance(a, GraphExecution) else None)
    run(runtime, model, plan_of(*TWO, kept_batches=4), steps=1)
    (layer,) = model.sizes.parts
    each = layer.forward_flops + layer.backward_flops
    assert sum(one.flops for one in seen) == each * sum(model.tokens) * model.spec.layers
    assert all(one.end_s >= one.begin_s for one in seen)
    assert {one.device for one in seen} == {1, 2}
