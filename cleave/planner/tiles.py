"""From integer boxes to planned tiles: memory, messages, strips, predicted times."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

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

USABLE_MEMORY: Final = 0.9
"""Of what a device offers; the rest is for messages on their way."""

_LARGEST_MESSAGE_BYTES = 32 * 2**20
_LONGEST_MESSAGE_S = 3.0
_MOST_BY_TIME = 64  # a link so slow that this is not enough is beyond help


def planned_tiles(
    gemm: Gemm,
    element: ElementBytes,
    device: DeviceRates,
    box: Tile,
    *,
    tiles: int,
    block_s: float,
) -> list[PlannedTile]:
    """The tile of a device, or several where its memory does not hold it at once.

    Args:
        box: its part of the index space.
        tiles: how many tiles the plan has, about.
        block_s: what a block costs the PS.

    Raises:
        PlanError: when not even a single multiplication fits.
    """
    return [
        _planned(gemm, element, device, tile, tiles, block_s)
        for tile in fit_memory(box, gemm, element, device)
    ]


def _planned(
    gemm: Gemm, element: ElementBytes, device: DeviceRates, tile: Tile, tiles: int, block_s: float
) -> PlannedTile:
    m, n, k = tile.m.size, tile.n.size, tile.k.size
    sent, returned = k * element.sent, element.finished if k == gemm.k else element.partial
    down, up = (m + n) * sent, m * n * returned
    download_s = down / device.downlink_bytes_per_s
    compute_s = 2 * m * n * k / device.flops_per_s
    upload_s = up / device.uplink_bytes_per_s
    streamed_s = cost.streamed_s(download_s, compute_s, upload_s)
    strips = cost.strips_per_side(streamed_s, tiles, block_s)
    # A strip is one message and so is a block: neither may be too large, nor, where links are slow,
    # take so long that heartbeats wait behind it.
    per_side = math.isqrt(_messages(up, device.uplink_bytes_per_s) - 1) + 1
    least_rows = max(per_side, _messages(m * sent, device.downlink_bytes_per_s))
    least_columns = max(per_side, _messages(n * sent, device.downlink_bytes_per_s))
    # Strips of a thickness near the other side's, so that a flat tile is not cut where it is thin.
    rows = columns = strips
    if m < n:
        rows = max(1, min(rows, round(rows * m * 2 / n)))
    elif n < m:
        columns = max(1, min(columns, round(columns * n * 2 / m)))
    rows, columns = max(rows, least_rows), max(columns, least_columns)
    return PlannedTile(
        device.device,
        EvenCut(tile, rows, columns),
        down,
        up,
        2 * device.latency_s + streamed_s,
        cost.fill_s(download_s, compute_s, upload_s, max(rows, columns)),
    )


def _messages(nbytes: int, rate: float) -> int:
    """How many messages so many bytes are cut into, at least."""
    by_time = min(_MOST_BY_TIME, math.ceil(nbytes / (rate * _LONGEST_MESSAGE_S)))
    return max(1, by_time, math.ceil(nbytes / _LARGEST_MESSAGE_BYTES))


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
