"""Ways to divide the fastest devices of a large fleet into groups. Each group serves one stage."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Final

import numpy as np

from cleave.planner.plan import DeviceRates
from cleave.planner.stages.climb import Changes, StageClimb, groups_of_stages
from cleave.planner.stages.estimate import (
    Alone,
    Arrangements,
    Columns,
    Estimator,
    Integers,
    Stages,
    StageTables,
    Truths,
)
from cleave.planner.stages.model import PsCompute, StageModel
from cleave.planner.stages.rules import REQUESTS_AT_ONCE
from cleave.planner.tiles.shape import Floats

_UNEVEN: Final = 1.1  # memory of the largest layer divided by memory of the smallest layer


@dataclass(frozen=True, slots=True)
class Grouping:
    """Groups of devices, one group for each stage.

    Attributes:
        members: indices of the devices of all groups in the list of devices, group after group.
        begins: index in `members` of each group's first device.
    """

    members: Integers
    begins: Integers

    @classmethod
    def of_equal(cls, groups: Integers) -> Grouping:
        """Return groups of equal size.

        Args:
            groups: indices of devices, shape (groups, devices per group).
        """
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
        """Return a copy whose last group consists only of the device `member`.

        The result is None if another group would become empty.
        """
        groups = np.split(self.members, self.begins[1:])
        others = [group[group != member] for group in groups[:-1]]
        return Grouping.of([*others, [member]]) if all(map(len, others)) else None


def groupings(
    tables: StageTables, order: Sequence[DeviceRates], for_loss: int | None
) -> Iterator[Grouping]:
    """Yield groupings of the fastest devices whose memory is sufficient for all layers.

    Groupings of two types are tried: each group gets devices of every speed, or each group gets
    devices of similar speed.

    Args:
        tables: costs of runs of layers.
        order: the devices, the fastest first.
        for_loss: index of a device with enough memory for the loss; None if there is none. If no
            group of a grouping has enough memory for the loss, a copy of the grouping with this
            device as the last group is yielded as well.
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
    """Yield groupings, including groupings with too little memory for all layers."""
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
    first. Each device is assigned to the slowest stage so far for which it has enough memory.
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
    """Return the devices sorted by the time that each device would need for the whole model."""
    whole = _Run.of(tables, 0, tables.layers)
    seconds = {device.device: whole.seconds(tables.model, device) for device in devices}
    return sorted(devices, key=lambda device: (seconds[device.device], device.device))


@dataclass(frozen=True, slots=True)
class _Run:
    """The costs of a run of consecutive layers.

    Attributes:
        weights, gradients: bytes of weights and of weight gradients in messages.
        flops: FLOPs per token of the forward and the backward pass.
    """

    weights: float
    gradients: float
    flops: float

    @classmethod
    def of(cls, tables: StageTables, first: int, stop: int) -> _Run:
        return cls(*tables.by_layer[:, first:stop].sum(axis=1).tolist())

    def seconds(self, model: StageModel, device: DeviceRates) -> float:
        """Return the time in seconds in which a device trains the layers on a whole batch.

        Transfers and computation are assumed not to overlap.
        """
        tokens = sum(model.tokens)
        moved = 2 * tokens * model.width * model.element_bytes
        down_bytes = device.down_bytes(self.weights + moved, model.coded_ratio)
        up_bytes = device.up_bytes(self.gradients, model.gradient_coded_ratio)
        up_bytes += device.up_bytes(moved, model.coded_ratio)
        down_s = down_bytes / device.downlink_bytes_per_s
        up_s = up_bytes / device.uplink_bytes_per_s
        return down_s + up_s + tokens * self.flops / device.flops_per_s


def _numbers(most: int) -> list[int]:
    """Return ascending numbers from 1 to `most`, inclusive, with growing gaps."""
    found, number = [], 1
    while number <= most:
        found.append(number)
        number = max(number + 1, number * 4 // 3)
    return sorted({*found, most} - {0})


_BEGUN: Final = 4  # initial arrangements that are improved for a few rounds


class GroupClimb(StageClimb):
    """A local search among arrangements in which each stage has exactly one group of devices.

    The number of groups must be at most the number of layers. See `StageClimb`.
    """

    begun = _BEGUN

    @cached_property
    def changes(self) -> Changes:
        return Changes(len(self.groups), 0)

    def deals(self) -> Iterator[tuple[tuple[int, ...], ...]]:
        """Yield the only assignment of groups to stages: one group for each stage, in order."""
        yield tuple((number,) for number in range(len(self.groups)))

    def seconds_of_changes(self, them: Arrangements) -> Floats:
        """Return the estimated step time after each change, shape (arrangements, changes).

        If an arrangement fits in memory but a changed arrangement does not, the estimate of the
        changed arrangement is infinite.
        """
        found = np.full((len(them), self.changes.count), np.inf)
        fit = self._pairs.fit(them)
        if not fit.all():
            found[~fit] = super().seconds_of_changes(them.take(np.flatnonzero(~fit)))
        fitting = np.flatnonzero(fit)
        row, number = np.nonzero(self.changes.that_fit(them.take(fitting), self._pairs.fits))
        row = fitting[row]
        found[row, number] = self._pairs.seconds(self.changed(them, row, number))
        return found

    @cached_property
    def _pairs(self) -> _Pairs:
        return _Pairs(self.tables, self.columns, self.ps)


class _Pairs:
    """The closed form of each possible stage, for each group of devices and each run of layers.

    Attributes:
        fits: whether a group has enough memory for a run of at least one layer, indexed by group,
            loss on the stage, first layer and stop.
    """

    def __init__(self, tables: StageTables, columns: Columns, ps: PsCompute) -> None:
        self._tables = tables
        self._estimator = Estimator(tables, columns, ps)
        side = tables.layers + 1
        layers = np.arange(side)
        some = np.stack([layers[:, None] < layers] * 2).ravel()
        fits: Truths = (tables.memory <= columns.memory[:, None]) & some
        group, cell = np.nonzero(fits)
        stages = Stages(cell, cell, columns.count[group])
        under_way = np.array(REQUESTS_AT_ONCE * (1 + len(columns.memory)))
        of_pairs = Estimator(tables, columns.take(group), ps)
        self._times, self._moved = of_pairs.times(stages, Alone(), under_way)
        self._number = np.zeros(fits.shape, np.intp)
        self._number[group, cell] = np.arange(len(group))
        self.fits = fits.reshape(-1, 2, side, side)

    def fit(self, them: Arrangements) -> Truths:
        """Return, for each arrangement, whether each group has enough memory for its stage."""
        group, first, stop = groups_of_stages(them), them.cuts[:, :-1], them.cuts[:, 1:]
        there = (them.loss[:, None] & (stop == self._tables.layers)).astype(np.intp)
        found: Truths = self.fits[group, there, first, stop].all(axis=1)
        return found

    def seconds(self, them: Arrangements) -> Floats:
        """Return the estimated step time, in seconds, of arrangements that fit in memory."""
        group, first, stop = groups_of_stages(them), them.cuts[:, :-1], them.cuts[:, 1:]
        cells = self._tables.cell(them.loss[:, None], first, stop)
        number = self._number[group, cells]
        times = self._times.take(np.ascontiguousarray(number.T))
        moved = self._moved.take(number) if self._estimator.limited else None
        return self._estimator.end_s(times, moved, cells)
