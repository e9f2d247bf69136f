"""Divide the fastest devices of a large fleet into groups. Each group serves one stage."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from cleave.planner.plan import DeviceRates
from cleave.planner.stages.estimate import (
    Integers,
    StageTables,
)
from cleave.planner.stages.model import StageModel
from cleave.planner.tiles.shape import Floats

_UNEVEN: Final = 1.1  # minimum ratio of largest to smallest layer for groups by memory


@dataclass(frozen=True, slots=True)
class Grouping:
    """Groups of devices, one group for each stage.

    Attributes:
        members: indices of the devices, ordered by group.
        begins: index in `members` of each group's first device.
    """

    members: Integers
    begins: Integers

    @classmethod
    def of_equal(cls, groups: Integers) -> Grouping:
        """Return groups of equal size. `groups` has the shape (groups, devices per group)."""
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
        """Return a copy with only `member` in the last group; None if a group would be empty."""
        groups = np.split(self.members, self.begins[1:])
        others = [group[group != member] for group in groups[:-1]]
        return Grouping.of([*others, [member]]) if all(map(len, others)) else None


def groupings(
    tables: StageTables, order: Sequence[DeviceRates], for_loss: int | None
) -> Iterator[Grouping]:
    """Yield groupings of the fastest devices with enough total memory for all layers.

    In some groupings, each group has devices of all speeds. In others, the devices of a group have
    similar speed or similar memory.

    Args:
        order: the devices, fastest first.
        for_loss: index of a device with enough memory for the loss; None if no device has enough.
            For a grouping in which no group has enough memory for the loss, a copy whose last
            group consists of this device is also yielded.
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
    """Yield groupings of the fastest devices. Some groupings lack the memory for all layers."""
    every = np.arange(len(order))
    roomiest = np.lexsort((np.array([device.device for device in order]), -memory))
    for stages in _numbers(min(tables.layers, len(order))):
        # Memory requirement of a stage with the mean number of layers, rounded up.
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
    """Yield groupings for stages whose memory requirements differ.

    Each stage has about the same number of layers. The devices with the least memory are assigned
    first, each to the currently slowest stage that fits in its memory.
    """
    each = tables.memory_of_layers.diagonal(1)
    if each.max() < _UNEVEN * each.min():
        return
    cuts = [round(number * tables.layers / stages) for number in range(stages + 1)]
    costs = [tables.by_layer[:, first:stop].sum(axis=1).tolist() for first, stop in pairwise(cuts)]
    needs = [float(tables.memory_of_layers[first, stop]) for first, stop in pairwise(cuts)]
    largest_last = sorted(range(stages), key=lambda stage: needs[stage])
    for many in _numbers(len(order)):
        if memory[:many].max() < max(needs):
            continue  # one stage would have no device
        groups: list[list[int]] = [[] for _ in range(stages)]
        fitting: list[tuple[float, int]] = []  # speed and index of each stage
        larger = largest_last[::-1]
        for number in np.argsort(memory[:many], kind="stable").tolist():
            while larger and needs[larger[-1]] <= memory[number]:
                heapq.heappush(fitting, (0.0, larger.pop()))
            if fitting:
                speed, stage = fitting[0]
                groups[stage].append(number)
                speed += 1 / _seconds(tables.model, costs[stage], order[number])
                heapq.heapreplace(fitting, (speed, stage))
        if all(groups):
            yield Grouping.of(groups)


def by_speed(tables: StageTables, devices: Sequence[DeviceRates]) -> list[DeviceRates]:
    """Return the devices in ascending order of the time that each alone needs for all layers."""
    whole = tables.by_layer[:, :-1].sum(axis=1).tolist()

    def whole_s(device: DeviceRates) -> tuple[float, int]:
        return _seconds(tables.model, whole, device), device.device

    return sorted(devices, key=whole_s)


def _seconds(model: StageModel, costs: Sequence[float], device: DeviceRates) -> float:
    """Return the time in seconds that one device needs to process a batch, without overlap.

    `costs` are the layers' weight bytes, gradient bytes and FLOPs per token.
    """
    weights, gradients, flops = costs
    tokens = sum(model.tokens)
    moved = 2 * tokens * model.width * model.element_bytes
    down_bytes = device.down_bytes(weights + moved, model.coded_ratio)
    up_bytes = device.up_bytes(gradients, model.gradient_coded_ratio)
    up_bytes += device.up_bytes(moved, model.coded_ratio)
    down_s = down_bytes / device.downlink_bytes_per_s
    up_s = up_bytes / device.uplink_bytes_per_s
    return down_s + up_s + tokens * flops / device.flops_per_s


def _numbers(most: int) -> list[int]:
    """Return ascending numbers from 1 to `most`, inclusive, with growing gaps."""
    found, number = [], 1
    while number <= most:
        found.append(number)
        number = max(number + 1, number * 4 // 3)
    return sorted({*found, most} - {0})
