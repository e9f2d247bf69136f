"""Ways to divide the fastest devices of a large fleet into groups, one for each stage."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from cleave.planner.plan import DeviceRates
from cleave.planner.stages.estimate import Integers, StageTables
from cleave.planner.stages.model import StageModel
from cleave.planner.tiles.shape import Floats

_UNEVEN: Final = 1.1  # memory of the largest layer over memory of the smallest


@dataclass(frozen=True, slots=True)
class Grouping:
    """Groups of devices, one for each stage.

    Attributes:
        members: indices into the list of devices, group after group.
        begins: index of each group's first entry in `members`.
    """

    members: Integers
    begins: Integers

    @classmethod
    def of_equal(cls, groups: Integers) -> Grouping:
        """Return groups of equal size; `groups` has a row for each."""
        stages, size = groups.shape
        return cls(groups.ravel(), np.arange(stages) * size)

    @classmethod
    def of(cls, groups: Sequence[Sequence[int]]) -> Grouping:
        ends = np.cumsum([len(group) for group in groups])
        return cls(np.concatenate([*groups]).astype(np.intp), np.append(0, ends[:-1]))

    def devices(self, order: Sequence[DeviceRates]) -> tuple[tuple[DeviceRates, ...], ...]:
        groups = np.split(self.members, self.begins[1:])
        return tuple(tuple(order[number] for number in group.tolist()) for group in groups)

    def least(self, values: Floats | Integers) -> Floats | Integers:
        found: Floats | Integers = np.minimum.reduceat(values[self.members], self.begins)
        return found

    def with_last(self, member: int) -> Grouping | None:
        """Return the grouping with `member` alone in the last group; None if a group is empty."""
        groups = np.split(self.members, self.begins[1:])
        others = [group[group != member] for group in groups[:-1]]
        return Grouping.of([*others, [member]]) if all(map(len, others)) else None


def groupings(
    tables: StageTables, order: Sequence[DeviceRates], for_loss: int | None
) -> Iterator[Grouping]:
    """Yield ways to divide the fastest devices into groups that can hold all layers.

    Either all groups get devices of every speed, or each group gets devices of similar speed.

    Args:
        order: the devices, the fastest first.
        for_loss: index of a device that can hold the loss; None if no device can. It is also tried
            as the last group of groupings in which no group can hold the loss.
    """
    memory = np.array([device.memory_bytes for device in order])
    most = tables.most_layers(memory)
    for grouping in _every(tables, order, memory):
        tried: list[Grouping | None] = [grouping]
        if (
            for_loss is not None
            and grouping.least(memory).max() < tables.memory_of_loss
            and for_loss not in grouping.members[grouping.begins[-1] :]
        ):
            tried.append(grouping.with_last(for_loss))
        for one in tried:
            if one is not None and one.least(most).sum() >= tables.layers:
                yield one


def _every(
    tables: StageTables, order: Sequence[DeviceRates], memory: Integers
) -> Iterator[Grouping]:
    """Yield groupings, including those that cannot hold all layers."""
    every = np.arange(len(order))
    roomiest = np.lexsort((np.array([device.device for device in order]), -memory))
    for stages in _numbers(min(tables.layers, len(order))):
        # Memory for as many layers as a stage has on average.
        least = tables.memory_of_layers.diagonal(-(-tables.layers // stages)).min()
        roomy = np.flatnonzero(memory >= least)
        yield Grouping.of_equal(roomiest[:stages, None])
        for able in [roomy] if len(roomy) == len(order) else [roomy, every]:
            most = min(len(able) // stages, len(tables.model.tokens))
            for size in _numbers(most):
                chosen = able[: size * stages]
                yield Grouping.of_equal(chosen.reshape(size, stages).T)
                yield Grouping.of_equal(chosen.reshape(stages, size))
        yield from _by_room(tables, order, memory, stages)


def _by_room(
    tables: StageTables, order: Sequence[DeviceRates], memory: Integers, stages: int
) -> Iterator[Grouping]:
    """Yield ways to give stages of unequal size the devices that have memory for them.

    Layers are cut evenly. Devices that fit the fewest stages choose first. Each device chooses the
    slowest stage so far that it fits.
    """
    each = tables.memory_of_layers.diagonal(1)
    if each.max() < _UNEVEN * each.min():
        return
    cuts = [round(number * tables.layers / stages) for number in range(stages + 1)]
    needs = [float(tables.memory_of_layers[first, stop]) for first, stop in pairwise(cuts)]
    runs = [_Run.of(tables, first, stop) for first, stop in pairwise(cuts)]
    largest_last = sorted(range(stages), key=lambda stage: needs[stage])
    for many in _numbers(len(order)):
        if memory[:many].max() < max(needs):
            continue  # one stage would have no device
        groups: list[list[int]] = [[] for _ in range(stages)]
        fitting: list[tuple[float, int]] = []  # speed and number of stages
        larger = largest_last[::-1]
        for number in np.argsort(memory[:many], kind="stable").tolist():
            while larger and needs[larger[-1]] <= memory[number]:
                heapq.heappush(fitting, (0.0, larger.pop()))
            if fitting:
                speed, stage = fitting[0]
                groups[stage].append(number)
                speed += 1 / runs[stage].seconds(tables.model, order[number])
                heapq.heapreplace(fitting, (speed, stage))
        if all(groups):
            yield Grouping.of(groups)


def by_speed(tables: StageTables, devices: Sequence[DeviceRates]) -> list[DeviceRates]:
    """Return the devices, ordered by the time that each would need for the whole model."""
    whole = _Run.of(tables, 0, tables.layers)
    seconds = {device.device: whole.seconds(tables.model, device) for device in devices}
    return sorted(devices, key=lambda device: (seconds[device.device], device.device))


@dataclass(frozen=True, slots=True)
class _Run:
    """The costs of a run of layers: bytes of weights and gradients, and FLOPs per token."""

    weights: float
    gradients: float
    flops: float

    @classmethod
    def of(cls, tables: StageTables, first: int, stop: int) -> _Run:
        return cls(*tables.by_layer[:, first:stop].sum(axis=1).tolist())

    def seconds(self, model: StageModel, device: DeviceRates) -> float:
        """Return the seconds that a device needs for the layers without overlap."""
        tokens = sum(model.tokens)
        moved = 2 * tokens * model.width * model.element_bytes
        down_bytes = device.down_bytes(self.weights + moved, model.coded_ratio)
        up_bytes = device.up_bytes(self.gradients, model.gradient_coded_ratio)
        up_bytes += device.up_bytes(moved, model.coded_ratio)
        down_s = down_bytes / device.downlink_bytes_per_s
        up_s = up_bytes / device.uplink_bytes_per_s
        return down_s + up_s + tokens * self.flops / device.flops_per_s


def _numbers(most: int) -> list[int]:
    """Return numbers up to `most` with growing gaps, and `most` itself."""
    found, number = [], 1
    while number <= most:
        found.append(number)
        number = max(number + 1, number * 4 // 3)
    return sorted({*found, most} - {0})
