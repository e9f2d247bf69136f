"""Local search for the assignment of layers and devices to stages.

The search starts with several arrangements whose stages take about the same time. It then changes
each arrangement for as long as a change shortens the step time estimated by `estimate.py`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate, pairwise, permutations
from math import perm
from typing import Final

import numpy as np

from cleave.planner.plan import DeviceRates
from cleave.planner.stages.estimate import (
    TOO_LARGE_S,
    Arrangements,
    Columns,
    Estimator,
    Integers,
    StageTables,
)
from cleave.planner.stages.model import PlannedStage, PsCompute
from cleave.planner.tiles.shape import Floats

# With more stages, changes involve only pairs of stages whose distance is a power of two.
_FEW_STAGES = 12


class Changes:
    """Numbered changes to an arrangement of devices in stages.

    A change moves a layer to another stage, swaps two stages, moves a group of devices to another
    stage, swaps two groups, or moves the loss to or from the PS.

    Args:
        groups: number of groups that can move to another stage; 0 if each group stays in its stage.
    """

    def __init__(self, stages: int, groups: int) -> None:
        distances = [n for n in range(1, stages) if stages <= _FEW_STAGES or n.bit_count() == 1]
        # Each row is (first, stop, layers): `layers` is added to cuts[first:stop].
        self._shifts = np.array(
            [
                (first, first + distance, layers)
                for distance in distances
                for first in range(1, stages - distance + 1)
                for layers in (1, -1)
            ],
            np.intp,
        ).reshape(-1, 3)
        self._swaps = np.array(
            [(n, n + distance) for distance in distances for n in range(stages - distance)],
            np.intp,
        ).reshape(-1, 2)
        self._moves = np.indices((groups, stages + 1)).reshape(2, -1).T
        self._pairs = np.stack(np.triu_indices(groups, 1), axis=1)
        kinds = self._shifts, self._swaps, self._moves, self._pairs
        self._ends = list(accumulate(map(len, kinds)))
        self.count = self._ends[-1] + 1

    def made(self, them: Arrangements, number: Integers) -> Arrangements:
        """Apply change `number[i]` to each arrangement i of `them` in place, and return `them`."""
        cuts, place = them.cuts, them.place
        at, (first, stop, layers) = self._of_kind(number, 0, self._shifts)
        column = np.arange(cuts.shape[1])
        between = (column >= first[:, None]) & (column < stop[:, None])
        cuts[at] += between * layers[:, None]

        at, (one, other) = self._of_kind(number, 1, self._swaps)
        lengths = np.diff(cuts[at], axis=1)
        row = np.arange(len(at))
        longer = lengths[row, other] - lengths[row, one]
        between = (column > one[:, None]) & (column <= other[:, None])
        cuts[at] += between * longer[:, None]
        one, other, old = one[:, None], other[:, None], place[at]
        place[at] = np.where(old == one, other, np.where(old == other, one, old))

        at, (group, stage) = self._of_kind(number, 2, self._moves)
        place[at, group] = stage
        at, (one, other) = self._of_kind(number, 3, self._pairs)
        place[at, one], place[at, other] = place[at, other], place[at, one]
        them.loss[number == self._ends[3]] ^= True
        return them

    def _of_kind(self, number: Integers, kind: int, known: Integers) -> tuple[Integers, Integers]:
        """Return the indices of the changes of one kind, and the parameters of these changes."""
        begin, end = [0, *self._ends][kind : kind + 2]
        at = np.flatnonzero((number >= begin) & (number < end))
        return at, known[number[at] - begin].T


_BEGUN: Final = 24  # initial arrangements that are improved for up to `_BEGUN_ROUNDS` rounds
_BEGUN_FIXED: Final = 4  # like `_BEGUN`, for searches in which each stage has one fixed group
_BEGUN_ROUNDS: Final = 3
_CLIMBS: Final = 10  # arrangements that are improved for up to `_ROUNDS` rounds
_ROUNDS: Final = 40
_GAIN: Final = 1e-6  # minimum relative gain of a change
_FEW_ORDERS: Final = 24  # maximum number of device orders for which all orders are tried
_LEAST_S: Final = 1e-12
_HALVINGS: Final = 12  # bisection steps for the time of the slowest stage


class StageClimb:
    """Local search among arrangements of layers and groups of devices in stages.

    Args:
        tables: costs of each run of consecutive layers.
        groups: groups of devices. All devices of a group are in the same stage.
        fixed: whether group n always serves stage n. If so, groups may not outnumber layers.

    Attributes:
        found: distinct arrangements, in ascending order of estimated step time.
        seconds: estimated step time in seconds of each arrangement in `found`.
    """

    def __init__(
        self,
        tables: StageTables,
        groups: Sequence[Sequence[DeviceRates]],
        ps: PsCompute,
        *,
        fixed: bool = False,
    ) -> None:
        self.tables = tables
        self.groups = groups
        self.columns = Columns.of(groups)
        self._fixed = fixed
        self._estimator = Estimator(tables, self.columns, ps, fixed=fixed)
        self._stages = min(tables.layers, len(groups))
        columns, model = self.columns, tables.model
        self._down_byte_s = columns.down_byte_s(model.coded_ratio)
        self._gradient_byte_s = columns.up_byte_s(model.gradient_coded_ratio)
        self._flops_per_s = columns.flops * columns.count
        self._known: dict[tuple[int, ...], tuple[list[float], float]] = {}
        one_each = [self._seconds_of_layers((number,)) for number in range(len(groups))]
        self._whole_s = [sum(layers_s) for layers_s, _ in one_each]
        self._order = sorted(range(len(groups)), key=lambda n: (self._whole_s[n], n))
        # For each group and first layer, the largest stop for which the group has enough memory.
        fits = tables.memory_of_layers[None] <= self.columns.memory[:, None, None]
        fits &= tables.memory_of_layers > 0
        self._reach = np.arange(tables.layers + 1) + fits.sum(axis=2)
        self.found = self._starts()
        self.seconds = self._estimator.seconds(self.found)
        self._keep(_BEGUN_FIXED if fixed else _BEGUN, alike=False)

    @cached_property
    def changes(self) -> Changes:
        return Changes(self._stages, 0 if self._fixed else len(self.groups))

    def climb(self) -> None:
        """Improve `found` as long as changes help, for a limited number of rounds."""
        for rounds, most in ((_BEGUN_ROUNDS, _CLIMBS), (_ROUNDS, _CLIMBS)):
            active = np.arange(len(self.found))
            for _ in range(rounds):
                if len(active):
                    active = self._improve(active)
            self._keep(most, alike=False)
        self._keep(len(np.flatnonzero(self.seconds < TOO_LARGE_S)))

    def add(self, them: Arrangements) -> None:
        """Add to `found` the arrangements of another search with the same number of groups."""
        self.found = self.found.with_others(them)
        self.seconds = self._estimator.seconds(self.found)
        self._keep(len(self.found))

    def planned(self, them: Arrangements, number: int) -> tuple[PlannedStage, ...]:
        cuts, place = them.cuts[number].tolist(), them.place[number].tolist()
        loss, layers = bool(them.loss[number]), self.tables.layers
        found = []
        for stage, (first, stop) in enumerate(pairwise(cuts)):
            if stop > first:
                here = [d for n, d in enumerate(self.groups) if place[n] == stage]
                ids = tuple(sorted(device.device for group in here for device in group))
                found.append(PlannedStage(first, stop, ids, loss and stop == layers))
        return tuple(found)

    def seconds_of_changes(self, them: Arrangements) -> Floats:
        """Return the estimated step time after each change, in an (arrangements, changes) array."""
        row, number = np.indices((len(them), self.changes.count))
        return self.estimate(self.changed(them, row.ravel(), number.ravel())).reshape(row.shape)

    def changed(self, them: Arrangements, row: Integers, number: Integers) -> Arrangements:
        """Return, for each i, a copy of arrangement `row[i]` with change `number[i]` applied."""
        return self.changes.made(them.take(row), number)

    def estimate(self, them: Arrangements) -> Floats:
        """Return the estimated step time in seconds of each arrangement."""
        return self._estimator.seconds(them)

    def _improve(self, active: Integers) -> Integers:
        """Apply the best change to each of the `active` arrangements that a change improves.

        Return the indices of the changed arrangements.
        """
        those = self.found.take(active)
        seconds = self.seconds_of_changes(those)
        best = seconds.argmin(axis=1)
        value = seconds[np.arange(len(active)), best]
        helps = np.flatnonzero(value < self.seconds[active] * (1 - _GAIN))
        improved: Integers = active[helps]
        self.found.put(improved, self.changed(those, helps, best[helps]))
        self.seconds[improved] = value[helps]
        return improved

    def _keep(self, most: int, *, alike: bool = True) -> None:
        """Reduce `found` to the best `most` arrangements, without impossible ones and duplicates.

        Unless `alike` is set, the best arrangement for each number of stages, with and without
        the loss on the last stage, takes precedence.
        """
        used = (np.diff(self.found.cuts, axis=1) > 0).sum(axis=1) * 2 + self.found.loss
        seen: dict[int, int] = {}
        known: set[bytes] = set()
        ranked: list[tuple[int, int, int]] = []
        for number in np.argsort(self.seconds, kind="stable").tolist():
            key = b"".join(part[number].tobytes() for part in self.found.parts)
            if self.seconds[number] == np.inf or key in known:
                continue
            known.add(key)
            rank = seen[int(used[number])] = seen.get(int(used[number]), -1) + 1
            ranked.append((0 if alike else rank, len(ranked), number))
        chosen = np.array([number for *_, number in sorted(ranked)[:most]], np.intp)
        self.found, self.seconds = self.found.take(chosen), self.seconds[chosen]

    # --- initial arrangements ---

    def _starts(self) -> Arrangements:
        stages = self._stages
        cuts, place, losses = [], [], []
        fixed = tuple((number,) for number in range(len(self.groups)))
        for dealt in [fixed] if self._fixed else dict.fromkeys(self._deals()):
            for loss in (False, True):
                at_end = self._roomy_last(dealt) if loss else dealt
                placed = np.full(len(self.groups), stages)
                for stage, members in enumerate(at_end):
                    placed[list(members)] = stage
                found = self._cuts(at_end, loss=loss)
                cuts.append(found + [self.tables.layers] * (stages + 1 - len(found)))
                place.append(placed)
                losses.append(loss)
        return Arrangements(
            np.array(cuts, np.intp).reshape(-1, stages + 1),
            np.array(place, np.intp).reshape(-1, len(self.groups)),
            np.array(losses, bool),
        )

    def _deals(self) -> Iterator[tuple[tuple[int, ...], ...]]:
        """Yield assignments of groups to stages, one tuple of groups for each stage."""
        roomy = np.lexsort((np.arange(len(self.groups)), -self.columns.memory)).tolist()
        for stages in range(1, self._stages + 1):
            if perm(len(self.groups), stages) <= _FEW_ORDERS:
                for chosen in permutations(range(len(self.groups)), stages):
                    yield tuple((number,) for number in chosen)
            for order in (self._order, roomy):
                yield tuple((number,) for number in order[:stages])
                yield tuple((number,) for number in reversed(order[:stages]))
                dealt: list[list[int]] = [[] for _ in range(stages)]
                speed = [0.0] * stages
                for number in order:
                    stage = min(range(stages), key=lambda s: (len(dealt[s]) > 0, speed[s]))
                    dealt[stage].append(number)
                    speed[stage] += 1 / max(self._whole_s[number], _LEAST_S)
                yield tuple(tuple(members) for members in dealt)

    def _roomy_last(self, dealt: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Reorder or replace groups so that the last stage has memory for the loss, if possible."""
        needed, memory = self.tables.memory_of_loss, self.columns.memory
        for n in reversed(range(len(dealt))):
            if memory[list(dealt[n])].min() >= needed:
                return [*dealt[:n], *dealt[n + 1 :], dealt[n]]
        used = {number for members in dealt for number in members}
        free = [(n,) for n in self._order if n not in used and memory[n] >= needed]
        return [*dealt[:-1], *(free[:1] or dealt[-1:])]

    def _cuts(self, dealt: Sequence[tuple[int, ...]], *, loss: bool) -> list[int]:
        """Return cuts that minimise the slowest stage's time, within memory limits if possible."""
        until, reach, loss_s = [], [], 0.0
        for members in dealt:
            seconds, loss_s = self._seconds_of_layers(members)
            until.append([0.0, *accumulate(seconds)])
            reach.append(self._reach[list(members)].min(axis=0).tolist())
        return _balanced(until, reach, loss_s if loss else 0.0)

    def _seconds_of_layers(self, members: tuple[int, ...]) -> tuple[list[float], float]:
        """Return the times in seconds of the layers and of the loss on a stage of `members`."""
        if members not in self._known:
            chosen = list(members)
            weights, gradients, flops = self.tables.by_layer
            seconds = (
                weights * self._down_byte_s[chosen].max()
                + gradients * self._gradient_byte_s[chosen].max()
                + sum(self.tables.model.tokens) * flops / float(self._flops_per_s[chosen].sum())
            ).tolist()
            self._known[members] = seconds[:-1], seconds[-1]
        return self._known[members]


def _balanced(
    until: Sequence[Sequence[float]], reach: Sequence[Sequence[int]], last_s: float
) -> list[int]:
    """Return the cuts of the layers that minimise the time of the slowest stage.

    `until` contains, for each stage, the total time in seconds of the first n layers, for n from 0
    to the number of layers. `reach` contains, for each stage and first layer, the largest stop
    that fits in memory. Memory is ignored if no cuts fit. `last_s` is added to the last stage's
    time.
    """
    high = max(seconds[-1] for seconds in until) * (1 + _GAIN) + last_s
    low, found = 0.0, _cut(until, reach, last_s, high)
    if found is None:
        layers = len(until[0]) - 1
        reach = [[layers] * layers] * len(until)
        found = _cut(until, reach, last_s, high)
        assert found is not None
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        tried = _cut(until, reach, last_s, middle)
        if tried is None:
            low = middle
        else:
            high, found = middle, tried
    return found


def _cut(
    until: Sequence[Sequence[float]], reach: Sequence[Sequence[int]], last_s: float, limit_s: float
) -> list[int] | None:
    """Return cuts that give each stage as many layers as possible within `limit_s` seconds.

    Return None if no such cuts cover all layers. See `_balanced` for the other arguments.
    """
    cuts, layers = [0], len(until[0]) - 1
    for stage, seconds in enumerate(until):
        first = cuts[-1]
        stop = bisect_right(seconds, seconds[first] + limit_s) - 1
        stop = min(stop, reach[stage][first], layers - (len(until) - 1 - stage))
        if stop <= first:
            return None
        cuts.append(stop)
    fits = stop == layers and until[-1][stop] - until[-1][first] + last_s <= limit_s
    return cuts if fits else None
