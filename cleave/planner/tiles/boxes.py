"""Convert devices' shares of a GEMM to planned tiles with strips and predicted times."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, starmap
from typing import Final

import numpy as np
import numpy.typing as npt

from cleave.errors import PlanError
from cleave.gemm import Gemm, Span, Tile
from cleave.planner.plan import (
    DeviceRates,
    ElementBytes,
    EvenCut,
    Plan,
    PlannedTile,
    Residency,
    tile_download_bytes,
    tile_s,
    tile_upload_bytes,
)
from cleave.planner.tiles.shape import Floats, RateArrays, fill_s, streamed_array_s, strips_per_side

Ints = npt.NDArray[np.int64]

# Share of a device's memory for tiles; the rest is for messages in flight.
USABLE_MEMORY: Final = 0.9
_LARGEST_MESSAGE_BYTES = 32 * 2**20
_LONGEST_MESSAGE_S = 3.0
_MOST_PIECES = 65536  # maximum number of tiles into which a device's share is cut
_MOST_BY_TIME = 64  # maximum number of messages that `_LONGEST_MESSAGE_S` can require


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause Python's cyclic garbage collector in a `with` block.

    The collector runs after a fixed number of new objects. Without the pause, it would account for
    a third of the time spent on large plans and on the emulator's event heap.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def planned_tiles(
    gemm: Gemm,
    element: ElementBytes,
    devices: Sequence[DeviceRates],
    boxes: Sequence[Tile],
    *,
    tiles: int,
    block_s: float,
) -> list[PlannedTile]:
    """Divide each device's share of a GEMM into tiles that fit in the device's memory.

    Args:
        boxes: each device's share of the GEMM's index space.
        tiles: approximate number of tiles in the plan.
        block_s: time in seconds that the PS spends on one block.

    Raises:
        PlanError: if a device has too little memory for one multiplication, or if its share would
            need more than about `_MOST_PIECES` tiles.
    """
    parts = [
        (device, part)
        for device, box in zip(devices, boxes, strict=True)
        for part in _fit_memory(box, gemm, element, device)
    ]
    rates = RateArrays.of([device for device, _ in parts])
    m, n, k = (side.astype(np.float64) for side in box_sizes([part for _, part in parts]))
    strip_bytes = k * element.sent
    down = (m + n) * strip_bytes
    up = m * n * np.where(k == gemm.k, element.finished, element.partial)
    slower_s = np.maximum(2 * m * n * k / rates.flops, up / rates.uplink)
    streamed_s = streamed_array_s(down / rates.downlink, slower_s)
    strips = strips_per_side(streamed_s, tiles, block_s)
    # Each strip and each block is one message. A message may have at most `_LARGEST_MESSAGE_BYTES`,
    # and must not delay heartbeats for too long on a slow link.
    per_side = np.ceil(np.sqrt(_messages(up, rates.uplink)))
    # Strips of A and of B get similar thickness, so the short side of a flat tile is not cut.
    rows = np.clip(np.round(strips * m * 2 / n), 1, strips)
    columns = np.clip(np.round(strips * n * 2 / m), 1, strips)
    rows = np.maximum(np.where(m < n, rows, strips), per_side)
    columns = np.maximum(np.where(n < m, columns, strips), per_side)
    rows = np.maximum(rows, _messages(m * strip_bytes, rates.downlink))
    columns = np.maximum(columns, _messages(n * strip_bytes, rates.downlink))
    filling_s = fill_s(streamed_s, np.maximum(rows, columns))
    strips_of = (each.astype(np.int64).tolist() for each in (rows, columns))
    cuts = starmap(EvenCut, zip((part for _, part in parts), *strips_of, strict=True))
    values = zip(
        (device.device for device, _ in parts),
        cuts,
        down.astype(np.int64).tolist(),
        up.astype(np.int64).tolist(),
        (rates.latency_s + streamed_s).tolist(),
        filling_s.tolist(),
        strict=True,
    )
    return list(starmap(PlannedTile, values))


def box_sizes(boxes: Sequence[Tile]) -> tuple[Ints, Ints, Ints]:
    """Return three arrays: the number of rows, the number of columns and the depth of each tile."""

    def sizes(spans: Iterable[Span]) -> Ints:
        bounds = np.fromiter(chain.from_iterable(spans), np.int64, 2 * len(boxes))
        found: Ints = bounds[1::2] - bounds[::2]
        return found

    m, n = sizes(tile.m for tile in boxes), sizes(tile.n for tile in boxes)
    return m, n, sizes(tile.k for tile in boxes)


def _messages(nbytes: Floats, rate: Floats) -> Floats:
    """Return the minimum number of messages for `nbytes` on a link of `rate` bytes/s."""
    by_time = np.minimum(_MOST_BY_TIME, np.ceil(nbytes / (rate * _LONGEST_MESSAGE_S)))
    return np.maximum(1, np.maximum(by_time, np.ceil(nbytes / _LARGEST_MESSAGE_BYTES)))


def _fit_memory(
    tile: Tile, gemm: Gemm, element: ElementBytes, device: DeviceRates
) -> Iterable[Tile]:
    """Return `tile`, or smaller tiles if the device has too little memory for `tile`.

    Tiles are halved along the longest side until their strips and blocks fit in memory. The depth
    is halved only as a last resort.
    """
    budget = device.memory_bytes * USABLE_MEMORY
    need = tile_download_bytes(tile, element) + tile_upload_bytes(tile, gemm, element)
    if need <= budget:
        return [tile]
    if tile.volume == 1:
        raise PlanError(
            f"device {device.device} offers {device.memory_bytes} bytes of memory, too little for "
            "any tile; remove it from the fleet"
        )
    if need > budget * _MOST_PIECES:
        raise PlanError(
            f"device {device.device} offers {device.memory_bytes} bytes of memory, but its share "
            f"of the GEMM needs {need} bytes; add devices, or let them offer more memory"
        )
    whole = {"m": tile.m, "n": tile.n, "k": tile.k}
    sides = dict(whole)
    if tile.m.size + tile.n.size > 32 and tile.k.size * element.sent * 32 <= budget:
        del sides["k"]  # a cut in depth doubles the upload, so it is the last resort
    name, side = max(sides.items(), key=lambda item: item[1].size)
    middle = side.start + side.size // 2
    halves = (Span(side.start, middle), Span(middle, side.stop))
    boxes = [Tile(**(whole | {name: half})) for half in halves]
    return [t for box in boxes for t in _fit_memory(box, gemm, element, device)]


def spans_s(tiles: Iterable[PlannedTile]) -> tuple[float, float]:
    """Return two makespans of tiles in seconds, without and with strip fill.

    Each device computes its tiles one after another.
    """
    tiles = list(tiles)
    bare = busy_s(tiles)
    fill: dict[int, float] = {}
    for tile in tiles:
        fill[tile.device] = fill.get(tile.device, 0.0) + tile.fill_s
    return max(bare.values()), max(bare[device] + fill[device] for device in bare)


def busy_s(tiles: Iterable[PlannedTile]) -> dict[int, float]:
    """Return the total time of each device's tiles in seconds, by device ID, without strip fill."""
    total: dict[int, float] = {}
    for tile in tiles:
        total[tile.device] = total.get(tile.device, 0.0) + tile.time_s
    return total


def resident_plan(
    gemm: Gemm,
    element: ElementBytes,
    devices: Sequence[DeviceRates],
    residency: Residency,
) -> Plan | None:
    """Return a plan that reuses operands on devices; None if a device has too little memory."""
    rates = {d.device: d for d in devices}
    tiles = []
    for device, cut in residency.tiles.items():
        held = residency.held_bytes.get(device, 0)
        whole = tile_download_bytes(cut.tile, element)
        down = max(0, whole - held)
        up = tile_upload_bytes(cut.tile, gemm, element)
        if whole + up > rates[device].memory_bytes * USABLE_MEMORY:
            return None
        time_s = tile_s(rates[device], down, 2 * cut.tile.volume, up)
        tiles.append(PlannedTile(device, cut, down, up, time_s))
    return Plan(gemm, tuple(tiles), max(t.time_s for t in tiles))
