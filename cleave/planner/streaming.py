"""How long a plan takes with its strips as they are cut: the wavefront, message by message.

`cost.streamed_s` is the limit of many strips and `shape.fill_s` what few of them add, on average. A
plan that is known can be followed exactly: strips go out in the order A0 B0 A1 B1 ..., a product
starts when both of its strips are there and the one before it is done, and its block leaves when
the link has sent those before. Message headers, a few dozen bytes each, are left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from cleave.gemm import Span, TileCut, wavefront
from cleave.planner.plan import DeviceRates, ElementBytes, EvenCut, Plan, PlannedTile
from cleave.planner.shape import Floats


def finish_s(
    plan: Plan, element: ElementBytes, devices: Mapping[int, DeviceRates]
) -> dict[int, float]:
    """By device, seconds from the plan's first byte to the device's last block at the PS.

    Args:
        plan: whose devices hold nothing when it starts.
        element: bytes per element.
        devices: rates by the ids that the plan uses.
    """
    shares: dict[int, list[PlannedTile]] = defaultdict(list)
    for tile in plan.tiles:
        shares[tile.device].append(tile)
    found: dict[int, float] = {}
    alike: dict[tuple[int, int], list[PlannedTile]] = defaultdict(list)
    for device, tiles in shares.items():
        if len(tiles) == 1 and isinstance(tiles[0].strips, EvenCut):
            alike[tiles[0].strips.rows, tiles[0].strips.columns].append(tiles[0])
        else:
            found[device] = _one_device_s(plan, element, devices[device], [t.cut for t in tiles])
    for tiles in alike.values():
        times = _even_tiles_s(plan, element, [devices[t.device] for t in tiles], tiles)
        found.update(zip((t.device for t in tiles), times.tolist(), strict=True))
    return found


def predicted_s(plan: Plan, element: ElementBytes, devices: Mapping[int, DeviceRates]) -> float:
    """Makespan of a plan with its strips as they are cut; see `finish_s`."""
    return max(finish_s(plan, element, devices).values())


def _one_device_s(
    plan: Plan, element: ElementBytes, rates: DeviceRates, cuts: Sequence[TileCut]
) -> float:
    """A device's tiles in turn; a strip that two of them use is sent once."""
    held: dict[tuple[str, Span, Span], float] = {}
    down_s = compute_s = up_s = 0.0
    for cut in cuts:
        each = element.partial if cut.tile.is_partial(plan.gemm) else element.finished
        for block in wavefront(cut):
            ready_s = 0.0
            for k in block.pieces:
                for strip in (("a", block.m, k), ("b", k, block.n)):
                    if strip not in held:
                        nbytes = strip[1].size * strip[2].size * element.sent
                        down_s += nbytes / rates.downlink_bytes_per_s
                        held[strip] = down_s + rates.latency_s
                    ready_s = max(ready_s, held[strip])
            compute_s = max(compute_s, ready_s) + block.flops / rates.flops_per_s
            up_s = max(up_s, compute_s) + block.elements * each / rates.uplink_bytes_per_s
    return up_s + rates.latency_s


def _even_tiles_s(
    plan: Plan,
    element: ElementBytes,
    rates: Sequence[DeviceRates],
    tiles: Sequence[PlannedTile],
) -> Floats:
    """The same for one tile each on many devices, all cut into equally many strips."""
    cuts = [tile.strips for tile in tiles if isinstance(tile.strips, EvenCut)]
    boxes = [cut.tile for cut in cuts]
    align = np.array([cut.align for cut in cuts])
    a = even_sizes(np.array([box.m.size for box in boxes]), cuts[0].rows, align)
    b = even_sizes(np.array([box.n.size for box in boxes]), cuts[0].columns, align)
    if a is None or b is None:
        # Sides too short for as many strips as asked for.
        alone = zip(rates, tiles, strict=True)
        return np.array([_one_device_s(plan, element, r, [t.cut]) for r, t in alone])
    depth = np.array([t.k.size for t in boxes], np.float64)
    each = np.where(depth < plan.gemm.k, element.partial, element.finished)
    down_rate = np.array([r.downlink_bytes_per_s for r in rates])
    per_side_s = depth * element.sent / down_rate
    per_flop_s = 2 * depth / np.array([r.flops_per_s for r in rates])
    per_element_s = each / np.array([r.uplink_bytes_per_s for r in rates])
    latency_s = np.array([r.latency_s for r in rates])
    down_s, compute_s, up_s = (np.zeros(len(tiles)) for _ in range(3))
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
    """The sizes of `gemm.even_cuts` for many sides at once, (pieces, sides).

    None where a side is too short for so many pieces.
    """
    units = -(-sides // align)
    if (units < pieces).any():
        return None
    bounds = np.minimum(sides, units * np.arange(pieces + 1)[:, None] // pieces * align)
    sizes: Floats = np.diff(bounds, axis=0).astype(np.float64)
    return sizes


def _order(rows: int, columns: int) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """Blocks (i, j) in wavefront order, each with the strips that are sent just before it."""
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
