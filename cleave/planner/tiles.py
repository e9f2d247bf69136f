"""From integer boxes to planned tiles: memory, messages, strips, predicted times."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from cleave.errors import PlanError
from cleave.gemm import Gemm, Span, Tile
from cleave.planner import cost
from cleave.planner.plan import (
    DeviceRates,
    ElementBytes,
    EvenCut,
    Plan,
    PlannedTile,
    Residency,
    tile_download_bytes,
    tile_upload_bytes,
)
from cleave.planner.shape import Floats, RateArrays, fill_s, streamed_array_s, strips_per_side

USABLE_MEMORY: Final = 0.9
"""Of what a device offers; the rest is for messages on their way."""

_LARGEST_MESSAGE_BYTES = 32 * 2**20
_LONGEST_MESSAGE_S = 3.0
_MOST_PIECES = 65536  # that one share may be cut into
_MOST_BY_TIME = 64  # a link so slow that this is not enough is beyond help


def planned_tiles(
    gemm: Gemm,
    element: ElementBytes,
    devices: Sequence[DeviceRates],
    boxes: Sequence[Tile],
    *,
    tiles: int,
    block_s: float,
) -> list[PlannedTile]:
    """The tile of each device, or several where its memory does not hold it at once.

    Args:
        devices, boxes: pairs of a device and its part of the index space.
        tiles: how many tiles the plan has, about.
        block_s: what a block costs the PS.

    Raises:
        PlanError: when not even a single multiplication fits.
    """
    fitting: list[tuple[DeviceRates, Tile]] = []
    for device, box in zip(devices, boxes, strict=True):
        m, n, k = box.m.size, box.n.size, box.k.size
        returned = element.finished if k == gemm.k else element.partial
        if (m + n) * k * element.sent + m * n * returned <= device.memory_bytes * USABLE_MEMORY:
            fitting.append((device, box))
        else:
            fitting += [(device, part) for part in fit_memory(box, gemm, element, device)]
    return _planned(gemm, element, fitting, tiles, block_s)


def _planned(
    gemm: Gemm,
    element: ElementBytes,
    fitting: Sequence[tuple[DeviceRates, Tile]],
    tiles: int,
    block_s: float,
) -> list[PlannedTile]:
    rates = RateArrays.of([device for device, _ in fitting])
    sides = np.array([(t.m.size, t.n.size, t.k.size) for _, t in fitting], np.float64)
    m, n, k = (np.ascontiguousarray(side) for side in sides.T)
    strip_bytes = k * element.sent
    down = (m + n) * strip_bytes
    up = m * n * np.where(k == gemm.k, element.finished, element.partial)
    slower_s = np.maximum(2 * m * n * k / rates.flops, up / rates.uplink)
    streamed_s = streamed_array_s(down / rates.downlink, slower_s)
    strips = strips_per_side(streamed_s, tiles, block_s)
    # A strip is one message and so is a block: neither may be too large, nor, where links are slow,
    # take so long that heartbeats wait behind it.
    per_side = np.ceil(np.sqrt(_messages(up, rates.uplink)))
    # Strips of a thickness near the other side's, so that a flat tile is not cut where it is thin.
    rows = np.clip(np.round(strips * m * 2 / n), 1, strips)
    columns = np.clip(np.round(strips * n * 2 / m), 1, strips)
    rows = np.maximum(np.where(m < n, rows, strips), per_side)
    columns = np.maximum(np.where(n < m, columns, strips), per_side)
    rows = np.maximum(rows, _messages(m * strip_bytes, rates.downlink))
    columns = np.maximum(columns, _messages(n * strip_bytes, rates.downlink))
    filling_s = fill_s(streamed_s, np.maximum(rows, columns))
    values = zip(
        fitting,
        rows.astype(np.int64).tolist(),
        columns.astype(np.int64).tolist(),
        down.astype(np.int64).tolist(),
        up.astype(np.int64).tolist(),
        (rates.latency_s + streamed_s).tolist(),
        filling_s.tolist(),
        strict=True,
    )
    return [
        PlannedTile(device.device, EvenCut(tile, r, c), d, u, t, f)
        for (device, tile), r, c, d, u, t, f in values
    ]


def _messages(nbytes: Floats, rate: Floats) -> Floats:
    """How many messages so many bytes are cut into, at least."""
    by_time = np.minimum(_MOST_BY_TIME, np.ceil(nbytes / (rate * _LONGEST_MESSAGE_S)))
    return np.maximum(1, np.maximum(by_time, np.ceil(nbytes / _LARGEST_MESSAGE_BYTES)))


def fit_memory(
    tile: Tile, gemm: Gemm, element: ElementBytes, device: DeviceRates
) -> Iterable[Tile]:
    """The tile, halved along its longest side until strips and blocks fit the device.

    Raises:
        PlanError: when not even a single multiplication fits.
    """
    budget = device.memory_bytes * USABLE_MEMORY
    need = tile_download_bytes(tile, element) + tile_upload_bytes(tile, gemm, element)
    if need <= budget:
        return [tile]
    if tile.volume == 1:
        raise PlanError(
            f"device {device.device} offers {device.memory_bytes} bytes of memory, "
            f"which holds no tile at all; remove it from the fleet"
        )
    if need > budget * _MOST_PIECES:
        raise PlanError(
            f"device {device.device} offers {device.memory_bytes} bytes of memory and its share of "
            f"the GEMM needs {need}; add devices, or give them more memory"
        )
    sides = {"m": tile.m, "n": tile.n, "k": tile.k}
    if tile.m.size + tile.n.size > 32 and tile.k.size * element.sent * 32 <= budget:
        del sides["k"]  # a cut in depth doubles the upload: only where rows and columns run out
    name, side = max(sides.items(), key=lambda item: item[1].size)
    middle = side.start + side.size // 2
    halves = (Span(side.start, middle), Span(middle, side.stop))
    boxes = [Tile(**({"m": tile.m, "n": tile.n, "k": tile.k} | {name: half})) for half in halves]
    return [t for box in boxes for t in fit_memory(box, gemm, element, device)]


def spans_s(tiles: Iterable[PlannedTile]) -> tuple[float, float]:
    """Makespan without and with strip fill: a device does its tiles one after another."""
    tiles = list(tiles)
    bare = busy_s(tiles)
    fill: dict[int, float] = {}
    for tile in tiles:
        fill[tile.device] = fill.get(tile.device, 0.0) + tile.fill_s
    return max(bare.values()), max(bare[device] + fill[device] for device in bare)


def busy_s(tiles: Iterable[PlannedTile]) -> dict[int, float]:
    """By device, how long its tiles take."""
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
    """The plan that follows what devices hold; None when it does not fit them."""
    rates = {d.device: d for d in devices}
    tiles = []
    for device, cut in residency.tiles.items():
        held = residency.held_bytes.get(device, 0)
        whole = tile_download_bytes(cut.tile, element)
        down = max(0, whole - held)
        up = tile_upload_bytes(cut.tile, gemm, element)
        if whole + up > rates[device].memory_bytes * USABLE_MEMORY:
            return None
        time_s = cost.tile_s(rates[device], down, 2 * cut.tile.volume, up)
        tiles.append(PlannedTile(device, cut, down, up, time_s))
    return Plan(gemm, tuple(tiles), max(t.time_s for t in tiles))
