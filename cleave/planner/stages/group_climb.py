"""The search for large fleets, in which each stage has exactly one group of devices.

In the closed form, the time of a stage without other stages depends only on the stage's layers and
group. So this time is computed once for each pair of a run of layers and a group with enough memory
for the run. Changes for which a group has too little memory are not estimated.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Final

import numpy as np

from cleave.planner.stages.changes import Changes, groups_of_stages
from cleave.planner.stages.climb import StageClimb
from cleave.planner.stages.estimate import (
    Alone,
    Arrangements,
    Columns,
    Estimator,
    Stages,
    StageTables,
    Truths,
)
from cleave.planner.stages.model import PsCompute
from cleave.planner.stages.rules import REQUESTS_AT_ONCE
from cleave.planner.tiles.shape import Floats

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
