"""Ways to compute the loss on devices in slices of the vocabulary (vocabulary-parallel loss).

Slices are useful if no stage has enough memory for the whole loss, or if there are few
micro-batches, because several devices then work on one micro-batch at the same time. There are two
variants. In the first, each slice has a group of devices that compute no layers, and each
micro-batch passes through one device of each group. In the second, each slice has one device, which
also computes layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Final

from cleave.planner.plan import DeviceRates
from cleave.planner.stages.model import (
    HeadSlice,
    KeptBatches,
    PlannedStage,
    PsCompute,
    StageModel,
    StagePlan,
)
from cleave.planner.stages.prediction import held_bytes, predict, simulated_devices
from cleave.planner.stages.rules import REQUESTS_AT_ONCE

_MOST_WAYS: Final = 5
_FEW_DEVICES: Final = 64  # a larger fleet can dedicate devices to slices
_MOST_SHARED: Final = 16  # maximum number of slices on devices that also compute layers
# Slices are tried if a step without the loss takes at most this share of the whole step's time (or
# of its FLOPs, for slices on devices that also have layers).
_WORTH: Final = 0.95
# For slices of unequal size, the LM head is cut into at most this number of equal parts.
_PARTS: Final = 64
_SHARES: Final = (1.0, 0.5, 0.25, 0.125)  # time for the slices divided by time for the layers


@dataclass(frozen=True, slots=True)
class LossSlices:
    """The slices of a loss, with the devices of each slice.

    Attributes:
        stages: the slices in order, as stages without layers.
        flops_per_s: throughput that the PS would need to match the speed of the slices.
        shared_bytes: memory for one slice, if its device also computes layers; otherwise 0.
    """

    stages: tuple[PlannedStage, ...]
    devices: tuple[DeviceRates, ...]
    flops_per_s: float
    shared_bytes: int = 0

    def others(self, devices: Sequence[DeviceRates]) -> list[DeviceRates]:
        """Return the devices that may compute layers, with the memory left by the slices."""
        used = {device.device for device in self.devices}
        if not self.shared_bytes:
            return [device for device in devices if device.device not in used]
        return [
            replace(device, memory_bytes=device.memory_bytes - self.shared_bytes)
            if device.device in used
            else device
            for device in devices
        ]


def ways_to_slice(
    model: StageModel, devices: Sequence[DeviceRates], ps: PsCompute, plan: StagePlan
) -> Iterator[LossSlices]:
    """Yield slicings of the loss that may shorten the step; none if the loss takes little time.

    In a small fleet, devices with layers may also have slices. This can help even if the loss is
    not the bottleneck of `plan`, because slicing lets the planner divide the layers differently.
    Otherwise, slices are on devices without layers. There are then as few slices as the devices'
    memory allows, or twice as many. Each slice gets enough devices to finish in the time that the
    layers take, or in a fraction of it. If `plan` leaves enough devices idle, slices get the
    fastest of those.

    Args:
        plan: the best plan with the loss on the PS or on the last stage.
    """
    share_of_loss = model.loss.flops / (model.loss.flops + sum(each.flops for each in model.layers))
    if len(devices) <= _FEW_DEVICES and share_of_loss > 1 - _WORTH:
        yield from _shared(model, devices)
    by_id = {device.device: device for device in devices}
    stages = (*plan.stages[:-1], replace(plan.stages[-1], loss=False))
    without = predict(model, stages, by_id, replace(ps, loss_flops_per_s=math.inf))
    if without.step_s > _WORTH * plan.step_s:
        return
    layers_s = max(without.step_s - ps.optimizer_s, 1e-9)
    tried: set[tuple[PlannedStage, ...]] = set()
    least = _fewest(model, devices)
    used = {device for stage in plan.stages for device in stage.devices}
    for count in (least, 2 * least) if least else ():
        fitting = _fitting(model, devices, count)
        idle = [each for each in fitting if each[1].device not in used]
        for share in _SHARES:
            found = _dealt(model, fitting, idle, count, share * layers_s, len(devices) - 1)
            if found is not None and found.stages not in tried and len(tried) < _MOST_WAYS:
                tried.add(found.stages)
                yield found


def balanced(
    model: StageModel, plan: StagePlan, devices_by_id: Mapping[int, DeviceRates], ps: PsCompute
) -> tuple[PlannedStage, ...] | None:
    """Return slices whose sizes give all devices of a plan the same computing time.

    A device with much other work gets a small slice, or none.

    Returns:
        The slices; None if the plan has no slices, or several devices for a slice.
    """
    if not plan.slices or any(len(each.devices) > 1 for each in plan.slices):
        return None
    simulated = simulated_devices(model, plan, devices_by_id, ps)
    flops = sum(model.tokens) * model.loss.flops
    others: dict[int, float] = {}  # device ID to seconds of other work
    for each in plan.slices:
        (device,) = each.devices
        assert each.slice is not None
        whole_s = flops / devices_by_id[device].flops_per_s
        others[device] = simulated[device].computes_s - each.slice.share * whole_s
    shares = _levelled(
        [(busy_s, devices_by_id[device].flops_per_s / flops) for device, busy_s in others.items()]
    )
    parts = min(_PARTS, model.most_slices)
    until = [0, *(round(parts * each) for each in accumulate(shares))]
    having = [
        (device, stop)
        for device, (first, stop) in zip(others, pairwise(until), strict=True)
        if stop > first
    ]
    cuts, last = (0, *(stop for _, stop in having)), len(model.layers)
    return tuple(
        PlannedStage(last, last, (device,), slice=HeadSlice(number, len(having), cuts))
        for number, (device, _) in enumerate(having)
    )


def _levelled(devices: Sequence[tuple[float, float]]) -> list[float]:
    """Divide work into shares so that all devices are busy for the same time, if possible.

    Args:
        devices: for each device, the seconds of its other work, and the share of the divided work
            that it completes per second.
    """
    # All devices that are busy for less than `done / rate` seconds are busy until then.
    done, rate = 1.0, 0.0
    for busy_s, share_per_s in sorted(devices):
        if rate and busy_s >= done / rate:
            break
        done += busy_s * share_per_s
        rate += share_per_s
    return [max(0.0, done / rate - busy_s) * share_per_s for busy_s, share_per_s in devices]


def _shared(model: StageModel, devices: Sequence[DeviceRates]) -> Iterator[LossSlices]:
    """Yield ways to put one slice on each of the fastest devices, which also compute layers."""
    most = min(len(devices), _MOST_SHARED, model.most_slices // 2)
    for count in dict.fromkeys((most, (most + 1) // 2)):
        fitting = _fitting(model, devices, count)[:count] if count > 1 else []
        if len(fitting) < max(count, 2):
            continue
        chosen = tuple(device for _, device in fitting)
        last, flops = len(model.layers), sum(model.tokens) * model.loss.flops
        stages = tuple(
            PlannedStage(last, last, (device.device,), slice=HeadSlice(number, count))
            for number, device in enumerate(chosen)
        )
        slowest_s = max(seconds for seconds, _ in fitting)
        yield LossSlices(stages, chosen, flops / slowest_s, _needed_bytes(model, count))


def _fewest(model: StageModel, devices: Sequence[DeviceRates]) -> int:
    """Return the smallest number of slices that fit in the devices' memory; 0 if no number does."""
    for count in range(1, min(len(devices), model.most_slices // 2) + 1):
        needed = _needed_bytes(model, count)
        if sum(device.memory_bytes >= needed for device in devices) >= count:
            return count
    return 0


def _needed_bytes(model: StageModel, count: int) -> int:
    """Return the memory that a device needs for one of `count` slices of the loss, in bytes."""
    last = len(model.layers)
    part = PlannedStage(last, last, (0,), slice=HeadSlice(0, count))
    return held_bytes(model, part, KeptBatches(REQUESTS_AT_ONCE))


def _fitting(
    model: StageModel, devices: Sequence[DeviceRates], count: int
) -> list[tuple[float, DeviceRates]]:
    """Return the devices with enough memory for one of `count` slices, the fastest first.

    Each device is preceded by the time in seconds that it alone would need to process one slice for
    all micro-batches.
    """
    needed, cost = _needed_bytes(model, count), model.slice_of_loss(1 / count)
    tokens = sum(model.tokens)
    moved = tokens * model.width * model.element_bytes
    able = [
        (
            max(
                d.down_bytes(moved, model.coded_ratio) / d.downlink_bytes_per_s,
                d.up_bytes(moved, model.coded_ratio) / d.uplink_bytes_per_s,
                tokens * cost.flops / d.flops_per_s,
            ),
            d,
        )
        for d in devices
        if d.memory_bytes >= needed
    ]
    return sorted(able, key=lambda each: (each[0], each[1].device))


def _dealt(
    model: StageModel,
    fitting: Sequence[tuple[float, DeviceRates]],
    idle: Sequence[tuple[float, DeviceRates]],
    count: int,
    within_s: float,
    most: int,
) -> LossSlices | None:
    """Assign devices to slices so that each slice takes about `within_s`; None if impossible.

    If enough devices are idle, the fastest idle devices are used. Otherwise, devices of every speed
    are used, so that devices of every speed remain for the layers. `fitting` and `idle` contain
    pairs from `_fitting`. `most` is the maximum number of devices to use.
    """
    most = min(most, len(fitting), count * len(model.tokens))
    if most < count:
        return None
    mean_s = len(fitting) / sum(1 / seconds for seconds, _ in fitting)
    wanted = min(most // count, math.ceil(mean_s / within_s)) * count
    if len(idle) >= wanted:
        chosen = idle[:wanted]
    else:
        chosen = [fitting[number * len(fitting) // wanted] for number in range(wanted)]
    groups: list[list[DeviceRates]] = [[] for _ in range(count)]
    speed = [0.0] * count
    for seconds, device in chosen:
        slowest = speed.index(min(speed))
        groups[slowest].append(device)
        speed[slowest] += 1 / seconds
    last = len(model.layers)
    stages = tuple(
        PlannedStage(last, last, tuple(sorted(d.device for d in g)), slice=HeadSlice(n, count))
        for n, g in enumerate(groups)
    )
    flops = sum(model.tokens) * model.loss.flops * min(speed)
    return LossSlices(stages, tuple(d for group in groups for d in group), flops)
