"""Divide a GEMM into columns, slabs and rows so that all devices finish together (docs/planner.md).

The GEMM is cut into *columns* along one side of C. A column is cut in depth into *slabs* (only one
if devices return finished blocks), and each slab into ranges of rows, one per device. Sizes are
balanced first as real numbers, then as integers.

Devices are sorted by the depth of their best tile and divided into columns of equal volume, so
devices in the same column have similar depths. The devices of a column are divided into slabs. The
heights of the tiles in a slab add up to the height of the column."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from cleave.gemm import Gemm
from cleave.planner.plan import ElementBytes
from cleave.planner.tiles.shape import BestTile, Floats, LongestSide, RateArrays, streamed_array_s

Ints = npt.NDArray[np.int64]
Places = npt.NDArray[np.intp]

_MOST_SOLVER_STEPS: Final = 12
_MOST_DOUBLINGS: Final = 40
_TOLERANCE: Final = 1e-3  # maximum relative difference of slab times that count as equal
_PULL: Final = 1.25  # exponent of corrections: time grows as (depth or width)^0.67 to ^1


@dataclass(frozen=True, slots=True)
class Frame:
    """A GEMM, and the side of C that is divided into columns.

    If `columns_cut_n`, columns divide n and rows divide m. Otherwise, columns divide m and rows
    divide n.
    """

    gemm: Gemm
    element: ElementBytes
    columns_cut_n: bool

    @property
    def height(self) -> int:
        return self.gemm.m if self.columns_cut_n else self.gemm.n

    @property
    def width(self) -> int:
        return self.gemm.n if self.columns_cut_n else self.gemm.m

    @property
    def depth(self) -> int:
        return self.gemm.k


class Arrangement(NamedTuple):
    """The assignment of devices to slabs, and of slabs to columns.

    Attributes:
        devices: index of each device in the fleet, in slab order.
        slab_starts: index in `devices` of each slab's first device.
        column_starts: index of each column's first slab.
    """

    devices: Places
    slab_starts: Places
    column_starts: Places

    @property
    def slab_of(self) -> Places:
        """Return the slab index of each entry of `devices`."""
        return _labels(self.slab_starts, len(self.devices))

    @property
    def column_of_slab(self) -> Places:
        return _labels(self.column_starts, len(self.slab_starts))

    @property
    def slabs_in_column(self) -> Places:
        return np.diff(self.column_starts, append=len(self.slab_starts))


class Fluid(NamedTuple):
    """A balanced arrangement with real-valued sides. `time_s` is each slab's time in seconds."""

    arrangement: Arrangement
    widths: Floats
    depths: Floats
    time_s: Floats

    @property
    def makespan_s(self) -> float:
        return float(self.time_s.max())


class Boxes(NamedTuple):
    """Arrays of integer tiles: each tile's device, slab, and start and stop on each axis."""

    device: Places
    slab: Places
    rows: Ints  # start, stop
    columns: Ints
    depth: Ints


class Balancer:
    """Balances arrangements of one fleet for one frame, so that all devices finish together.

    `slowdown` contains the factor by which each device's tiles take longer than predicted.
    """

    def __init__(self, frame: Frame, rates: RateArrays, slowdown: Floats) -> None:
        self.frame = frame
        self.rates = rates
        self.slowdown = slowdown

    def balance(
        self,
        arrangement: Arrangement,
        widths: Floats,
        depths: Floats,
        time_s: float,
        *,
        rounds: int,
    ) -> Fluid:
        """Return the fastest result of up to `rounds` rounds of adjusting widths and depths.

        Args:
            widths: initial width of each column. Only proportions matter.
            depths: initial depth of each slab. Only proportions matter.
            time_s: initial guess of a slab's time in seconds.
        """
        starts, column_of = arrangement.column_starts, arrangement.column_of_slab
        lone = arrangement.slabs_in_column[column_of] == 1
        widths = widths * (self.frame.width / widths.sum())
        depths = self._fill_depth(depths, starts, column_of)
        times = np.full(len(depths), time_s)
        slabs = _Slabs(self, arrangement)
        best: Fluid | None = None
        for _ in range(rounds):
            times = slabs.times(widths[column_of], depths, times)
            if best is None or times.max() < best.makespan_s:
                best = Fluid(arrangement, widths, depths, times)
            if times.max() <= (1 + _TOLERANCE) * times.min():
                break
            # Time of each column with balanced slabs: mean time of its slabs, weighted by depth.
            of_column = np.add.reduceat(times * depths, starts) / self.frame.depth
            pulled = depths * (of_column[column_of] / times) ** _PULL
            depths = self._fill_depth(np.where(lone, depths, pulled), starts, column_of)
            mean = float((of_column * widths).sum() / widths.sum())
            widths = widths * (mean / of_column) ** _PULL
            widths = widths * (self.frame.width / widths.sum())
        assert best is not None
        return best

    def _fill_depth(self, depths: Floats, starts: Places, column_of: Places) -> Floats:
        """Scale the slab depths so that their sum in each column is the GEMM's depth."""
        total = np.add.reduceat(depths, starts)
        return depths * (self.frame.depth / total)[column_of]

    def slab_rows(self, slab: Arrangement, width: int, depth: int, guess_s: float) -> Ints:
        """Return the start and stop row of each device in a slab of size `width` x `depth`."""
        lone = np.array([depth == self.frame.depth])
        slabs = _Slabs(self, slab, lone)
        widths, depths = np.array([float(width)]), np.array([float(depth)])
        times = slabs.times(widths, depths, np.array([guess_s]))
        return slabs.rows(widths, depths, times, 16)

    def integers(self, fluid: Fluid, most_aligned: int) -> Boxes | None:
        """Return tiles with integer sides, or None if a column or slab would be empty.

        `most_aligned` (1, 4 or 16) is the maximum alignment of row counts and column widths.
        """
        arrangement = fluid.arrangement
        column_of = arrangement.column_of_slab
        edges = _rounded(fluid.widths, np.zeros(1, np.intp), self.frame.width, most_aligned)
        layers = _rounded(fluid.depths, arrangement.column_starts, self.frame.depth, 16)
        if (edges[:, 0] >= edges[:, 1]).any() or (layers[:, 0] >= layers[:, 1]).any():
            return None
        widths = (edges[:, 1] - edges[:, 0]).astype(np.float64)[column_of]
        depths = (layers[:, 1] - layers[:, 0]).astype(np.float64)
        slabs = _Slabs(self, arrangement)
        times = slabs.times(widths, depths, fluid.time_s)
        rows = slabs.rows(widths, depths, times, most_aligned)
        slab_of = arrangement.slab_of
        used = rows[:, 0] < rows[:, 1]
        return Boxes(
            arrangement.devices[used],
            slab_of[used],
            rows[used],
            edges[column_of][slab_of][used],
            layers[slab_of][used],
        )


class _Slabs:
    """Computes the times and the rows of an arrangement's slabs from their widths and depths.

    `lone` marks the slabs of full depth. If `lone` is None, a slab that is alone in its column has
    full depth.
    """

    def __init__(
        self,
        balancer: Balancer,
        arrangement: Arrangement,
        lone: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        self._height = balancer.frame.height
        self._starts = arrangement.slab_starts
        self._slab_of = arrangement.slab_of
        rates = balancer.rates.take(arrangement.devices)
        element = balancer.frame.element
        if lone is None:
            lone = arrangement.slabs_in_column[arrangement.column_of_slab] == 1
        returned = np.where(lone, element.finished, element.partial)[self._slab_of]
        self._slowdown = balancer.slowdown[arrangement.devices]
        self._latency_s = rates.latency_s
        self._sent_s = element.sent / rates.downlink  # per element
        self._flop_s = 2 / rates.flops
        self._returned_s = returned / rates.uplink

    def _lengths(self, curve: LongestSide, times: Floats) -> Floats:
        available = times[self._slab_of]
        available /= self._slowdown
        available -= self._latency_s
        np.maximum(available, 0.0, out=available)
        return curve(available)

    def _curve(self, widths: Floats, depths: Floats) -> LongestSide:
        depth = depths[self._slab_of]
        element_s = np.maximum(depth * self._flop_s, self._returned_s)
        return LongestSide(widths[self._slab_of], depth * self._sent_s, element_s)

    def times(self, widths: Floats, depths: Floats, guess_s: Floats) -> Floats:
        """Return the shortest time, in seconds, that each slab's devices need to compute all rows.

        The number of rows is nearly linear in time, so bracketed secant steps converge fast.
        """
        curve = self._curve(widths, depths)

        def rows(times: Floats) -> Floats:
            return np.add.reduceat(self._lengths(curve, times), self._starts)

        height = float(self._height)
        low, high = np.zeros_like(guess_s), guess_s.copy()
        at_low, at_high = np.zeros_like(guess_s), rows(high)
        for _ in range(_MOST_DOUBLINGS):
            short = at_high < height
            if not short.any():
                break
            low, at_low = np.where(short, high, low), np.where(short, at_high, at_low)
            # Go a little beyond the end of the line through zero, but not too far.
            reach = np.clip(1.05 * height / np.maximum(at_high, 1e-9), 1.02, 8.0)
            high = np.where(short, high * reach, high)
            at_high = rows(high)
        for step in range(_MOST_SOLVER_STEPS):
            if (high - low <= 1e-5 * high).all():
                break
            share = (height - at_low) / np.maximum(at_high - at_low, 1e-12)
            middle = low + np.clip(share, 0.0, 1.0) * (high - low)
            # Overshoot the crossing from the far side, so that both ends of the bracket close in.
            middle = np.where(step % 2, middle * (1 + 2e-6), middle + 0.02 * (high - middle))
            at_middle = rows(middle)
            short = at_middle < height
            low, at_low = np.where(short, middle, low), np.where(short, at_middle, at_low)
            high, at_high = np.where(short, high, middle), np.where(short, at_high, at_middle)
        return high

    def rows(self, widths: Floats, depths: Floats, times: Floats, most_aligned: int) -> Ints:
        """Return each device's integer start and stop row, chosen for the shortest slab times."""
        curve = self._curve(widths, depths)
        count = np.diff(self._starts, append=len(self._slab_of))
        align = _alignment(self._height / count, most_aligned)[self._slab_of]

        def whole(times: Floats) -> Floats:
            lengths = self._lengths(curve, times)
            return np.minimum(np.floor(lengths / align + 1e-6) * align, self._height)

        def fills(times: Floats) -> npt.NDArray[np.bool_]:
            return np.add.reduceat(whole(times), self._starts) >= self._height

        low, high = times * (1 - 1e-9), times * 1.01
        for _ in range(_MOST_DOUBLINGS):
            short = ~fills(high)
            if not short.any():
                break
            low = np.where(short, high, low)
            high = np.where(short, times + 1.7 * (high - times), high)
        for _ in range(10):
            middle = (low + high) / 2
            enough = fills(middle)
            low, high = np.where(enough, low, middle), np.where(enough, middle, high)
        lengths = whole(high)
        stops = np.cumsum(lengths)
        stops -= (stops - lengths)[self._starts][self._slab_of]
        stops = np.minimum(stops, self._height).astype(np.int64)
        begins = np.roll(stops, 1)
        begins[self._starts] = 0
        return np.stack([begins, stops], axis=1)


def box_times_s(boxes: Boxes, frame: Frame, rates: RateArrays) -> Floats:
    """Return each tile's predicted time in seconds, without strip fill."""
    of = rates.take(boxes.device)
    rows, columns, depth = (
        (span[:, 1] - span[:, 0]).astype(np.float64)
        for span in (boxes.rows, boxes.columns, boxes.depth)
    )
    element = frame.element
    returned = np.where(depth == frame.depth, element.finished, element.partial)
    slower = np.maximum(
        2 * rows * columns * depth / of.flops, rows * columns * returned / of.uplink
    )
    download = (rows + columns) * depth * element.sent / of.downlink
    return of.latency_s + streamed_array_s(download, slower)


def _labels(starts: Places, size: int) -> Places:
    """Return the group indices of `size` items, where a group begins at each index in `starts`."""
    return np.repeat(np.arange(len(starts)), np.diff(starts, append=size))


def _alignment(sizes: Floats, most: int) -> Floats:
    """Return the alignment of each size, which is larger for larger sizes but at most `most`."""
    steps = np.where(sizes >= 512, 16.0, np.where(sizes >= 128, 4.0, 1.0))
    return np.minimum(steps, float(most))


def _rounded(sizes: Floats, starts: Places, total: int, most_aligned: int) -> Ints:
    """Round sizes to consecutive integer spans that cover `total` in each group."""
    group = _labels(starts, len(sizes))
    stops = np.cumsum(sizes)
    stops = stops - (stops - sizes)[starts][group]
    align = _alignment(sizes, most_aligned)
    bounds = np.minimum(np.round(stops / align) * align, total).astype(np.int64)
    last = np.append(starts[1:], len(sizes)) - 1
    bounds[last] = total
    begins = np.roll(bounds, 1)
    begins[starts] = 0
    return np.stack([begins, bounds], axis=1)


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
