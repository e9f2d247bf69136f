"""Changes to arrangements of devices in stages, and whether changed arrangements fit in memory.

There are five kinds of changes: moving a layer to another stage, swapping two stages, moving a
group of devices to another stage, swapping two groups, and moving the loss to or from the PS. Each
change has a number.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from cleave.planner.stages.estimate import Arrangements, Integers, Truths

_FEW_STAGES = 12
"""Maximum number of stages for which changes of every pair of stages are tried.

With more stages, only pairs of stages whose distance is a power of two are changed.
"""


class Changes:
    """All changes that can be applied to an arrangement.

    Args:
        stages: number of stages.
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
        """Apply one change to each arrangement in place, and return `them`.

        Args:
            them: the arrangements.
            number: for each arrangement, the number of the change.
        """
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

    def that_fit(self, them: Arrangements, fits: Truths) -> Truths:
        """Return whether each changed arrangement fits in the memory of the devices.

        Each stage must have exactly one group of devices.

        Args:
            them: arrangements that fit in memory.
            fits: whether a group has enough memory for a run of at least one layer, indexed by
                group, loss on the stage, first layer and stop.

        Returns:
            Booleans, shape (arrangements, changes).
        """
        row, stages = np.arange(len(them))[:, None], them.cuts.shape[1] - 1
        group, layers = groups_of_stages(them), fits.shape[-1] - 1
        begins, ends = them.cuts[:, :-1], them.cuts[:, 1:]

        def room(group: Integers, first: Integers, stop: Integers, loss: Truths) -> Truths:
            inside = (first >= 0) & (stop <= layers)
            there = (loss & (stop == layers)).astype(np.intp)
            found: Truths = inside & fits[group, there, first * inside, stop * inside]
            return found

        loss = them.loss[:, None]

        def full_until(moved: int | Integers) -> Integers:
            """For each stage, count earlier stages that do not fit if moved by `moved` layers."""
            full = ~room(group, begins + moved, ends + moved, loss)
            return np.concatenate([np.zeros_like(row), np.cumsum(full, axis=1)], axis=1)

        found = np.zeros((len(them), self.count), bool)
        for layers_more in (1, -1):
            at = np.flatnonzero(self._shifts[:, 2] == layers_more)
            first, stop, _ = self._shifts[at].T
            longer = room(group, begins, ends + layers_more, loss)
            shorter = room(group, begins + layers_more, ends, loss)
            full = full_until(layers_more)
            found[:, at] = longer[:, first - 1] & shorter[:, stop - 1]
            found[:, at] &= full[:, first] == full[:, stop - 1]

        one, other = self._swaps.T
        lengths = ends - begins
        later = lengths[:, other] - lengths[:, one]
        fit = room(group[:, other], begins[:, one], ends[:, one] + later, loss)
        fit &= room(group[:, one], begins[:, other] + later, ends[:, other], loss)
        for moved in np.unique(later[fit]).tolist():
            full = full_until(moved)
            fit &= (later != moved) | (full[:, one + 1] == full[:, other])
        found[:, self._ends[0] : self._ends[1]] = fit

        last = np.full_like(row, stages - 1)
        found[:, -1:] = room(group[row, last], begins[row, last], ends[row, last], ~loss)
        return found


def groups_of_stages(them: Arrangements) -> Integers:
    """Return the group of each stage. Each stage must have exactly one group."""
    found = np.empty_like(them.place)
    found[np.arange(len(them))[:, None], them.place] = np.arange(them.place.shape[1])
    return found
