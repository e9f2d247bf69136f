"""Plans of stages whose weights and optimizer state stay on devices.

Each layer is on exactly one device. Otherwise, the devices of a layer would have to exchange
gradients. The PS or one device computes the loss.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from cleave.errors import DeviceMemoryError
from cleave.planner.plan import DeviceRates
from cleave.planner.stages.model import (
    UPDATE_FLOPS,
    LayerCost,
    PlannedStage,
    PsCompute,
    StageModel,
    StagePlan,
)
from cleave.planner.stages.prediction import GAIN, PAYS_IN_STEPS, held_bytes, predict
from cleave.planner.stages.simulation import costs_of
from cleave.planner.stages.snapshots import SnapshotCosts, least_interval, most_copies

# Weights and two moments, and a snapshot of all three that the device is uploading.
_ARRAYS: Final = 6
_STATE_ARRAYS: Final = 3
_FP32_BYTES: Final = 4


def kept_on_devices(model: StageModel, *, head: bool = False) -> StageModel:
    """Return the costs of a model whose layers' weights and optimizer state stay on devices.

    Args:
        head: whether the weights and optimizer state of the LM head stay on a device, too.
    """

    def kept(cost: LayerCost, embedding_bytes: int = 0) -> LayerCost:
        trained = cost.sum_bytes + embedding_bytes
        return replace(
            cost,
            frozen_bytes=cost.frozen_bytes + _ARRAYS * trained,
            weight_bytes=0,
            gradient_bytes=0,
            sum_bytes=trained,
            update_flops=UPDATE_FLOPS * trained / _FP32_BYTES,
            update_bytes=_STATE_ARRAYS * min(cost.largest_bytes, cost.sum_bytes),
        )

    loss = kept(model.loss, model.embedding_bytes * model.tied) if head else model.loss
    return replace(model, layers=[kept(c) for c in model.layers], loss=loss, resident_head=head)


def plan_resident(model: StageModel, devices: Sequence[DeviceRates], ps: PsCompute) -> StagePlan:
    """Return the plan with the shortest predicted step among the plans tried.

    For each number n, the layers, and the loss if its state is on a device, are divided among the n
    fastest devices so that the slowest stage is as fast as possible. This function is a
    `StagePlanner`.

    Args:
        model: a model returned by `kept_on_devices`.

    Raises:
        DeviceMemoryError: if the devices have too little memory.
    """
    least = least_bytes(model)
    able = sorted(
        (device.for_graphs() for device in devices if device.memory_bytes >= least),
        key=lambda device: (_fair_share_s(model, device, len(devices)), device.device),
    )[: len(model.layers) + model.resident_head]
    by_id = {device.device: device for device in able}
    plans = [predict(model, stages, by_id, ps) for stages in _divisions(model, able)]
    if not plans:
        one = least_bytes(model)
        large = sum(d.memory_bytes >= one for d in devices)
        what = "the LM head and " if model.resident_head else ""
        raise DeviceMemoryError(
            f"{what}{len(model.layers)} layers and their optimizer state do not fit on "
            f"{len(devices)} devices, of which {large} can hold a layer ({one / 1e6:.0f} MB); "
            "connect devices with more memory, or use --state server"
        )
    return min(plans, key=lambda plan: plan.step_s)


def least_bytes(model: StageModel) -> int:
    """Return the memory in bytes that a device needs for one layer."""
    return min(held_bytes(model, PlannedStage(n, n + 1, (0,))) for n in range(len(model.layers)))


def plan_again(
    model: StageModel,
    devices: Sequence[DeviceRates],
    ps: PsCompute,
    *,
    stages: Sequence[PlannedStage],
) -> StagePlan:
    """Return a plan that assigns the same stages to `devices`, the largest to the fastest device.

    If there are fewer devices than stages, some devices get several stages. With `stages` bound,
    this function is a `StagePlanner`.
    """
    able = sorted(
        (device.for_graphs() for device in devices),
        key=lambda device: (_fair_share_s(model, device, len(devices)), device.device),
    )
    found = list(stages)
    largest = sorted(range(len(stages)), key=lambda n: -_flops(model, stages[n]))
    for rank, number in enumerate(largest):
        device = able[rank % len(able)].device
        found[number] = replace(stages[number], devices=(device,))
    return predict(model, found, {device.device: device for device in able}, ps)


def _fair_share_s(model: StageModel, device: DeviceRates, devices: int) -> float:
    """Return the time in seconds that a device would need for an equal share of a step."""
    tokens, every = sum(model.tokens), PlannedStage(0, len(model.layers), (), model.resident_head)
    flops = tokens * _flops(model, every) / devices
    nbytes = 2 * tokens * model.width * model.element_bytes
    slowest = min(device.downlink_bytes_per_s, device.uplink_bytes_per_s)
    return max(flops / device.flops_per_s, nbytes / slowest)


def _flops(model: StageModel, stage: PlannedStage) -> float:
    """Return the FLOPs per token of a stage."""
    return math.fsum(cost.flops for cost in costs_of(model, stage))


def _divisions(model: StageModel, devices: Sequence[DeviceRates]) -> list[list[PlannedStage]]:
    """Return the best division of all layers among the first n devices, for each possible n.

    The loss counts as one more layer if its state is on a device. A device with too little memory
    for a layer gets no stage.
    """
    layers = len(model.layers)
    count = layers + model.resident_head
    # Maps `stop` to the best division of the layers before it: the slowest stage's seconds per
    # token, and the stages.
    best: dict[int, tuple[float, list[PlannedStage]]] = {0: (0.0, [])}
    found: list[list[PlannedStage]] = []
    for device in devices:
        reached = dict(best)  # divisions that leave the device idle
        for first, (slowest_s, stages) in best.items():
            for stop in range(first + 1, count + 1):
                stage = PlannedStage(first, min(stop, layers), (device.device,), stop > layers)
                if any(first < cut < stop for cut in model.cuts):
                    break
                if held_bytes(model, stage) > device.memory_bytes:
                    break
                step_s = max(slowest_s, _flops(model, stage) / device.flops_per_s)
                if stop not in reached or step_s < reached[stop][0]:
                    reached[stop] = step_s, [*stages, stage]
        best = reached
        if count in best and best[count][1] not in found:
            found.append(best[count][1])
    return found


def worth_moving(
    model: StageModel, before: StagePlan, after: StagePlan, devices: Mapping[int, DeviceRates]
) -> bool:
    """Return True if plan `after` saves enough time to be worth moving trained state.

    To change plans, all devices return their state, and then receive the state that they lack.

    Args:
        model: the costs of layers from `kept_on_devices`.
        devices: the devices of both plans, by ID.
    """

    every = [*model.layers, model.loss]

    def layers_of(plan: StagePlan) -> dict[int, set[int]]:
        found: dict[int, set[int]] = {}
        for stage in plan.stages:
            layers = range(stage.first, stage.stop + stage.loss)
            found.setdefault(stage.devices[0], set()).update(layers)
        return found

    def state_bytes(layers: Iterable[int]) -> float:
        return _STATE_ARRAYS * math.fsum(every[layer].sum_bytes for layer in layers)

    held, wanted = layers_of(before), layers_of(after)
    returned_s = fetch_s(model, before, devices)
    received_s = max(
        state_bytes(wanted[d] - held.get(d, set())) / devices[d].downlink_bytes_per_s
        for d in wanted
    )
    saved_s = before.step_s - after.step_s
    return saved_s >= max(GAIN * before.step_s, (returned_s + received_s) / PAYS_IN_STEPS)


def fetch_s(model: StageModel, plan: StagePlan, devices: Mapping[int, DeviceRates]) -> float:
    """Return the time in seconds in which all devices of a plan return their trained state.

    Args:
        model: the costs of layers from `kept_on_devices`.
        devices: the plan's devices by ID, and possibly others.
    """
    found = Counter[int]()
    for stage in plan.stages:
        trained = sum(cost.sum_bytes for cost in costs_of(model, stage))
        found[stage.devices[0]] += _STATE_ARRAYS * trained
    return max(nbytes / devices[d].uplink_bytes_per_s for d, nbytes in found.items())


@dataclass(frozen=True, slots=True)
class Protection:
    """How often devices upload snapshots, and how many stages hot spares follow.

    Attributes:
        interval: number of steps between the starts of two snapshots.
        copies: maximum number of stages that hot spares follow.
    """

    interval: int
    copies: int


def protection(
    model: StageModel,
    plan: StagePlan,
    devices: Mapping[int, DeviceRates],
    between_losses_s: float,
    between_departures_s: float,
) -> Protection:
    """Return the snapshot interval, and the maximum number of stages that hot spares follow.

    A snapshot covers all stages, so the stage with the slowest upload determines the interval.

    Args:
        model: the costs of layers from `kept_on_devices`.
        devices: the plan's devices by ID; other devices are ignored.
        between_losses_s: mean time in seconds between losses that need a snapshot.
        between_departures_s: mean time in seconds between losses of any devices that hold a stage.
    """
    tokens = sum(model.tokens)
    way = tokens * model.width * model.element_bytes  # bytes of a stage's inputs in one step
    found: list[SnapshotCosts] = []
    snapshot_bytes = 0
    for stage in plan.stages:
        device = devices[stage.devices[0]]
        state = _STATE_ARRAYS * sum(cost.sum_bytes for cost in costs_of(model, stage))
        snapshot_bytes += state
        flops_s = tokens * _flops(model, stage) / device.flops_per_s
        costs = SnapshotCosts(
            step_s=plan.step_s,
            upload_s=state / device.uplink_bytes_per_s,
            idle_s=max(0.0, plan.step_s - 2 * way / device.uplink_bytes_per_s),
            replay_s=max(flops_s, 2 * way / device.downlink_bytes_per_s),
            restart_s=state / device.downlink_bytes_per_s,
            between_losses_s=between_losses_s,
        )
        found.append(costs)
    crossing = 4 * len(plan.stages) * way
    interval = max(
        math.ceil(least_interval(snapshot_bytes, crossing)),
        *(costs.best_interval() for costs in found),
    )
    churn = [replace(costs, between_losses_s=between_departures_s) for costs in found]
    saved = max(costs.lost_share(interval) for costs in churn)
    copies = most_copies(len(found), snapshot_bytes / (interval * crossing), saved)
    return Protection(interval, copies)
