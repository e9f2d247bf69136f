"""The predicted time of a plan with its actual strips.

Strips are sent in the order A0 B0 A1 B1 .... A device starts to compute a block when both strips of
the block have arrived and the previous block has been computed. Blocks are returned in the order of
computation. GEMMs that are submitted together run one after another without a pause.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from cleave.gemm import Gemm, Span, Tile, cut_tile, wavefront
from cleave.planner.plan import (
    ALIGN,
    ALIGNED_FROM,
    DeviceRates,
    ElementBytes,
    EvenCut,
    HeldSide,
    Plan,
    PlannedTile,
)
from cleave.planner.tiles.boxes import box_sizes
from cleave.planner.tiles.shape import Floats, RateArrays

# Maximum number of distinct times at which downloads end. In a larger fleet, downloads with similar
# end times are treated as ending together, at the latest of these times.
_MOST_TIMES: Final = 256

Places = npt.NDArray[np.intp]
Arrivals = Callable[[Places, Floats], Floats]
"""Function that maps device indices and byte counts to the times when these bytes are sent."""


class SharedCard:
    """Computes the times of downloads that share the PS's network card.

    The card divides its rate equally among the devices to which it is still sending. If a device's
    own link is slower than an equal share, the other devices get the unused bandwidth. `nbytes` is
    the size of each device's download.
    """

    def __init__(self, nbytes: Floats, bytes_per_s: Floats, card_bytes_per_s: float) -> None:
        # The times at which downloads end, and the bytes sent to each device by these times.
        at_once = -(-len(nbytes) // _MOST_TIMES)
        now_s, sent = 0.0, np.zeros(len(nbytes))
        times, sums = [now_s], [sent]
        left = np.flatnonzero(nbytes > 0)
        while len(left):
            rates = equal_shares(bytes_per_s[left], card_bytes_per_s)
            needs_s = (nbytes[left] - sent[left]) / rates
            few = min(at_once, len(left)) - 1
            step_s = float(np.partition(needs_s, few)[few])
            ready = needs_s <= step_s * (1 + 1e-9)
            sent = sent.copy()
            sent[left] = np.where(ready, nbytes[left], sent[left] + rates * step_s)
            now_s += step_s
            times.append(now_s)
            sums.append(sent)
            left = left[~ready]
        self._times_s, self._sent = np.array(times), np.array(sums)

    def sent_s(self, places: Places, nbytes: Floats) -> Floats:
        sent = self._sent[:, places]
        after = np.clip((sent < nbytes).sum(axis=0), 1, len(sent) - 1)
        which = np.arange(len(places))
        low, high = sent[after - 1, which], sent[after, which]
        share = np.clip((nbytes - low) / np.maximum(high - low, 1e-300), 0.0, 1.0)
        found: Floats = self._times_s[after - 1] + share * (
            self._times_s[after] - self._times_s[after - 1]
        )
        return found


def equal_shares(most: Floats, total: float) -> Floats:
    """Divide `total` into equal shares, capped at `most`. Uncapped shares receive the excess."""
    order = np.sort(most)
    count = len(order)
    # Candidate levels: the first n get their maximum, and the others share the rest equally.
    taken = np.concatenate(([0.0], np.cumsum(order)[:-1]))
    levels = (total - taken) / np.arange(count, 0, -1)
    level = levels[np.argmax(levels <= order)] if (levels <= order).any() else np.inf
    shares: Floats = np.minimum(most, level)
    return shares


def predicted_s(plan: Plan, element: ElementBytes, devices: Mapping[int, DeviceRates]) -> float:
    """Return the predicted time in seconds of a plan with its actual strips."""
    owners = list(dict.fromkeys(tile.device for tile in plan.tiles))
    rates = RateArrays.of([devices[device] for device in owners])
    places = {device: place for place, device in enumerate(owners)}
    return float(finish_times_s([(plan, "")], element, rates, places).max())


def finish_times_s(
    work: Sequence[tuple[Plan, HeldSide]],
    element: ElementBytes,
    rates: RateArrays,
    places: Mapping[int, int],
    egress_bytes_per_s: float = math.inf,
) -> Floats:
    """Return the time in seconds until each device returns its last block; 0 for idle devices.

    The plans are for GEMMs that are submitted together. A device runs its tiles of one plan after
    its tiles of the previous plan, without a pause of its link or processor.

    Args:
        work: plans in the order of submission, each with the operand that devices already store.
            A device with several tiles of a plan, because of little memory, stores no operand.
        places: maps each device ID to the index of the device in `rates`.
        egress_bytes_per_s: sending rate of the PS's network card.
    """

    progress = _Progress(element, rates, lambda devices, nbytes: nbytes / rates.downlink[devices])
    progress.follow(work, places)
    if float(rates.downlink[progress.sent_bytes > 0].sum()) > egress_bytes_per_s:
        card = SharedCard(progress.sent_bytes, rates.downlink, egress_bytes_per_s)
        progress = _Progress(element, rates, card.sent_s)
        progress.follow(work, places)
    up_s = progress.up_s
    last_s: Floats = np.where(up_s > 0, up_s + rates.latency_s / 2, 0.0)
    return last_s


def held_bytes(plan: Plan, held: HeldSide, element: ElementBytes) -> int:
    """Return the size of operands that devices already store and need not download, in bytes."""
    if not held:
        return 0
    tiles = Counter(tile.device for tile in plan.tiles)
    boxes = (tile.tile for tile in plan.tiles if tiles[tile.device] == 1)
    return sum((b.m if held == "a" else b.n).size * b.k.size for b in boxes) * element.sent


class _Progress:
    """The times at which each device's processor and uplink finish the plans added so far.

    Attributes:
        sent_bytes: bytes sent to each device.
    """

    def __init__(self, element: ElementBytes, rates: RateArrays, arrivals: Arrivals) -> None:
        self._element = element
        self._rates = rates
        self._arrivals = arrivals
        self.sent_bytes, self.compute_s, self.up_s = np.zeros((3, len(rates)))

    def follow(self, work: Sequence[tuple[Plan, HeldSide]], places: Mapping[int, int]) -> None:
        """Add plans. `places` maps each device ID to the device's index in the rate arrays."""
        for plan, held in work:
            own: dict[int, list[PlannedTile]] = defaultdict(list)
            for tile in plan.tiles:
                own[places[tile.device]].append(tile)
            alike: dict[tuple[int, int], list[int]] = defaultdict(list)
            for place, tiles in own.items():
                strips = tiles[0].strips
                if len(tiles) == 1 and isinstance(strips, EvenCut):
                    alike[strips[1:]].append(place)
                else:
                    self._follow_tiles(plan.gemm, held, place, tiles)
            for (rows, columns), group in alike.items():
                boxes = [own[place][0].tile for place in group]
                if not self._follow_even(plan.gemm, held, np.array(group), boxes, rows, columns):
                    for place in group:  # a side is too short for this number of strips
                        self._follow_tiles(plan.gemm, held, place, own[place])

    def _follow_tiles(
        self, gemm: Gemm, held: HeldSide, place: int, tiles: Sequence[PlannedTile]
    ) -> None:
        """Add one device's tiles in order. A strip that several tiles share is sent only once."""
        rates, element = self._rates, self._element
        uplink, flops = float(rates.uplink[place]), float(rates.flops[place])
        here, latency_s = np.array([place]), float(rates.latency_s[place]) / 2
        there: dict[tuple[str, Span, Span], float] = {}
        sent_bytes = float(self.sent_bytes[place])
        compute_s, up_s = float(self.compute_s[place]), float(self.up_s[place])
        for cut in (tile.cut for tile in tiles):
            each = element.partial if cut.tile.is_partial(gemm) else element.finished
            for block in wavefront(cut):
                ready_s = 0.0
                for k in block.pieces:
                    for strip in (("a", block.m, k), ("b", k, block.n)):
                        if strip[0] == held and len(tiles) == 1:
                            continue
                        if strip not in there:
                            sent_bytes += strip[1].size * strip[2].size * element.sent
                            sent_s = self._arrivals(here, np.array([sent_bytes]))
                            there[strip] = float(sent_s[0]) + latency_s
                        ready_s = max(ready_s, there[strip])
                compute_s = max(compute_s, ready_s) + block.flops / flops
                up_s = max(up_s, compute_s) + block.elements * each / uplink
        self.sent_bytes[place], self.compute_s[place], self.up_s[place] = (
            sent_bytes,
            compute_s,
            up_s,
        )

    def _follow_even(
        self,
        gemm: Gemm,
        held: HeldSide,
        chosen: Places,
        boxes: Sequence[Tile],
        rows: int,
        columns: int,
    ) -> bool:
        """Add one tile for each of the `chosen` devices. All tiles have `rows` x `columns` blocks.

        Return False, and add nothing, if a tile is too small for that many blocks.
        """
        m, n, k = box_sizes(boxes)
        align = np.where(np.minimum(m, n) >= ALIGNED_FROM, ALIGN, 1)
        a, b = even_sizes(m, rows, align), even_sizes(n, columns, align)
        if a is None or b is None:
            return False
        depth, of, element = k.astype(np.float64), self._rates.take(chosen), self._element
        per_side_bytes = depth * element.sent
        per_flop_s = 2 * depth / of.flops
        per_element_s = np.where(depth < gemm.k, element.partial, element.finished) / of.uplink
        latency_s = of.latency_s / 2
        sent_bytes, compute_s = self.sent_bytes[chosen], self.compute_s[chosen]
        up_s = self.up_s[chosen]
        sent_s = self._arrivals(chosen, sent_bytes)
        for i, j, new in _order(len(a), len(b)):
            for side, index in new:
                if "ab"[side] != held:
                    sent_bytes = sent_bytes + (a if side == 0 else b)[index] * per_side_bytes
                sent_s = self._arrivals(chosen, sent_bytes)
            elements = a[i] * b[j]
            # The strip sent last arrives last, so all strips have arrived by then.
            compute_s = np.maximum(compute_s, sent_s + latency_s) + elements * per_flop_s
            up_s = np.maximum(up_s, compute_s) + elements * per_element_s
        self.sent_bytes[chosen], self.compute_s[chosen] = sent_bytes, compute_s
        self.up_s[chosen] = up_s
        return True


def even_sizes(
    sides: npt.NDArray[np.int_], pieces: int, align: npt.NDArray[np.int_]
) -> Floats | None:
    """Return the piece sizes that `gemm.even_cuts` yields for each side, shape (pieces, sides).

    Return None if a side is too short for this number of pieces.
    """
    units = -(-sides // align)
    if (units < pieces).any():
        return None
    bounds = np.minimum(sides, units * np.arange(pieces + 1)[:, None] // pieces * align)
    sizes: Floats = np.diff(bounds, axis=0).astype(np.float64)
    return sizes


def _order(rows: int, columns: int) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """Return blocks (i, j) in wavefront order, each with the strips that are sent for the block."""
    tile = Tile(Span(0, rows), Span(0, columns), Span(0, 1))
    order: list[tuple[int, int, list[tuple[int, int]]]] = []
    sent: set[tuple[int, int]] = set()
    for block in wavefront(cut_tile(tile, rows, columns)):
        strips = (0, block.m.start), (1, block.n.start)
        new = [strip for strip in strips if strip not in sent]
        order.append((block.m.start, block.n.start, new))
        sent.update(strips)
    return order
