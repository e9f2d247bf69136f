"""How much of a GEMM one device does in a given time, and the shape of the tile that does it.

Everything here is vectorised over devices: arrays of one value each, floats throughout (the fluid
limit, before anything is rounded to integers).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from cleave.gemm import Gemm
from cleave.planner.plan import DeviceRates, ElementBytes
from cleave.planner.tiles.cost import FILL_SHARE, MAX_STRIPS, PS_BLOCK_S

Floats = npt.NDArray[np.float64]

_GOLDEN = 0.6180339887498949
_GOLDEN_STEPS = 22
_FEW = 256  # devices
_GRID, _GRIDS = 17, 5  # points, and how often; a maximum with an edge is met within `SEARCH_ERROR`
SNAPPED: Final = 8
"""Depths down to this part of k are worth matching exactly."""

SEARCH_ERROR: Final = 3e-4
"""What a search of so many steps may leave out of the best volume, as a share of it."""


@dataclass(frozen=True, slots=True)
class RateArrays:
    """The rates of many devices, one array per field; `DeviceRates` gives their meanings.

    `latency_s` is for a round trip.
    """

    downlink: Floats
    uplink: Floats
    flops: Floats
    latency_s: Floats
    memory: Floats

    @classmethod
    def of(cls, devices: Sequence[DeviceRates]) -> RateArrays:
        """Return the rates of these devices, in this order."""
        columns = np.array(
            [
                (
                    d.downlink_bytes_per_s,
                    d.uplink_bytes_per_s,
                    d.flops_per_s,
                    2 * d.latency_s,
                    d.memory_bytes,
                )
                for d in devices
            ],
            dtype=np.float64,
        ).reshape(len(devices), 5)
        return cls(*(np.ascontiguousarray(column) for column in columns.T))

    def __len__(self) -> int:
        return len(self.downlink)

    def take(self, chosen: npt.NDArray[np.intp]) -> RateArrays:
        """Return the rates of the devices at the indices `chosen`, in that order."""
        return RateArrays(
            self.downlink[chosen],
            self.uplink[chosen],
            self.flops[chosen],
            self.latency_s[chosen],
            self.memory[chosen],
        )

    def throttled(self, egress_bytes_per_s: float, ingress_bytes_per_s: float) -> RateArrays:
        """Return the rates with links slowed in proportion until they fit the PS's network card."""
        down = min(1.0, egress_bytes_per_s / float(self.downlink.sum()))
        up = min(1.0, ingress_bytes_per_s / float(self.uplink.sum()))
        if down == up == 1.0:
            return self
        return RateArrays(
            self.downlink * down, self.uplink * up, self.flops, self.latency_s, self.memory
        )


@dataclass(frozen=True, slots=True)
class BestTile:
    """By device: the largest volume it can multiply in some time, and the depth of that tile."""

    volume: Floats
    depth: Floats
    full_depth: npt.NDArray[np.bool_]


def best_tile(
    gemm: Gemm,
    element: ElementBytes,
    rates: RateArrays,
    time_s: float,
    *,
    least_depth: float = 1.0,
    two_dimensional: bool = False,
    memory: Floats | None = None,
) -> BestTile:
    """Return the largest tile that each device can return within `time_s`.

    Design, section 4: the tile's sides and depth are free within the GEMM's; a tile of full depth
    returns finished elements, any other tile returns partial sums.

    Args:
        least_depth: the least depth of a tile (limits the PS's memory for partial sums).
        two_dimensional: use tiles of full depth only.
        memory: by device, bytes that all strips and blocks of the tile must fit in; None for no
            limit.
    """
    available = np.maximum(0.0, time_s - rates.latency_s)
    depth = np.full(len(rates), float(gemm.k))
    volume = depth * _area(gemm, element.sent, element.finished, rates, available, depth, memory)
    full = np.ones(len(rates), np.bool_)
    if not two_dimensional and least_depth < gemm.k:
        least = max(1.0, least_depth)
        shallow, partial = _best_depth(gemm, element, rates, available, least, memory)
        better = partial > volume
        volume = np.where(better, partial, volume)
        depth = np.where(better, shallow, depth)
        full &= ~better
    return BestTile(volume, depth, full)


def snapped(
    best: BestTile,
    gemm: Gemm,
    element: ElementBytes,
    rates: RateArrays,
    time_s: float,
    *,
    least_depth: float = 1.0,
    memory: Floats | None = None,
) -> BestTile:
    """Return the best tiles with depths that divide k: k, k/2, k/3 ... down to k / `SNAPPED`.

    Shallower tiles keep their depth, because a divisor of k is near in any case. See `best_tile`.
    """
    available = np.maximum(0.0, time_s - rates.latency_s)
    deep = best.depth * (SNAPPED + 0.5) > gemm.k
    volume, depth = np.where(deep, 0.0, best.volume), best.depth
    for slabs in range(1, SNAPPED + 1):
        if slabs > 1 and gemm.k / slabs < least_depth:
            break
        part = np.full(len(rates), gemm.k / slabs)
        returned = element.finished if slabs == 1 else element.partial
        done = part * _area(gemm, element.sent, returned, rates, available, part, memory)
        better = deep & (done > volume)
        volume, depth = np.where(better, done, volume), np.where(better, part, depth)
    return BestTile(volume, depth, depth == gemm.k)


def _best_depth(
    gemm: Gemm,
    element: ElementBytes,
    rates: RateArrays,
    available: Floats,
    least: float,
    memory: Floats | None,
) -> tuple[Floats, Floats]:
    """The depth of the largest volume, which has one maximum in it, and that volume.

    Of many devices by golden-section search, which needs the fewest volumes. Of few, where numpy's
    calls cost more than what they compute, by ever finer grids, which need the fewest calls.
    """

    def volume(log_depth: Floats) -> Floats:
        depth = np.exp(log_depth)
        return depth * _area(gemm, element.sent, element.partial, rates, available, depth, memory)

    low = np.full(len(rates), np.log(least))
    high = np.full(len(rates), np.log(float(gemm.k)))
    if len(rates) <= _FEW:
        return _by_grids(volume, low, high)
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = volume(left), volume(right)
    for _ in range(_GOLDEN_STEPS):
        go_left = at_left >= at_right
        high, low = np.where(go_left, right, high), np.where(go_left, low, left)
        inner = np.where(go_left, high - _GOLDEN * (high - low), low + _GOLDEN * (high - low))
        at_inner = volume(inner)
        left, right = np.where(go_left, inner, right), np.where(go_left, left, inner)
        at_left, at_right = (
            np.where(go_left, at_inner, at_right),
            np.where(go_left, at_left, at_inner),
        )
    ends = (np.full(len(rates), np.log(least)), np.full(len(rates), np.log(float(gemm.k))))
    found, most = left, at_left
    for depth, at_depth in ((right, at_right), *((end, volume(end)) for end in ends)):
        better = at_depth > most
        found, most = np.where(better, depth, found), np.where(better, at_depth, most)
    return np.exp(found), most


def _by_grids(
    volume: Callable[[Floats], Floats], low: Floats, high: Floats
) -> tuple[Floats, Floats]:
    """`_best_depth` between the logarithms of two depths."""
    shares = np.linspace(0.0, 1.0, _GRID)[:, None]
    devices = np.arange(len(low))
    for _ in range(_GRIDS):
        tried = low + shares * (high - low)
        done = volume(tried)
        best = done.argmax(axis=0)
        low = tried[np.maximum(best - 1, 0), devices]
        high = tried[np.minimum(best + 1, _GRID - 1), devices]
    return np.exp(tried[best, devices]), done[best, devices]


def _area(
    gemm: Gemm,
    sent: int,
    returned: int,
    rates: RateArrays,
    available: Floats,
    depth: Floats,
    memory: Floats | None,
) -> Floats:
    """The most elements of C, at a given depth, that come back within the available seconds.

    The sides are equal unless C is narrower than that.
    """
    per_side_s = depth * sent / rates.downlink  # to send one row of A's part, or column of B's
    per_element_s = np.maximum(2 * depth / rates.flops, returned / rates.uplink)
    narrow, wide = float(min(gemm.m, gemm.n)), float(max(gemm.m, gemm.n))
    # Square of side s: the download takes 2 s per_side_s. Where it hides the rest, it is the time.
    side = available / (2 * per_side_s)
    hidden = per_element_s * side <= per_side_s
    area = np.where(
        hidden,
        side * side,
        np.maximum(0.0, available - per_side_s**2 / per_element_s) / per_element_s,
    )
    clipped = area > narrow * narrow
    if clipped.any():
        length = longest_side(np.full_like(available, narrow), per_side_s, per_element_s, available)
        area = np.where(clipped, narrow * np.minimum(wide, length), area)
    if memory is not None:
        # Strips and blocks of a square tile: 2 s c sent + s^2 returned.
        strip = depth * sent
        side = (np.sqrt(strip * strip + returned * memory) - strip) / returned
        area = np.minimum(area, side * side)
    return area


class LongestSide:
    """The greatest length of a tile of a given width that returns in time; 0 if no length does.

    With a the length and b the width: ``download = (a + b) per_side_s``, ``X = a b per_element_s``,
    and the time is ``download`` where ``X <= download / 2``, else ``X + download^2 / (4 X)``.

    Args:
        width: b.
        per_side_s: seconds of download for each row or column of the tile.
        per_element_s: the larger of compute and upload seconds for each element of C's part.
    """

    def __init__(self, width: Floats, per_side_s: Floats, per_element_s: Floats) -> None:
        self._width = width
        self._per_side_s = per_side_s
        self._per_length_s = per_length_s = width * per_element_s  # X for each unit of length
        # The root of (x^2 + p^2/4) a^2 - (x t - p^2 b / 2) a + p^2 b^2 / 4 = 0, the larger one.
        quarter = per_side_s * per_side_s / 4
        square = per_length_s * per_length_s + quarter
        self._half_width = 2 * quarter * width
        self._constant = 4 * square * quarter * width * width
        self._square = 2 * square
        # The two meet at 2 X = download, that is at a = p b / (2 x - p).
        self._excess = 2 * per_length_s - per_side_s
        self._never_above = self._excess <= 0
        self._meeting = per_side_s * 2 * per_length_s * width

    def __call__(self, available: Floats) -> Floats:
        """Return the lengths for tiles that may take this many seconds."""
        linear = self._per_length_s * available
        linear -= self._half_width
        root = linear * linear
        root -= self._constant
        np.maximum(root, 0.0, out=root)
        np.sqrt(root, out=root)
        root += linear
        root /= self._square
        # Where the download hides everything: a + b = available / per_side_s.
        hidden = available * self._excess <= self._meeting
        hidden |= self._never_above
        by_download = available / self._per_side_s
        by_download -= self._width
        np.copyto(root, by_download, where=hidden)
        return np.maximum(root, 0.0, out=root)


def longest_side(
    width: Floats, per_side_s: Floats, per_element_s: Floats, available: Floats
) -> Floats:
    """Return the greatest length of a tile of a given width; see `LongestSide`."""
    return LongestSide(width, per_side_s, per_element_s)(available)


def streamed_array_s(download_s: Floats, slower_s: Floats) -> Floats:
    """Compute `cost.streamed_s` on arrays; `slower_s` is the larger of compute and upload time."""
    slower = np.maximum(slower_s, 1e-300)
    return np.where(
        slower_s <= download_s / 2, download_s, slower_s + download_s * download_s / (4 * slower)
    )


def fill_s(tile_time_s: npt.ArrayLike, strips: npt.ArrayLike) -> Floats:
    """Return the seconds that a finite number of strips adds: about half a strip's share."""
    return np.divide(
        FILL_SHARE * np.asarray(tile_time_s, np.float64), np.asarray(strips, np.float64)
    )


def strips_per_side(tile_time_s: npt.ArrayLike, tiles: int, block_s: float = PS_BLOCK_S) -> Floats:
    """Return into how many strips each side of a tile is cut, for one time or many.

    More strips shorten the fill (0.48 T / p) and cost the PS p^2 blocks for each of `tiles`; the
    sum is least where ``2 tiles block_s p^3 = 0.48 T``.
    """
    times_s = np.asarray(tile_time_s, np.float64)
    if not block_s:
        return np.full_like(times_s, MAX_STRIPS)
    best = np.cbrt(FILL_SHARE / 2 * times_s / (max(1, tiles) * block_s))
    return np.clip(np.round(best), 1, MAX_STRIPS)
