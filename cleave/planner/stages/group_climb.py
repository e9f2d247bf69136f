"""Arrangements in which each stage has one group of devices: a large fleet has groups of devices.

What the closed form says of a stage by itself depends only on its layers and its group. It is
computed once for each pair that fits, and changes that do not fit are not estimated at all.
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
from cleave.planner.stages.rules import UNITS_AT_ONCE
from cleave.planner.tiles.shape import Floats

_BEGUN: Final = 4  # starts that are improved a few times


class GroupClimb(StageClimb):
    """A search among arrangements in which each stage has one group of devices.

    There are at most as many groups as layers. See `StageClimb`.
    """

    begun = _BEGUN

    @cached_property
    def changes(self) -> Changes:
        """Return how arrangements may be changed."""
        return Changes(len(self.groups), 0)

    def deals(self) -> Iterator[tuple[tuple[int, ...], ...]]:
        """Yield the groups of each stage."""
        yield tuple((number,) for number in range(len(self.groups)))

    def seconds_of_changes(self, them: Arrangements) -> Floats:
        """Return what is estimated of every change of each arrangement, a row for each.

        It is infinite for changes that do not fit, of arrangements that do.
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
    """What the closed form says of a stage by itself, by its group of devices and its layers.

    Attributes:
        fits: by group, loss there, first layer and stop: whether it has room for these layers,
            which are at least one.
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
        under_way = np.array(UNITS_AT_ONCE * (1 + len(columns.memory)))
        of_pairs = Estimator(tables, columns.take(group), ps)
        self._times, self._moved = of_pairs.times(stages, Alone(), under_way)
        self._number = np.zeros(fits.shape, np.intp)
        self._number[group, cell] = np.arange(len(group))
        self.fits = fits.reshape(-1, 2, side, side)

    def fit(self, them: Arrangements) -> Truths:
        """Say which arrangements fit."""
        group, first, stop = groups_of_stages(them), them.cuts[:, :-1], them.cuts[:, 1:]
        there = (them.loss[:, None] & (stop == self._tables.layers)).astype(np.intp)
        found: Truths = self.fits[group, there, first, stop].all(axis=1)
        return found

    def seconds(self, them: Arrangements) -> Floats:
        """Return the estimated seconds of a step, as `Estimator.seconds` does, where they fit."""
        group, first, stop = groups_of_stages(them), them.cuts[:, :-1], them.cuts[:, 1:]
        cells = self._tables.cell(them.loss[:, None], first, stop)
        number = self._number[group, cells]
        times = self._times.take(np.ascontiguousarray(number.T))
        moved = self._moved.take(number) if self._estimator.limited else None
        return self._estimator.end_s(times, moved, cells)
