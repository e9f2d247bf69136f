"""How long a plan takes with its strips as they are cut: the wavefront, message by message.

`cost.streamed_s` is the time in the limit of many strips, and `shape.fill_s` is what a finite
number of strips adds on average. For a known plan the time can be computed strip by strip: strips
are sent in the order A0 B0 A1 B1 ..., a product starts when both of its strips have arrived and the
previous product is done, and its block is sent when the link has sent the blocks before it. Message
headers, a few dozen bytes each, are left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from cleave.gemm import Span, Tile, wavefront
from cleave.planner.plan import ALIGN, ALIGNED_FROM, DeviceRates, ElementBytes, EvenCut, Plan
from cleave.planner.shape import Floats, RateArrays
from cleave.planner.tiles import box_sizes


def finish_s(
    plan: Plan, element: ElementBytes, devices: Mapping[int, DeviceRates]
) -> dict[int, float]:
    """Return, by device, seconds from the plan's first byte to the device's last block at the PS.

    Args:
        plan: a plan whose devices hold no arrays when it starts.
        element: bytes per element.
        devices: rates by the ids that the plan uses.
    """
    owners = [tile.device for tile in plan.tiles]
    rates = RateArrays.of([devices[device] for device in owners])
    return dict(zip(owners, tile_finish_s(plan, element, rates).tolist(), strict=True))


def predicted_s(plan: Plan, element: ElementBytes, devices: Mapping[int, DeviceRates]) -> float:
    """Return the makespan of a plan with its strips as they are cut; see `finish_s`."""
    return max(finish_s(plan, element, devices).values())


def tile_finish_s(plan: Plan, element: ElementBytes, rates: RateArrays) -> Floats:
    """Return, for each tile of the plan, when its device has done all its tiles; see `finish_s`.

    Args:
        rates: of the tiles' devices, one entry per tile.
    """
    tiles = plan.tiles
    places: dict[int, list[int]] = {}
    for place, tile in enumerate(tiles):
        places.setdefault(tile.device, []).append(place)
    found = np.zeros(len(tiles))
    alike: dict[tuple[int, int], list[int]] = defaultdict(list)
    for own in places.values():
        strips = tiles[own[0]].strips
        if len(own) == 1 and isinstance(strips, EvenCut):
            alike[strips[1:]].append(own[0])
        else:
            found[own] = _one_device_s(plan, element, rates, own)
    for (rows, columns), group in alike.items():
        chosen = np.array(group)
        times = _even_tiles_s(
            plan, element, rates.take(chosen), [tiles[i].strips.tile for i in group], rows, columns
        )
        if times is None:  # sides too short for as many strips as asked for
            times = np.array([_one_device_s(plan, element, rates, [i]) for i in group])
        found[chosen] = times
    return found


def _one_device_s(
    plan: Plan, element: ElementBytes, rates: RateArrays, places: Sequence[int]
) -> float:
    """Return when a device is done with its tiles, given by place in the plan.

    They are done one after another, and a strip that two tiles share is sent once.
    """
    downlink, uplink = float(rates.downlink[places[0]]), float(rates.uplink[places[0]])
    flops, latency_s = float(rates.flops[places[0]]), float(rates.latency_s[places[0]]) / 2
    held: dict[tuple[str, Span, Span], float] = {}
    down_s = compute_s = up_s = 0.0
    for cut in (plan.tiles[place].cut for place in places):
        each = element.partial if cut.tile.is_partial(plan.gemm) else element.finished
        for block in wavefront(cut):
            ready_s = 0.0
            for k in block.pieces:
                for strip in (("a", block.m, k), ("b", k, block.n)):
                    if strip not in held:
                        nbytes = strip[1].size * strip[2].size * element.sent
                        down_s += nbytes / downlink
                        held[strip] = down_s + latency_s
                    ready_s = max(ready_s, held[strip])
            compute_s = max(compute_s, ready_s) + block.flops / flops
            up_s = max(up_s, compute_s) + block.elements * each / uplink
    return up_s + latency_s


def _even_tiles_s(
    plan: Plan,
    element: ElementBytes,
    rates: RateArrays,
    boxes: Sequence[Tile],
    rows: int,
    columns: int,
) -> Floats | None:
    """Return when devices of one tile each are done, all tiles cut into equally many strips.

    Return None if a tile is too small for so many strips.
    """
    m, n, k = box_sizes(boxes)
    align = np.where(np.minimum(m, n) >= ALIGNED_FROM, ALIGN, 1)
    a, b = even_sizes(m, rows, align), even_sizes(n, columns, align)
    if a is None or b is None:
        return None
    depth = k.astype(np.float64)
    each = np.where(depth < plan.gemm.k, element.partial, element.finished)
    per_side_s = depth * element.sent / rates.downlink
    per_flop_s = 2 * depth / rates.flops
    per_element_s = each / rates.uplink
    latency_s = rates.latency_s / 2
    down_s, compute_s, up_s = (np.zeros(len(boxes)) for _ in range(3))
    for i, j, new in _order(len(a), len(b)):
        for side, index in new:
            down_s = down_s + (a if side == 0 else b)[index] * per_side_s
        elements = a[i] * b[j]
        # The strip that came last is there last; of the others this is only more true.
        compute_s = np.maximum(compute_s, down_s + latency_s) + elements * per_flop_s
        up_s = np.maximum(up_s, compute_s) + elements * per_element_s
    last_s: Floats = up_s + latency_s
    return last_s


def even_sizes(
    sides: npt.NDArray[np.int_], pieces: int, align: npt.NDArray[np.int_]
) -> Floats | None:
    """Return the sizes of `gemm.even_cuts` for many sides at once, shape (pieces, sides).

    Return None if a side is too short for so many pieces.
    """
    units = -(-sides // align)
    if (units < pieces).any():
        return None
    bounds = np.minimum(sides, units * np.arange(pieces + 1)[:, None] // pieces * align)
    sizes: Floats = np.diff(bounds, axis=0).astype(np.float64)
    return sizes


def _order(rows: int, columns: int) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """Return blocks (i, j) in wavefront order, each with the strips sent just before it."""
    order: list[tuple[int, int, list[tuple[int, int]]]] = []
    have_a = have_b = 0
    unsent: list[tuple[int, int]] = []
    while have_a < rows or have_b < columns:
        for side in (0, 1):
            if side == 0 and have_a < rows:
                unsent.append((0, have_a))
                met = [(have_a, j) for j in range(have_b)]
                have_a += 1
            elif side == 1 and have_b < columns:
                unsent.append((1, have_b))
                met = [(i, have_b) for i in range(have_a)]
                have_b += 1
            else:
                continue
            for i, j in met:
                order.append((i, j, unsent))
                unsent = []
    return order
