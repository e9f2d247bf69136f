"""The first planner: C is cut into columns, each column into rows, shares by device speed.

It is the column-based partition of heterogeneous matrix multiplication: a group of devices shares
a column, whose width is the group's share of the fleet's speed, and each device gets rows in
proportion to its own speed. The number of columns with the least predicted makespan wins.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from cleave.errors import PlanError
from cleave.gemm import Gemm, Span, Tile, cut_tile
from cleave.planner import cost
from cleave.planner.plan import (
    DeviceRates,
    ElementBytes,
    Plan,
    PlannedTile,
    Residency,
    tile_download_bytes,
    tile_upload_bytes,
)

_USABLE_MEMORY = 0.9  # of what a device offers; the rest is for messages on their way
_LARGEST_MESSAGE_BYTES = 32 * 2**20
_LONGEST_MESSAGE_S = 3.0
_MOST_PIECES = 8  # that a device's share may be cut into to fit its memory
_MOST_BY_TIME = 64  # a link so slow that this is not enough is beyond help


@dataclass
class GridPlanner:
    """Rows and columns in proportion to speed; see the module's text."""

    _cache: dict[tuple[object, ...], Plan] = field(default_factory=dict)

    def plan(
        self,
        gemm: Gemm,
        element: ElementBytes,
        devices: Sequence[DeviceRates],
        residencies: Sequence[Residency] = (),
    ) -> Plan:
        """See `Planner.plan`."""
        if not devices:
            raise PlanError("the fleet is empty; a plan needs at least one device")
        if not gemm.volume:
            raise PlanError(f"a GEMM of {gemm.m}x{gemm.n}x{gemm.k} has nothing to multiply")
        key = (gemm, element, tuple(devices))
        fresh = self._cache.get(key)
        if fresh is None:
            if len(self._cache) >= 4096:
                self._cache.clear()
            fresh = self._cache[key] = self._fresh(gemm, element, devices)
        rates = {d.device: d for d in devices}
        reusing = (_reuse(gemm, element, rates, r) for r in residencies)
        return min([fresh, *filter(None, reusing)], key=lambda p: p.makespan_s)

    def _fresh(self, gemm: Gemm, element: ElementBytes, devices: Sequence[DeviceRates]) -> Plan:
        devices = _roomy(gemm, element, devices)
        speed = {d.device: _speed(gemm, element, d, len(devices)) for d in devices}
        ranked = sorted(devices, key=lambda d: (-speed[d.device], d.device))
        plans = []
        for columns in _column_counts(len(ranked)):
            boxes = _partition(gemm, ranked, speed, columns)
            plans.append(_assemble(gemm, element, boxes))
        return min(plans, key=lambda p: p.makespan_s)


def _roomy(
    gemm: Gemm, element: ElementBytes, devices: Sequence[DeviceRates]
) -> Sequence[DeviceRates]:
    """The devices that can hold an equal share of C in a few pieces; the others stay idle."""
    side = (gemm.m * gemm.n / len(devices)) ** 0.5
    rows, columns = min(side, gemm.m), min(side, gemm.n)
    share = (rows + columns) * gemm.k * element.sent + rows * columns * element.finished
    roomy = [d for d in devices if share <= _MOST_PIECES * d.memory_bytes * _USABLE_MEMORY]
    if roomy:
        return roomy
    # All are small: then those that can hold anything at all.
    least = 2 * element.sent + max(element.finished, element.partial)
    some = [d for d in devices if least <= d.memory_bytes * _USABLE_MEMORY]
    if not some:
        most = max(d.memory_bytes for d in devices)
        raise PlanError(
            f"no device has the memory for a single multiplication; the largest offers {most} bytes"
        )
    return some


def _column_counts(devices: int) -> Iterable[int]:
    """Every count for small fleets, a geometric choice of about 40 for large ones."""
    if devices <= 40:
        return range(1, devices + 1)
    return sorted({round(devices ** (i / 40)) for i in range(41)})


def _speed(gemm: Gemm, element: ElementBytes, device: DeviceRates, fleet: int) -> float:
    """Share of C per second that a device manages on a square piece of an equal share."""
    side = (gemm.m * gemm.n / fleet) ** 0.5
    rows, columns = min(side, gemm.m), min(side, gemm.n)
    seconds = cost.tile_s(
        device,
        (rows + columns) * gemm.k * element.sent,
        2 * rows * columns * gemm.k,
        rows * columns * element.finished,
    )
    return 1 / seconds


def _shares(span: Span, weights: Sequence[float]) -> list[Span]:
    """Cut a span in proportion to weights, on multiples of its alignment; pieces may be empty."""
    align = 16 if span.size >= 512 else 4 if span.size >= 64 else 1
    total, running, bounds = sum(weights), 0.0, [span.start]
    for weight in weights[:-1]:
        running += weight
        bounds.append(span.start + round(span.size * running / total / align) * align)
    bounds.append(span.stop)
    return [Span(min(a, span.stop), min(b, span.stop)) for a, b in pairwise(bounds)]


def _partition(
    gemm: Gemm, ranked: Sequence[DeviceRates], speed: dict[int, float], columns: int
) -> list[tuple[DeviceRates, Tile]]:
    # Dealt like cards, there and back, so that every column has fast and slow devices.
    groups: list[list[DeviceRates]] = [[] for _ in range(columns)]
    for i, device in enumerate(ranked):
        lap, place = divmod(i, columns)
        groups[place if lap % 2 == 0 else columns - 1 - place].append(device)
    widths = [sum(speed[d.device] for d in group) for group in groups]
    boxes = []
    for group, n in zip(groups, _shares(Span(0, gemm.n), widths), strict=True):
        rows = _shares(Span(0, gemm.m), [speed[d.device] for d in group])
        for device, m in zip(group, rows, strict=True):
            if m.size and n.size:
                boxes.append((device, Tile(m, n, Span(0, gemm.k))))
    return boxes


def _assemble(gemm: Gemm, element: ElementBytes, boxes: list[tuple[DeviceRates, Tile]]) -> Plan:
    tiles: list[PlannedTile] = []
    makespan_s = 0.0
    for device, box in boxes:
        finish_s = 0.0
        for tile in _fit_memory(box, gemm, element, device):
            planned = _planned(gemm, element, device, tile, len(boxes))
            finish_s += planned.time_s
            tiles.append(planned)
        makespan_s = max(makespan_s, finish_s)
    return Plan(gemm, tuple(tiles), makespan_s)


def _planned(
    gemm: Gemm, element: ElementBytes, device: DeviceRates, tile: Tile, tiles: int
) -> PlannedTile:
    down, up = tile_download_bytes(tile, element), tile_upload_bytes(tile, gemm, element)
    time_s = cost.tile_s(device, down, 2 * tile.volume, up)
    strips = cost.strips_per_side(time_s, tiles)
    # A strip is one message and so is a block: neither may be too large, nor, where links are slow,
    # take so long that heartbeats wait behind it.
    per_side = math.isqrt(_messages(up, device, up=True) - 1) + 1
    least_rows = max(
        per_side, _messages(tile.m.size * tile.k.size * element.sent, device, up=False)
    )
    least_columns = max(
        per_side, _messages(tile.n.size * tile.k.size * element.sent, device, up=False)
    )
    # Strips of a thickness near the other side's, so that a flat tile is not cut where it is thin.
    rows = columns = strips
    if tile.m.size < tile.n.size:
        rows = max(1, min(rows, round(rows * tile.m.size * 2 / tile.n.size)))
    elif tile.n.size < tile.m.size:
        columns = max(1, min(columns, round(columns * tile.n.size * 2 / tile.m.size)))
    rows, columns = max(rows, least_rows), max(columns, least_columns)
    cut = cut_tile(tile, rows, columns, align=4 if min(tile.m.size, tile.n.size) >= 64 else 1)
    return PlannedTile(device.device, cut, down, up, time_s)


def _messages(nbytes: int, device: DeviceRates, *, up: bool) -> int:
    """How many messages so many bytes of a device are cut into, at least."""
    rate = device.uplink_bytes_per_s if up else device.downlink_bytes_per_s
    by_time = min(_MOST_BY_TIME, math.ceil(nbytes / (rate * _LONGEST_MESSAGE_S)))
    return max(1, by_time, math.ceil(nbytes / _LARGEST_MESSAGE_BYTES))


def _fit_memory(
    tile: Tile, gemm: Gemm, element: ElementBytes, device: DeviceRates
) -> Iterable[Tile]:
    """The tile, halved along its longest side until strips and block fit the device."""
    budget = device.memory_bytes * _USABLE_MEMORY
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
    return [t for box in boxes for t in _fit_memory(box, gemm, element, device)]


def _reuse(
    gemm: Gemm, element: ElementBytes, rates: dict[int, DeviceRates], residency: Residency
) -> Plan | None:
    """The plan that follows what devices hold; None when it does not fit them."""
    tiles = []
    for device, cut in residency.tiles.items():
        held = residency.held_bytes.get(device, 0)
        whole = tile_download_bytes(cut.tile, element)
        down = max(0, whole - held)
        up = tile_upload_bytes(cut.tile, gemm, element)
        if whole + up > rates[device].memory_bytes * _USABLE_MEMORY:
            return None
        time_s = cost.tile_s(rates[device], down, 2 * cut.tile.volume, up)
        tiles.append(PlannedTile(device, cut, down, up, time_s))
    return Plan(gemm, tuple(tiles), max(t.time_s for t in tiles))
