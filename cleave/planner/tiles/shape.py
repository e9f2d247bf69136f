"""The largest tile that one device can compute in a given time.

Arrays have one value per device. The sides of tiles are real numbers, which other modules round to
integers (the *fluid limit*). The *volume* of a tile is its number of multiply-adds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from cleave.gemm import Gemm
from cleave.planner.plan import FILL_SHARE, MAX_STRIPS, PS_BLOCK_S, DeviceRates, ElementBytes

Floats = npt.NDArray[np.float64]

_GOLDEN = 0.6180339887498949
_GOLDEN_STEPS = 22
_FEW = 256  # maximum number of devices for the search on grids
_GRID, _GRIDS = 17, 5  # points and rounds that limit the error to `SEARCH_ERROR`
SNAPPED: Final = 8  # tiles with a depth of at least k / 8 get a depth that divides k
SEARCH_ERROR: Final = 3e-4  # maximum relative error of the best tile's volume


@dataclass(frozen=True, slots=True)
class RateArrays:
    """The rates of several devices. Unlike in `DeviceRates`, `latency_s` is for a round trip."""

    downlink: Floats
    uplink: Floats
    flops: Floats
    latency_s: Floats
    memory: Floats

    @classmethod
    def of(cls, devices: Sequence[DeviceRates]) -> RateArrays:
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
        return RateArrays(
            self.downlink[chosen],
            self.uplink[chosen],
            self.flops[chosen],
            self.latency_s[chosen],
            self.memory[chosen],
        )

    def throttled(self, egress_bytes_per_s: float, ingress_bytes_per_s: float) -> RateArrays:
        """Return rates whose sum over all devices does not exceed the network card's rates.

        In each direction, all link rates are multiplied by the same factor.
        """
        down = min(1.0, egress_bytes_per_s / float(self.downlink.sum()))
        up = min(1.0, ingress_bytes_per_s / float(self.uplink.sum()))
        if down == up == 1.0:
            return self
        return RateArrays(
            self.downlink * down, self.uplink * up, self.flops, self.latency_s, self.memory
        )


@dataclass(frozen=True, slots=True)
class BestTile:
    """The volume and the depth of the largest tile that each device can compute in a given time."""

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
    """Return the largest tile that each device can download, compute and return within `time_s`.

    The sides and the depth of a tile are at most those of the GEMM. A tile of full depth returns
    finished elements of C. Any other tile returns partial sums.

    Args:
        least_depth: minimum depth of a tile, which limits the PS's memory for partial sums.
        two_dimensional: whether to use only tiles of full depth.
        memory: for each device, the memory in bytes for all strips and blocks of the tile; None if
            memory is unlimited.
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
    """Return each device's largest tile among tiles of depth k, k/2, k/3, ... or k / `SNAPPED`.

    `best` contains the largest tiles of any depth. Tiles shallower than about k / `SNAPPED` are
    returned unchanged, because any small depth is close to a divisor of k. See `best_tile` for the
    other arguments.
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
    """Return, for each device, the depth with the largest volume, and this volume.

    The volume as a function of the depth has one maximum. For many devices, golden-section search
    finds the maximum with the fewest evaluations. For few devices, the overhead of numpy calls
    dominates, so a search on increasingly fine grids is used, which needs fewer calls.
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
    """Return the result of `_best_depth`, found on increasingly fine grids of log(depth)."""
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
    """Return, for each device, the maximum number of elements of C in a tile of depth `depth`.

    Each device must download, compute and return its tile within `available` seconds. The
    tile is square unless C is too narrow.
    """
    per_side_s = depth * sent / rates.downlink  # download of one row of A or one column of B
    per_element_s = np.maximum(2 * depth / rates.flops, returned / rates.uplink)
    narrow, wide = float(min(gemm.m, gemm.n)), float(max(gemm.m, gemm.n))
    # A square of side s takes 2 s per_side_s to download. If the download is slowest, this is the
    # time of the tile.
    side = available / (2 * per_side_s)
    hidden = per_element_s * side <= per_side_s
    area = np.where(
        hidden,
        side * side,
        np.maximum(0.0, available - per_side_s**2 / per_element_s) / per_element_s,
    )
    clipped = area > narrow * narrow
    if clipped.any():
        curve = LongestSide(np.full_like(available, narrow), per_side_s, per_element_s)
        length = curve(available)
        area = np.where(clipped, narrow * np.minimum(wide, length), area)
    if memory is not None:
        # Strips and blocks of a square tile: 2 s c sent + s^2 returned.
        strip = depth * sent
        side = (np.sqrt(strip * strip + returned * memory) - strip) / returned
        area = np.minimum(area, side * side)
    return area


class LongestSide:
    """Function that maps the available time to the maximum length of a tile of fixed width.

    With length a and width b: ``download = (a + b) per_side_s`` and ``X = a b per_element_s``. The
    time is ``download`` if ``X <= download / 2``, else ``X + download^2 / (4 X)``.

    Args:
        width: the fixed width b of each tile.
        per_side_s: download time in seconds of each row or column of the tile.
        per_element_s: the larger of the compute and upload times of each element of C.
    """

    def __init__(self, width: Floats, per_side_s: Floats, per_element_s: Floats) -> None:
        self._width = width
        self._per_side_s = per_side_s
        self._per_length_s = per_length_s = width * per_element_s  # X per unit of length
        # The larger root of (x^2 + p^2/4) a^2 - (x t - p^2 b / 2) a + p^2 b^2 / 4 = 0.
        quarter = per_side_s * per_side_s / 4
        square = per_length_s * per_length_s + quarter
        self._half_width = 2 * quarter * width
        self._constant = 4 * square * quarter * width * width
        self._square = 2 * square
        # The two cases meet at 2 X = download, where a = p b / (2 x - p).
        self._excess = 2 * per_length_s - per_side_s
        self._never_above = self._excess <= 0
        self._meeting = per_side_s * 2 * per_length_s * width

    def __call__(self, available: Floats) -> Floats:
        """Return the maximum length of each tile, which is 0 if the available time is too short."""
        linear = self._per_length_s * available
        linear -= self._half_width
        root = linear * linear
        root -= self._constant
        np.maximum(root, 0.0, out=root)
        np.sqrt(root, out=root)
        root += linear
        root /= self._square
        # If the download is slowest, a + b = available / per_side_s.
        hidden = available * self._excess <= self._meeting
        hidden |= self._never_above
        by_download = available / self._per_side_s
        by_download -= self._width
        np.copyto(root, by_download, where=hidden)
        return np.maximum(root, 0.0, out=root)


def streamed_array_s(download_s: Floats, slower_s: Floats) -> Floats:
    """Return each tile's time in seconds, as `plan.streamed_s` does for a single tile.

    `slower_s` is the larger of each tile's compute and upload times.
    """
    slower = np.maximum(slower_s, 1e-300)
    return np.where(
        slower_s <= download_s / 2, download_s, slower_s + download_s * download_s / (4 * slower)
    )


def fill_s(tile_time_s: npt.ArrayLike, strips: npt.ArrayLike) -> Floats:
    """Return the strip fill: the time that a finite number of strips adds to a tile's time."""
    return np.divide(
        FILL_SHARE * np.asarray(tile_time_s, np.float64), np.asarray(strips, np.float64)
    )


def strips_per_side(tile_time_s: npt.ArrayLike, tiles: int, block_s: float = PS_BLOCK_S) -> Floats:
    """Return the best number of strips per side of a tile in a plan with `tiles` tiles.

    With p strips per side and a tile time of T, the strip fill is 0.48 T / p. The PS must handle
    p^2 blocks of each tile. The best p satisfies ``2 tiles block_s p^3 = 0.48 T``.
    """
    times_s = np.asarray(tile_time_s, np.float64)
    if not block_s:
        return np.full_like(times_s, MAX_STRIPS)
    best = np.cbrt(FILL_SHARE / 2 * times_s / (max(1, tiles) * block_s))
    return np.clip(np.round(best), 1, MAX_STRIPS)
