"""Assign devices to columns of C and to slabs of the depth (docs/planner.md).

Devices are sorted by the depth of their best tile and divided into columns of equal volume, so
devices in the same column have similar depths. The devices of a column are divided into slabs. The
heights of the tiles in a slab add up to the height of the column.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from cleave.planner.tiles.balance import Arrangement, Frame, Places
from cleave.planner.tiles.shape import BestTile, Floats

_LEAST_COLUMN = 0.6  # minimum volume of a separate column, relative to the mean column


class Draft(NamedTuple):
    """An arrangement, with the initial column widths and slab depths for balancing."""

    arrangement: Arrangement
    widths: Floats
    depths: Floats


def _column_counts(frame: Frame, best: BestTile, few: bool) -> list[int]:
    """Return candidate column counts for nearly square tiles. If `few`, return at most two."""
    active = best.volume > 0
    devices = int(active.sum())
    sides = np.sqrt(best.volume[active] / best.depth[active])
    # The mean side is weighted by volume.
    side = float((sides * best.volume[active]).sum() / best.volume[active].sum())
    ideal = frame.width / side
    found = {int(np.floor(ideal)), int(np.ceil(ideal))}
    if not few:
        found |= {round(ideal * share) for share in (0.7, 0.85, 1.2, 1.4)}
    return sorted({min(max(1, count), devices, frame.width) for count in found})


def _by_depth(frame: Frame, best: BestTile, order: Places, columns: int) -> Draft:
    """Distribute devices over about `columns` columns, with separate columns for each depth.

    If the devices of one depth have too little volume for a column, they share a column with the
    devices of the next depth. The depths in `best` must have few distinct values, as returned by
    `shape.snapped`.
    """
    volume, depth = best.volume[order], best.depth[order]
    firsts = np.flatnonzero(np.diff(depth, prepend=-1.0))
    shares = np.add.reduceat(volume, firsts) * (columns / volume.sum())
    column_of = np.empty(len(order), np.intp)
    placed, begin, share = 0, 0, 0.0
    ends = np.append(firsts[1:], len(order)).tolist()
    for number, (end, more) in enumerate(zip(ends, shares.tolist(), strict=True)):
        share += more
        rest = float(shares[number + 1 :].sum())
        if (share < _LEAST_COLUMN or rest < _LEAST_COLUMN) and end < len(order):
            continue  # this depth has too little volume for its own column
        dealt = _deal(volume[begin:end], max(1, round(share)))
        column_of[begin:end] = placed + dealt
        placed += int(dealt[-1]) + 1
        begin, share = end, 0.0
    return _stack(frame, best, order, column_of, 0.5)


def _stack(
    frame: Frame, best: BestTile, order: Places, column_of: Places, round_up_at: float
) -> Draft:
    """Divide each column into slabs, so that the tiles of a slab fill the column's height.

    The number of slabs is rounded up if its fractional part is at least `round_up_at`.
    """
    volume, depth = best.volume[order], best.depth[order]
    of_column = np.bincount(column_of, volume)
    widths = frame.width * of_column / of_column.sum()
    heights = volume / (widths[column_of] * depth)
    firsts = np.flatnonzero(np.diff(column_of, prepend=-1))
    lasts = np.append(firsts[1:], len(order))
    slab_starts: list[int] = []
    column_starts: list[int] = []
    for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
        stacked = heights[first:last]
        wanted = int(np.floor(stacked.sum() / frame.height + 1 - round_up_at))
        wanted = min(wanted, last - first)
        column_starts.append(len(slab_starts))
        if wanted <= 1:
            slab_starts.append(first)
        else:
            slabs = _deal(stacked, wanted)
            slab_starts += (first + np.flatnonzero(np.diff(slabs, prepend=-1))).tolist()
    starts = np.array(slab_starts, np.intp)
    arrangement = Arrangement(order, starts, np.array(column_starts, np.intp))
    return Draft(arrangement, widths, np.add.reduceat(volume, starts))


def _deal(weights: Floats, groups: int) -> Places:
    """Divide weights into consecutive groups with similar sums. Return the group of each weight."""
    middles = np.cumsum(weights) - weights / 2
    group = np.floor(middles / weights.sum() * groups).astype(np.intp)
    steps = np.diff(group, prepend=group[0])
    return np.cumsum(steps > 0).astype(np.intp)


def drafts(
    frame: Frame,
    best: BestTile,
    order: Places,
    snapped: BestTile,
    snapped_order: Places,
    *,
    few: bool,
) -> Iterator[Draft]:
    """Yield distinct arrangements to balance and compare.

    Args:
        order: indices of the devices to use, in descending order of the best tile's depth.
        snapped, snapped_order: like `best` and `order`, but for tiles whose depth divides k.
        few: whether to yield only the most promising arrangements.
    """
    seen = set()
    for columns in _column_counts(frame, best, few):
        made = [_by_depth(frame, snapped, snapped_order, columns)]
        column_of = _deal(best.volume[order], columns)
        for round_up_at in (0.5,) if few else (0.5, 0.35, 0.65):
            made.append(_stack(frame, best, order, column_of, round_up_at))
        for draft in made:
            key = tuple(part.tobytes() for part in draft.arrangement)
            if key not in seen:
                seen.add(key)
                yield draft
