"""Predict the time of a step by stages and the memory requirement of each device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from cleave.errors import PlanError
from cleave.planner.plan import DeviceRates
from cleave.planner.stages.model import (
    NOTHING_KEPT,
    PIECE_COST,
    HeadSlice,
    Keep,
    KeptBatches,
    LayerCost,
    PlannedStage,
    PsCompute,
    StageModel,
    StagePlan,
)
from cleave.planner.stages.rules import REQUESTS_AT_ONCE
from cleave.planner.stages.simulated import SimulatedDevice
from cleave.planner.stages.simulation import StageSimulation, costs_of

GRAPH_BYTES: Final = 100_000  # memory for a stage's graphs, without weights and activations

# Memory for ONNX Runtime, which a device imports for its first graph.
RUNTIME_BYTES: Final = 41_000_000
SPARE: Final = 1.04  # factor that allows for memory fragmentation
_FP32_BYTES: Final = 4

# A new plan for the same devices replaces the current plan if it saves at least this share of a
# step, and recovers the time for the change within this many steps.
GAIN: Final = 0.05
PAYS_IN_STEPS: Final = 20

_SMALL: Final = 0.1  # share of a link's time below which `_link` omits a kind of traffic


def local_step_s(model: StageModel, ps: PsCompute) -> float:
    """Return the step time in seconds of the PS alone, without activation recomputation."""
    flops = math.fsum(layer.flops - layer.forward_flops for layer in model.layers)
    flops += math.fsum(layers.flops for layers in model.ps_layers)
    token_s = flops / ps.flops_per_s + ps.loss_s(model.loss)
    return sum(model.tokens) * token_s + ps.optimizer_s


def held_bytes(
    model: StageModel, stage: PlannedStage, kept_batches: KeptBatches = NOTHING_KEPT
) -> int:
    """Return the memory requirement of a stage on a device, in bytes.

    The device retains `kept_batches` in addition to the micro-batch that it computes.
    """
    costs = costs_of(model, stage)
    # On a stage with the loss, the backward pass follows the forward pass immediately. So the
    # retained micro-batch is the one that the device computes.
    computed = 0 if stage.loss and kept_batches.activations else 1
    return math.ceil(
        SPARE
        * (
            sum(cost.frozen_bytes + cost.weight_bytes + cost.sum_bytes for cost in costs)
            + max(  # updates follow all passes
                max(widened_bytes(model, cost) for cost in costs) + run_bytes(model, stage),
                max(cost.update_bytes for cost in costs),
            )
            + input_bytes(model)
            + RUNTIME_BYTES
            + (computed + kept_batches.inputs) * kept_bytes(model, stage, Keep.INPUTS)
            + kept_batches.activations * kept_bytes(model, stage, Keep.ACTIVATIONS)
        )
    )


def held_by_device(
    model: StageModel,
    stages: Iterable[PlannedStage],
    kept_batches: Mapping[int, KeptBatches] | None = None,
) -> dict[int, int]:
    """Return the memory requirement of each device for all its stages and slices, in bytes.

    Args:
        stages: all stages, followed by all slices of the loss.
        kept_batches: numbers of micro-batches that each device retains without computing them; by
            default, none. Each retained micro-batch counts with the size for the device's stage
            that retains the most.
    """
    found: dict[int, int] = {}
    most: dict[int, int] = {}  # memory for the retained micro-batches
    for stage in stages:
        for device in stage.devices:
            kept = NOTHING_KEPT if kept_batches is None else kept_batches[device]
            alone = held_bytes(model, stage)
            found[device] = found.get(device, 0) + alone
            most[device] = max(most.get(device, 0), held_bytes(model, stage, kept) - alone)
    return {device: found[device] + most[device] for device in found}


def kept_bytes(model: StageModel, stage: PlannedStage, keep: Keep) -> int:
    """Return the memory for the data that a stage's device retains of a micro-batch, in bytes."""
    layers = model.layers[stage.first : stage.stop]
    if keep is Keep.NOTHING:
        return 0
    tokens = max(model.tokens)
    number = len(layers) if stage.slice is None else 1
    inputs = number * tokens * model.width * _FP32_BYTES + mask_bytes(model) * bool(layers)
    if keep is Keep.INPUTS:
        return inputs
    return inputs + math.ceil(
        tokens * math.fsum(cost.activation_bytes for cost in costs_of(model, stage))
    )


def most_kept(
    model: StageModel, stages: Sequence[PlannedStage], spare_bytes: int, batches: int
) -> KeptBatches:
    """Return how many micro-batches a device has enough memory to retain.

    Inputs of up to `batches` micro-batches per stage or slice take precedence over activations. On
    a stage with the loss, a device retains at most one micro-batch, because the backward pass
    follows the forward pass immediately.

    Args:
        stages: all stages and slices of the device. A micro-batch may be retained for any of them.
        spare_bytes: memory in bytes that remains on the device if it retains no micro-batches.
    """
    inputs, whole = (
        math.ceil(SPARE * max(kept_bytes(model, stage, keep) for stage in stages))
        for keep in (Keep.INPUTS, Keep.ACTIVATIONS)
    )
    spared = any(cost.spared_flops for stage in stages for cost in costs_of(model, stage))
    if not inputs or spare_bytes < 0:
        return KeptBatches()
    if any(stage.loss for stage in stages):
        return KeptBatches(activations=int(spared and whole - inputs <= spare_bytes))
    each = min(len(model.tokens), batches)
    most = min(len(stages) * each, spare_bytes // inputs)
    if not spared:
        return KeptBatches(most)
    activations = (spare_bytes - most * inputs) // max(1, whole - inputs)
    activations = min(most, activations)
    return KeptBatches(most - activations, activations)


def widened_bytes(model: StageModel, cost: LayerCost) -> int:
    """Return the memory for parameters that a run upcasts or dequantizes to fp32, in bytes."""
    narrow = model.element_bytes < _FP32_BYTES
    return max(cost.dequantized_bytes, cost.largest_bytes if narrow else 0)


def run_bytes(model: StageModel, stage: PlannedStage) -> int:
    """Return the memory for a stage's graphs and its largest graph run, in bytes."""
    of_token = max(cost.working_bytes for cost in costs_of(model, stage))
    return working_bytes(model, of_token / stage.pieces)


def in_pieces(
    model: StageModel, stage: PlannedStage, devices_by_id: Mapping[int, DeviceRates]
) -> PlannedStage:
    """Return a copy of a stage with either 1 or the maximum number of chunks per micro-batch.

    The maximum is used if a device of the stage has too little memory for a whole micro-batch, or
    if, on every device, a chunk's transfer takes at least as long as the chunk's backward pass.
    """
    whole, cut = (replace(stage, pieces=n) for n in (1, model.most_pieces(stage)))
    devices = [devices_by_id[device] for device in stage.devices]
    needed = held_bytes(model, whole)
    if any(needed > device.memory_bytes for device in devices):
        return cut
    activation = model.width * model.element_bytes
    back_flops = math.fsum(cost.flops - cost.forward_flops for cost in costs_of(model, stage))
    for device in devices:
        down_s = device.down_bytes(activation, model.coded_ratio) / device.downlink_bytes_per_s
        up_s = device.up_bytes(activation, model.coded_ratio) / device.uplink_bytes_per_s
        if PIECE_COST * back_flops / device.flops_per_s > max(down_s, up_s):
            return whole
    return cut


def working_bytes(model: StageModel, of_token: float) -> int:
    """Return the memory in bytes for graphs and a run that needs `of_token` bytes per token."""
    return math.ceil(of_token * max(model.tokens)) + GRAPH_BYTES


def input_bytes(model: StageModel) -> int:
    """Return the memory needed for activations in transit, in bytes.

    These are x, y, dy and dx of the two largest micro-batches.
    """
    rows = 4 * sum(sorted(model.tokens, reverse=True)[:REQUESTS_AT_ONCE])
    return rows * model.width * _FP32_BYTES


def mask_bytes(model: StageModel) -> int:
    """Return the size of one micro-batch's layer arguments, without the layer input, in bytes."""
    return math.ceil(max(model.tokens) * model.beside_bytes)


def predict(
    model: StageModel,
    stages: Sequence[PlannedStage],
    devices_by_id: Mapping[int, DeviceRates],
    ps: PsCompute,
    slices: Sequence[PlannedStage] = (),
    *,
    forward_first: bool = False,
) -> StagePlan:
    """Predict the time, memory and traffic of a step with `stages`.

    Two memory policies are simulated, and the faster one is used. With the first policy, each
    device retains the layer inputs of as many micro-batches as possible. With the second policy,
    each device retains fewer layer inputs, which leaves more memory for activations.

    Args:
        stages: the stages in order. Each layer is in exactly one stage.
        devices_by_id: maps device IDs to devices, and includes all devices of the stages. A device
            may have several stages, and one slice of the loss.
        slices: slices of the loss; empty if the loss is not vocabulary-parallel.
        forward_first: whether a device that could run a pass in either direction always runs the
            forward pass, instead of alternating.

    Raises:
        PlanError: if a device has too little memory for its stages and slices.
    """
    stages = [in_pieces(model, stage, devices_by_id) for stage in stages]
    held = held_by_device(model, (*stages, *slices))
    for device, needed in held.items():
        if needed > (offered := devices_by_id[device].memory_bytes):
            raise PlanError(
                f"device {device} offers {offered / 1e6:.0f} MB of memory, but its layers need "
                f"{needed / 1e6:.0f} MB; offer more memory, or assign it fewer layers"
            )
    parts: dict[int, list[PlannedStage]] = {}
    for stage in (*stages, *slices):
        for device in stage.devices:
            parts.setdefault(device, []).append(stage)
    policies = [
        {
            device: most_kept(
                model, mine, devices_by_id[device].memory_bytes - held[device], batches
            )
            for device, mine in parts.items()
        }
        for batches in (len(model.tokens), REQUESTS_AT_ONCE * (len(stages) + 1))
    ]
    if policies[0] == policies[1]:
        policies.pop()
    plans = []
    for kept in policies:
        run = StageSimulation(
            model, stages, kept, devices_by_id, ps, slices, forward_first=forward_first
        )
        plans.append(replace(_simulated(run, kept, ps), forward_first=forward_first))
    return min(plans, key=lambda plan: plan.step_s)


def _simulated(run: StageSimulation, kept: dict[int, KeptBatches], ps: PsCompute) -> StagePlan:
    """Run a simulation of a step and return the plan with the predicted time and traffic."""
    model = run.model
    # The simulation does not include PS layers before the first stage. The PS computes the forward
    # pass of these layers before the simulated part of a step, and their backward pass after it.
    first = math.fsum(layers.flops for layers in model.ps_layers if not layers.before)
    first_s = sum(model.tokens) * first / ps.flops_per_s
    step_s = run.end_s() + first_s + ps.optimizer_s
    stages = [stage.plan for stage in run.stages]
    slices = [stage.plan for stage in run.slices]
    memory = held_by_device(model, (*stages, *slices), kept)
    down, up = run.egress.passed_bytes, run.ingress.passed_bytes
    reason = _reason(model, run, ps, step_s)
    delay = max(1 + d.delayed_s / max(d.computes_s, 1e-9) for d in run.devices.values())
    return StagePlan(
        tuple(stages), kept, step_s, memory, round(down), round(up), reason, tuple(slices),
        own_delay=delay,
    )  # fmt: skip


def predict_again(
    model: StageModel,
    plan: StagePlan,
    devices_by_id: Mapping[int, DeviceRates],
    ps: PsCompute,
) -> StagePlan:
    """Return a copy of a plan, predicted again with new speeds of the devices or the PS."""
    run = _simulation(model, plan, devices_by_id, ps)
    return replace(_simulated(run, plan.kept_batches, ps), forward_first=plan.forward_first)


def worth_changing(
    model: StageModel, before: StagePlan, after: StagePlan, devices: Mapping[int, DeviceRates]
) -> bool:
    """Return True if plan `after` saves enough to replace plan `before` for the same devices.

    Devices must first receive the frozen parameters that they do not hold yet, such as those of the
    base model under adapters.
    """
    held, saved_s = _frozen_parts(model, before), before.step_s - after.step_s
    receiving_s = max(
        sum(nbytes for part, nbytes in parts.items() if part not in held.get(device, {}))
        / devices[device].downlink_bytes_per_s
        for device, parts in _frozen_parts(model, after).items()
    )
    return saved_s >= max(GAIN * before.step_s, receiving_s / PAYS_IN_STEPS)


def _frozen_parts(model: StageModel, plan: StagePlan) -> dict[int, dict[int | HeadSlice, int]]:
    """Return the size in bytes of each layer's and slice's frozen parameters, by device ID."""
    found: dict[int, dict[int | HeadSlice, int]] = {}
    for stage in plan.planned:
        parts: dict[int | HeadSlice, int] = {
            number: model.layers[number].frozen_bytes for number in range(stage.first, stage.stop)
        }
        if stage.loss:
            parts[len(model.layers)] = model.loss.frozen_bytes
        if stage.slice is not None:
            parts[stage.slice] = model.slice_of_loss(stage.slice.share).frozen_bytes
        for device in stage.devices:
            found.setdefault(device, {}).update(parts)
    return found


def _simulation(
    model: StageModel,
    plan: StagePlan,
    devices_by_id: Mapping[int, DeviceRates],
    ps: PsCompute,
) -> StageSimulation:
    return StageSimulation(
        model,
        plan.stages,
        plan.kept_batches,
        devices_by_id,
        ps,
        plan.slices,
        forward_first=plan.forward_first,
    )


def simulated_devices(
    model: StageModel,
    plan: StagePlan,
    devices_by_id: Mapping[int, DeviceRates],
    ps: PsCompute,
) -> Mapping[int, SimulatedDevice]:
    """Simulate a planned step, and return the final state of each device, by device ID.

    The state includes how long the device's links and processor were busy.
    """
    run = _simulation(model, plan, devices_by_id, ps)
    run.end_s()
    return run.devices


def _reason(model: StageModel, run: StageSimulation, ps: PsCompute, step_s: float) -> str:
    """Return a clause that names what takes most of the step."""
    found = [
        (run.egress.passed_bytes * run.egress.byte_s, "sending on the server's network card takes"),
        (
            run.ingress.passed_bytes * run.ingress.byte_s,
            "receiving on the server's network card takes",
        ),
        (ps.optimizer_s, "the server's gradient sums and optimizer take"),
        (
            sum(model.tokens) * math.fsum(p.flops for p in model.ps_layers) / ps.flops_per_s,
            "the layers that stay on the server take",
        ),
    ]
    for number, device in sorted(run.devices.items()):
        name = f"device {number}"
        layers = _layers(stage.plan for stage, _ in reversed(device.stages))
        found += [
            _link(
                (device.gradients_s, f"the gradients of {layers}"), device.y_s, f"uplink of {name}"
            ),
            _link(
                (device.weights_s, f"the weights of {layers}"), device.x_s, f"downlink of {name}"
            ),
            (device.computes_s, f"the multiplications of {layers} on {name} take"),
        ]
    if not run.slices and not run.stages[-1].plan.loss:
        loss_s = sum(model.tokens) * ps.loss_s(model.loss)
        found.append((loss_s, "the loss on the server takes"))
    seconds, what = max(found, key=lambda each: each[0])
    return f"{what} {in_seconds(seconds)} of {in_seconds(step_s)}"


def _link(parameters: tuple[float, str], activations_s: float, link: str) -> tuple[float, str]:
    """Return the time of a link's main traffic, and a phrase that names traffic and link."""
    busy_s = parameters[0] + activations_s
    large = [
        part for part in (parameters, (activations_s, "activations")) if part[0] > _SMALL * busy_s
    ]
    named = " and ".join(what for _, what in large)
    return math.fsum(seconds for seconds, _ in large), f"{named} on the {link} take"


def in_seconds(value_s: float) -> str:
    """Return a time of `value_s` seconds as user-facing text with the unit."""
    return f"{value_s:,.0f} s" if value_s >= 999.5 else f"{value_s:.3g} s"


def _layers(stages: Iterable[PlannedStage]) -> str:
    stages = list(stages)
    if (part := stages[0].slice) is not None:
        return f"1 of {part.of} slices of the loss"
    number = sum(stage.stop - stage.first for stage in stages)
    if not number:
        return "the loss"
    text = "1 layer" if number == 1 else f"{number} layers"
    return f"{text} and the loss" if any(stage.loss for stage in stages) else text
