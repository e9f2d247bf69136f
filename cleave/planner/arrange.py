"""Which device goes where: columns of C, slabs in depth, rows (design, section 4).

In the fluid limit every device has a best tile: its side depends on the uplink alone, its depth on
downlink and uplink. Devices sorted by that depth are dealt into columns of equal volume, so that a
column has devices that want the same depth, and then into slabs whose devices' sides add up to the
height of the column. A run of columns with equal slab counts is what the design calls a region.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cleave.planner.balance import Arrangement, Frame
from cleave.planner.shape import BestTile, Floats


@dataclass(frozen=True, slots=True)
class Draft:
    """An arrangement and where its balancing starts."""

    arrangement: Arrangement
    widths: Floats
    depths: Floats


def column_counts(frame: Frame, best: BestTile, few: bool) -> list[int]:
    """The numbers of columns that are worth trying: around what makes tiles square.

    Args:
        few: only the two nearest ones.
    """
    active = best.volume > 0
    devices = int(active.sum())
    sides = np.sqrt(best.volume[active] / best.depth[active])
    # Weighted by what each does; a tile is never wider than its frame.
    side = float((sides * best.volume[active]).sum() / best.volume[active].sum())
    ideal = frame.width / side
    found = {int(np.floor(ideal)), int(np.ceil(ideal))}
    if not few:
        found |= {round(ideal * share) for share in (0.7, 0.85, 1.2, 1.4)}
    return sorted({min(max(1, count), devices, frame.width) for count in found})


def arrange(
    frame: Frame, best: BestTile, order: npt.NDArray[np.intp], columns: int, round_up_at: float
) -> Draft:
    """Deal devices into so many columns.

    Args:
        frame: which side the columns cut.
        best: every device's best tile.
        order: the devices to use, deepest first.
        columns: how many; some may stay empty and are left out.
        round_up_at: the fraction of a slab from which it counts as one more.
    """
    volume, depth = best.volume[order], best.depth[order]
    column_of = _deal(volume, columns)
    width = frame.width / (column_of[-1] + 1)
    heights = volume / (width * depth)
    firsts = np.flatnonzero(np.diff(column_of, prepend=-1))
    lasts = np.append(firsts[1:], len(order))
    slab_starts: list[int] = []
    column_starts: list[int] = []
    for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
        stacked = heights[first:last]
        wanted = int(np.floor(stacked.sum() / frame.height + 1 - round_up_at))
        slabs = _deal(stacked, min(max(1, wanted), last - first))
        column_starts.append(len(slab_starts))
        slab_starts += (first + np.flatnonzero(np.diff(slabs, prepend=-1))).tolist()
    starts = np.array(slab_starts, np.intp)
    arrangement = Arrangement(order, starts, np.array(column_starts, np.intp))
    of_slab = np.add.reduceat(volume, starts)
    of_column = np.add.reduceat(of_slab, arrangement.column_starts)
    return Draft(arrangement, of_column, of_slab)


def _deal(weights: Floats, groups: int) -> npt.NDArray[np.intp]:
    """Consecutive groups of nearly equal weight, numbered from 0 without gaps."""
    middles = np.cumsum(weights) - weights / 2
    group = np.floor(middles / weights.sum() * groups).astype(np.intp)
    steps = np.diff(group, prepend=group[0])
    return np.cumsum(steps > 0).astype(np.intp)


def drafts(
    frame: Frame, best: BestTile, order: npt.NDArray[np.intp], *, few: bool
) -> Iterator[Draft]:
    """The arrangements that are worth trying, each once."""
    seen = set()
    for columns in column_counts(frame, best, few):
        for round_up_at in (0.5,) if few else (0.5, 0.35, 0.65):
            draft = arrange(frame, best, order, columns, round_up_at)
            made = draft.arrangement
            key = (made.slab_starts.tobytes(), made.column_starts.tobytes())
            if key not in seen:
                seen.add(key)
                yield draft
