"""The tile planner, which selects devices for a GEMM and assigns a tile to each.

The planner computes each device's best tile and the lower bound (`shape`, `bound`), distributes
devices over columns and slabs, and balances a few arrangements (`balance`). The plan does not
depend on the order of the `devices` argument.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from itertools import groupby, islice, starmap
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from cleave.errors import PlanError
from cleave.gemm import Gemm, Span, Tile
from cleave.planner.plan import (
    PS_BLOCK_S,
    PS_BYTE_S,
    DeviceRates,
    ElementBytes,
    Plan,
    PsRates,
    Region,
    Residency,
)
from cleave.planner.tiles.balance import Balancer, Boxes, Fluid, Frame, box_times_s, drafts
from cleave.planner.tiles.bound import isolated_bound_s
from cleave.planner.tiles.boxes import (
    USABLE_MEMORY,
    busy_s,
    collector_paused,
    planned_tiles,
    resident_plan,
    spans_s,
)
from cleave.planner.tiles.replan import CachedPlan, PlanCache, updated
from cleave.planner.tiles.shape import BestTile, Floats, RateArrays, best_tile, snapped

Indices = npt.NDArray[np.intp]

_LARGE_FLEET: Final = 2048  # for larger fleets, only the most promising arrangements are tried
_SMALL_FLEET: Final = 24
_LEAST_ELEMENTS: Final = 256  # elements of C per device below which subsets may be faster
_PROMISING: Final = 5  # number of subset sizes to plan if the network card is the limit
_PART_BLOCKS: Final = 4  # assumed blocks per device in a part
_SAMPLE: Final = 512  # maximum number of devices that represent a subset in comparisons
_MEMORY_MARGIN: Final = 0.9  # because integer tiles are slightly larger than fluid tiles
_WORTH_NOT_ALIGNING: Final = 0.005  # share of the makespan that alignment may cost
_MOST_PIECES: Final = 8  # maximum number of tiles of a device with little memory
_FEW_CHANGES: Final = 4  # maximum number of devices that leave or join before a new plan
_WORTH_REPLANNING: Final = 1.1  # an updated plan that is slower by this factor is used once
_BARELY_USABLE: Final = 3.0  # an updated plan that is slower by this factor is not used
_NEXT_TO_NOTHING: Final = 0.005  # far slower devices are unused below this share of all volume
_FAR_SLOWER: Final = 50.0  # ratio of the median device's volume to a far slower device's


class PlanMethod(Enum):
    """The allowed ways to cut a GEMM into tiles.

    `THREE_D` also cuts the depth. `TWO_D`, the published method, cuts only rows and columns.
    """

    THREE_D = "3d"
    TWO_D = "2d"


class _Latest(NamedTuple):
    """A GEMM's latest plan, and the rates of the connected devices by ID.

    `planned_s` is the makespan in seconds of the latest plan that was made from scratch.
    """

    plan: Plan
    rates: dict[int, DeviceRates]
    planned_s: float


@dataclass
class TilePlanner:
    """Plans GEMMs for fleets. The planner is thread-safe, and caches plans.

    Args:
        ps: rates and memory of the parameter server.
        method: the axes along which a GEMM may be split: M and N, or also K.
    """

    ps: PsRates = field(default_factory=lambda: PsRates(block_s=PS_BLOCK_S, byte_s=PS_BYTE_S))
    method: PlanMethod = PlanMethod.THREE_D
    _cache: PlanCache = field(default_factory=PlanCache)
    _latest: dict[tuple[Gemm, ElementBytes], _Latest] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def __reduce__(self) -> tuple[object, ...]:
        return TilePlanner, (self.ps, self.method)  # a pickled copy has an empty cache

    def plan(
        self,
        gemm: Gemm,
        element: ElementBytes,
        devices: Sequence[DeviceRates],
        residencies: Sequence[Residency] = (),
    ) -> Plan:
        """Return the best plan for one GEMM. `Planner.plan` describes the arguments and errors."""
        if not devices:
            raise PlanError("the fleet is empty; a plan needs at least one device")
        if not gemm.volume:
            raise PlanError(f"a GEMM of {gemm.m}x{gemm.n}x{gemm.k} has nothing to multiply")
        with self._lock:
            fresh = self._without_residencies(gemm, element, devices).plan
        reusing = (resident_plan(gemm, element, devices, r) for r in residencies)
        return min([fresh, *filter(None, reusing)], key=lambda plan: _score_s(plan, self.ps))

    def plan_part(self, gemm: Gemm, element: ElementBytes, devices: Sequence[DeviceRates]) -> Plan:
        """Plan a GEMM's unfinished part quickly, by trying few device sets and arrangements."""
        search = _Search(self, gemm, element, devices)
        count = len(search.ranked)
        sizes = [max(1, count >> halved) for halved in range(count.bit_length())]
        times_s = search.fluid_times_s(sizes)
        score_s = {n: times_s[n] + n * _PART_BLOCKS * self.ps.block_s for n in sizes}
        for size in sorted(sizes, key=lambda n: (score_s[n], n)):
            plan = _Task(search, np.sort(search.ranked[:size]), few=True).plan()
            if plan is not None:
                return plan
        return self.plan(gemm, element, devices)

    def _without_residencies(
        self, gemm: Gemm, element: ElementBytes, devices: Sequence[DeviceRates]
    ) -> CachedPlan:
        """Return a plan that reuses no operands. Make and cache the plan if it is not cached."""
        found = self._cache.find(gemm, element, devices)
        if found is not None and not found.provisional:
            return found
        if self._cache.full:
            self._cache.clear()
            self._latest.clear()
            found = None
        search = _Search(self, gemm, element, devices)
        useful = search.useful()
        if len(useful) < len(devices):
            # The plan for the other devices stays cached when a straggler's rates change.
            made = self._without_residencies(gemm, element, useful)
            made = replace(made, plan=replace(made.plan, bound_s=search.bound_s))
        elif found is None and (changed := self._changed(search)) is not None:
            # A slow updated plan is used once, because making a better plan takes time.
            planned_s = self._latest[gemm, element].planned_s
            made = CachedPlan(changed, changed.makespan_s > _WORTH_REPLANNING * planned_s)
        else:
            with collector_paused():
                made = CachedPlan(search.fresh())
            rates = {d.device: d for d in devices}
            self._latest[gemm, element] = _Latest(made.plan, rates, made.plan.makespan_s)
        return self._cache.keep(gemm, element, devices, made)

    def _changed(self, search: _Search) -> Plan | None:
        """Return the latest plan of this GEMM, updated for the few devices that left or joined.

        The result is None if many devices left or joined, or if the fleet is so small that a new
        plan takes no longer than an update. The result is also None if the PS's network card limits
        transfers, because each device's share of the network card depends on the number of devices.
        """
        gemm, element = search.gemm, search.element
        latest = self._latest.get((gemm, element))
        if (
            latest is None
            or len(search.ordered) <= _SMALL_FLEET
            # A provisional plan may be used only once.
            or latest.plan.makespan_s > _WORTH_REPLANNING * latest.planned_s
            or min(self.ps.egress_bytes_per_s, self.ps.ingress_bytes_per_s) < math.inf
        ):
            return None
        now = {d.device: d for d in search.ordered}
        gone = sorted(latest.rates.keys() - now.keys())
        came = sorted(now.keys() - latest.rates.keys())
        if len(gone) + len(came) > _FEW_CHANGES or any(
            now[i] != rates for i, rates in latest.rates.items() if i in now
        ):
            return None
        plan: Plan | None = latest.plan
        try:
            for device in (*gone, *came):
                if plan is not None:
                    plan = updated(plan, element, now, device, self.ps.block_s)
        except PlanError:  # the new device has too little memory; a new plan leaves it idle
            return None
        if plan is None or plan.makespan_s > _BARELY_USABLE * latest.planned_s:
            return None
        plan = replace(plan, bound_s=search.bound_s)
        self._latest[gemm, element] = _Latest(plan, now, latest.planned_s)
        return plan


def _score_s(plan: Plan, ps: PsRates) -> float:
    """Return the score for comparing plans: the fleet's time plus the PS's time, in seconds."""
    fleet_s = plan.makespan_s + plan.fill_s
    if not ps.block_s:
        return fleet_s
    blocks = sum(len(cut.m_cuts) * len(cut.n_cuts) for cut in (tile.cut for tile in plan.tiles))
    return fleet_s + ps.block_s * blocks + ps.byte_s * (plan.egress_bytes + plan.ingress_bytes)


class _Search:
    """The search for the best plan of one GEMM for one fleet. Devices may be left idle."""

    def __init__(
        self,
        planner: TilePlanner,
        gemm: Gemm,
        element: ElementBytes,
        devices: Sequence[DeviceRates],
    ) -> None:
        self.ps = planner.ps
        self.two_dimensional = planner.method is PlanMethod.TWO_D
        self.gemm = gemm
        self.element = element
        self.ordered = sorted(devices, key=lambda d: d.device)  # the order affects rounding of sums
        self.rates = RateArrays.of(self.ordered)
        self.bound_s = isolated_bound_s(
            gemm, element, self.rates, self.ps, two_dimensional=self.two_dimensional
        )

    @cached_property
    def _volume(self) -> Floats:
        """Return the volume of each device's largest tile within twice the isolated bound."""
        return best_tile(self.gemm, self.element, self.rates, 2 * self.bound_s).volume

    @cached_property
    def ranked(self) -> Indices:
        """Return the indices of devices with enough memory for a share of C, fastest first."""
        roomy = self._roomy()
        return roomy[np.lexsort((roomy, -self._volume[roomy]))]

    def useful(self) -> Sequence[DeviceRates]:
        """Return all devices except far slower ones that would contribute almost nothing."""
        volume = self._volume
        slow = _FAR_SLOWER * volume < np.median(volume)
        if (
            not slow.any()
            or volume[slow].sum() > _NEXT_TO_NOTHING * volume.sum()
            or not self._can_hold_tile()[~slow].any()
        ):
            return self.ordered
        return [device for device, left_out in zip(self.ordered, slow, strict=True) if not left_out]

    def fresh(self) -> Plan:
        """Return the best plan found by a complete search."""
        chosen, others = self._subsets()
        plan = self._best_on(chosen)
        for subset in others:
            if plan is None:  # some devices of the subset would get less than one row of C
                plan = self._best_on([subset])
        assert plan is not None  # a plan for one device alone is always possible
        return plan

    def fluid_times_s(self, sizes: Iterable[int]) -> dict[int, float]:
        """Return the GEMM's approximate time on the n fastest devices, for each n in `sizes`.

        The times are in seconds, and include the limits of the PS's network card. They assume tiles
        with real-valued sides (the fluid limit).
        """
        times_s = {}
        for size in sizes:
            rates = self.rates.take(self.ranked[:size])
            rates = rates.throttled(self.ps.egress_bytes_per_s, self.ps.ingress_bytes_per_s)
            sample = rates.take(np.arange(0, size, -(-size // _SAMPLE)))
            # The sampled devices compute a proportional share of C's columns.
            columns = self.gemm.n * len(sample) / size
            share = max(1, round(columns))
            times_s[size] = isolated_bound_s(
                replace(self.gemm, n=share),
                self.element,
                sample,
                PsRates(),
                two_dimensional=self.two_dimensional,
            ) * (columns / share)
        return times_s

    def _best_on(self, subsets: Iterable[Indices]) -> Plan | None:
        """Return the best plan among subsets of devices, or None if no subset has a plan."""
        best: tuple[float, Plan] | None = None
        for subset in subsets:
            plan = self._on(subset)
            if plan is None:
                continue
            score_s = _score_s(plan, self.ps)
            if best is None or score_s < best[0]:
                best = score_s, plan
            elif plan.devices_used < best[1].devices_used / 4:
                break  # a smaller subset would take even longer
        return None if best is None else best[1]

    def _on(self, subset: Indices) -> Plan | None:
        """Return a subset's best plan, or None if no arrangement can be rounded to integers."""
        plans = [_Task(self, subset).plan()]
        if self.ps.block_s and len(subset) <= _SMALL_FLEET and not self.two_dimensional:
            # Cutting in depth can cost the PS more time than it saves on the links.
            plans.append(_Task(self, subset, flat=True).plan())
        return min(filter(None, plans), key=lambda plan: _score_s(plan, self.ps), default=None)

    def _subsets(self) -> tuple[list[Indices], list[Indices]]:
        """Return the promising subsets of devices, the most promising first, and all other subsets.

        Normally, only the set of all devices is promising. Smaller subsets are also promising if
        the PS's network card is too slow for all devices, if a device's share of C would be tiny,
        or if one block per device would occupy the PS for longer than the lower bound.
        """
        ranked, ps = self.ranked, self.ps
        everyone = len(ranked)
        ladder = sizes = _ladder(everyone)
        if (
            self.rates.downlink[ranked].sum() > ps.egress_bytes_per_s
            or self.rates.uplink[ranked].sum() > ps.ingress_bytes_per_s
        ):
            times_s = self.fluid_times_s(sizes)
            sizes = sorted(sizes, key=lambda size: (times_s[size], size))[:_PROMISING]
        elif self.gemm.m * self.gemm.n >= _LEAST_ELEMENTS * everyone and (
            everyone * ps.block_s < self.bound_s
        ):
            sizes = sizes[:1]
        others = [size for size in ladder if size not in sizes]
        return [np.sort(ranked[:n]) for n in sizes], [np.sort(ranked[:n]) for n in others]

    def _roomy(self) -> Indices:
        """Return the indices of devices with memory for an equal share of C, cut into a few tiles.

        If no device has that much memory, return the indices of all devices that can hold any tile.

        Raises:
            PlanError: if no device has enough memory for a single multiplication.
        """
        gemm, element, rates = self.gemm, self.element, self.rates
        side = (gemm.m * gemm.n / len(rates)) ** 0.5
        rows, columns = min(side, gemm.m), min(side, gemm.n)
        share = (rows + columns) * gemm.k * element.sent + rows * columns * element.finished
        for fits in (share <= _MOST_PIECES * rates.memory * USABLE_MEMORY, self._can_hold_tile()):
            if fits.any():
                return np.flatnonzero(fits)
        raise PlanError(
            f"no device has enough memory for a single multiplication; "
            f"the largest offers {int(rates.memory.max())} bytes"
        )

    def _can_hold_tile(self) -> npt.NDArray[np.bool_]:
        """Return, for each device, whether its memory suffices for a single multiplication."""
        least = 2 * self.element.sent + max(self.element.finished, self.element.partial)
        return least <= self.rates.memory * USABLE_MEMORY


def _ladder(most: int) -> list[int]:
    """Return the sizes of subsets to try, from `most` down to 1, in nearly geometric steps."""
    share = 1.5 if most <= _SMALL_FLEET else 1.25
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(max(sizes[-1] + 1, round(sizes[-1] * share)))
    return [most, *(size for size in reversed(sizes) if size < most)]


class _Task:
    """Plans one GEMM for one subset of the devices.

    Args:
        flat: whether tiles always have full depth.
        few: whether to try only the most promising arrangements.
    """

    def __init__(
        self, search: _Search, subset: Indices, *, flat: bool = False, few: bool = False
    ) -> None:
        self.gemm = gemm = search.gemm
        self.element = element = search.element
        self.ps = search.ps
        self.two_dimensional = flat or search.two_dimensional
        crumbs = gemm.m * gemm.n < _LEAST_ELEMENTS * len(subset)
        self.few = few or crumbs or len(subset) > _LARGE_FLEET
        self.devices = [search.ordered[i] for i in subset]
        rates = search.rates.take(subset)
        self.rates = rates.throttled(self.ps.egress_bytes_per_s, self.ps.ingress_bytes_per_s)
        if throttled := self.rates is not rates:
            # Tile times include each device's share of the PS's network card.
            self.devices = [
                replace(
                    device,
                    downlink_bytes_per_s=float(self.rates.downlink[i]),
                    uplink_bytes_per_s=float(self.rates.uplink[i]),
                )
                for i, device in enumerate(self.devices)
            ]
        self.bound_s = self.fluid_s = search.bound_s
        if throttled or flat or len(subset) < len(search.ordered):
            self.fluid_s = isolated_bound_s(
                gemm, element, self.rates, PsRates(), two_dimensional=self.two_dimensional
            )
        waiting = gemm.m * gemm.n * element.partial
        self.least_depth = min(gemm.k, gemm.k * waiting / self.ps.memory_bytes)

    def plan(self) -> Plan | None:
        slowdown = np.ones(len(self.rates))
        best: Plan | None = None
        for _ in range(3):
            found = self._tiling(slowdown)
            if found is None:
                break
            plan, took_s, alone_s = found
            if best is None or plan.makespan_s < best.makespan_s:
                best = plan
            slower = took_s > alone_s * (1 + 1e-9)
            if not slower.any() or plan.makespan_s <= 1.01 * self.fluid_s:
                break
            # Devices that need several tiles, because of little memory, get smaller shares.
            slowdown = np.where(slower, slowdown * took_s / np.maximum(alone_s, 1e-300), slowdown)
        return best

    def _tiling(self, slowdown: Floats) -> tuple[Plan, Floats, Floats] | None:
        """Return a plan and each device's times in seconds as two arrays, or None on failure.

        The first array contains the time of all tiles of a device. The second array contains the
        time that the device would need if it could compute its share as a single tile.
        """
        memory = self.rates.memory * (USABLE_MEMORY * _MEMORY_MARGIN)
        problem = self.gemm, self.element, self.rates, self.fluid_s
        free = divided = best_tile(
            *problem,
            least_depth=self.least_depth,
            two_dimensional=self.two_dimensional,
            memory=memory,
        )
        if not free.full_depth.all():
            divided = snapped(free, *problem, least_depth=self.least_depth, memory=memory)
        best, even = (
            BestTile(tile.volume / slowdown, tile.depth, tile.full_depth)
            for tile in (free, divided)
        )
        candidates: list[tuple[Fluid, Balancer]] = []
        for columns_cut_n in (True, False):
            frame = Frame(self.gemm, self.element, columns_cut_n)
            balancer = Balancer(frame, self.rates, slowdown)
            orders = (_order(best), even, _order(even))
            # A few rounds of balancing suffice to rank the drafts by their makespan.
            candidates += [
                (balancer.balance(*draft, self.fluid_s, rounds=3), balancer)
                for draft in drafts(frame, best, *orders, few=self.few)
            ]
        candidates.sort(key=lambda candidate: candidate[0].makespan_s)
        found = filter(None, starmap(self._integers, candidates))
        tried = list(islice(found, 2 if self.few else 3))
        if not tried:
            return None
        _, boxes, frame = min(tried, key=lambda each: each[0])
        return self._finish(boxes, frame)

    def _integers(self, fluid: Fluid, balancer: Balancer) -> tuple[float, Boxes, Frame] | None:
        """Balance an arrangement and round it to integers. Return the makespan, tiles and frame.

        Sides of tiles are aligned unless alignment lengthens the makespan too much. Return None if
        a column or slab would be empty.
        """
        fluid = balancer.balance(
            fluid.arrangement, fluid.widths, fluid.depths, fluid.makespan_s, rounds=12
        )
        best: tuple[float, Boxes, Frame] | None = None
        for most_aligned in (16, 4, 1):
            boxes = balancer.integers(fluid, most_aligned)
            if boxes is None:
                continue
            makespan_s = float(box_times_s(boxes, balancer.frame, self.rates).max())
            if best is None or makespan_s < best[0] * (1 - _WORTH_NOT_ALIGNING):
                best = makespan_s, boxes, balancer.frame
            if best[0] <= fluid.makespan_s * (1 + _WORTH_NOT_ALIGNING):
                break
        return best

    def _finish(self, boxes: Boxes, frame: Frame) -> tuple[Plan, Floats, Floats]:
        """Return the plan for integer tiles, and the two arrays that `_tiling` returns."""
        sides = (boxes.rows, boxes.columns) if frame.columns_cut_n else (boxes.columns, boxes.rows)
        spans = [starmap(Span, side.tolist()) for side in (*sides, boxes.depth)]
        tiles = planned_tiles(
            self.gemm,
            self.element,
            [self.devices[index] for index in boxes.device.tolist()],
            list(map(Tile, *spans)),
            tiles=len(boxes.device),
            block_s=self.ps.block_s,
        )
        alone_s = np.zeros(len(self.rates))
        alone_s[boxes.device] = box_times_s(boxes, frame, self.rates)
        busy = busy_s(tiles)
        took_s = np.array([busy.get(device.device, 0.0) for device in self.devices])
        bare_s, filled_s = spans_s(tiles)
        plan = Plan(
            self.gemm,
            tuple(tiles),
            bare_s,
            filled_s - bare_s,
            self.bound_s,
            _regions(boxes, frame),
            frame.columns_cut_n,
        )
        return plan, took_s, alone_s


def _order(best: BestTile) -> Indices:
    """Return the indices of devices with a tile, in descending order of depth, then of area."""
    active = np.flatnonzero(best.volume > 0)
    sides = best.volume[active] / best.depth[active]
    return active[np.lexsort((active, -sides, -best.depth[active]))]


def _regions(boxes: Boxes, frame: Frame) -> tuple[Region, ...]:
    """Return the regions of a plan: runs of columns with equal numbers of slabs."""
    columns: list[tuple[int, int, int, int]] = []  # start, stop, slabs, devices
    keyed = zip(boxes.columns.tolist(), boxes.slab.tolist(), strict=True)
    for (start, stop), group in groupby(keyed, key=lambda pair: pair[0]):
        slabs = [slab for _, slab in group]
        columns.append((start, stop, len(set(slabs)), len(slabs)))
    whole = Span(0, frame.height)
    regions = []
    for slab_count, run in groupby(columns, key=lambda column: column[2]):
        members = list(run)
        across = Span(members[0][0], members[-1][1])
        m, n = (whole, across) if frame.columns_cut_n else (across, whole)
        regions.append(Region(m, n, slab_count, sum(column[3] for column in members)))
    return tuple(regions)
