"""The tile planner: which devices compute a GEMM, and which tile each device gets.

The planner computes each device's best tile and the lower bound (`shape`, `bound`), distributes
devices over columns and slabs (`arrange`), and balances a few arrangements (`balance`). It returns
the plan with the shortest predicted makespan. The plan does not depend on the order in which the
devices are given.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import groupby, starmap
from typing import Final

import numpy as np
import numpy.typing as npt

from cleave.errors import PlanError
from cleave.gemm import Gemm, Span, Tile
from cleave.planner.plan import (
    DeviceRates,
    ElementBytes,
    Plan,
    PsRates,
    Region,
    Residency,
)
from cleave.planner.tiles.arrange import Draft, drafts
from cleave.planner.tiles.balance import Balancer, Boxes, Fluid, Frame, box_times_s
from cleave.planner.tiles.bound import isolated_bound_s
from cleave.planner.tiles.boxes import USABLE_MEMORY, busy_s, planned_tiles, resident_plan, spans_s
from cleave.planner.tiles.collector import collector_paused
from cleave.planner.tiles.cost import PS_BLOCK_S, PS_BYTE_S
from cleave.planner.tiles.plan_cache import CachedPlan, PlanCache
from cleave.planner.tiles.replan import with_device, without_device
from cleave.planner.tiles.shape import BestTile, RateArrays, best_tile, snapped

Indices = npt.NDArray[np.intp]

_LARGE_FLEET: Final = 2048  # larger fleets try only the likeliest arrangements
_SMALL_FLEET: Final = 24
_LEAST_ELEMENTS: Final = 256  # of C per device; with fewer, some devices are better left idle
_PROMISING: Final = 5  # subset sizes that are planned if the PS's card is the limit
_PART_BLOCKS: Final = 4  # assumed blocks per device in a part
_SAMPLE: Final = 512  # devices that represent a subset when subsets are compared
_MEMORY_MARGIN: Final = 0.9  # integer tiles are a little larger than the fluid ones
_WORTH_NOT_ALIGNING: Final = 0.005  # share of the makespan
_MOST_PIECES: Final = 8  # of a device's share, to fit its memory
_FEW_CHANGES: Final = 4  # devices that may leave or join before a new plan is made
_WORTH_REPLANNING: Final = 1.1  # a changed plan slower than this factor is used once
_BARELY_USABLE: Final = 3.0  # a changed plan slower than this factor is not used
_NEXT_TO_NOTHING: Final = 0.005  # share of a GEMM that all far slower devices could do together
_FAR_SLOWER: Final = 50.0  # factor to the median device's work


class PlanMethod(Enum):
    """How a GEMM may be cut into tiles: in rows, columns and depth, or only in rows and columns.

    The published method cuts only in rows and columns.
    """

    THREE_D = "3d"
    TWO_D = "2d"


@dataclass(frozen=True, slots=True)
class _Latest:
    """The latest plan of a GEMM, the plan's fleet, and the makespan of the last complete plan."""

    plan: Plan
    rates: dict[int, DeviceRates]
    planned_s: float


@dataclass
class TilePlanner:
    """Plans GEMMs for fleets, as the module docstring describes.

    A planner is thread-safe. All threads use the same cache of plans.

    Args:
        ps: rates and memory of the parameter server.
        method: whether tiles may be cut in depth.
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
        """Plan one GEMM, as `Planner.plan` describes."""
        if not devices:
            raise PlanError("the fleet is empty; a plan needs at least one device")
        if not gemm.volume:
            raise PlanError(f"a GEMM of {gemm.m}x{gemm.n}x{gemm.k} has nothing to multiply")
        with self._lock:
            fresh = self._without_residencies(gemm, element, devices).plan
        reusing = (resident_plan(gemm, element, devices, r) for r in residencies)
        return min([fresh, *filter(None, reusing)], key=self._score_s)

    def _without_residencies(
        self, gemm: Gemm, element: ElementBytes, devices: Sequence[DeviceRates]
    ) -> CachedPlan:
        """Return a plan from the cache, or make a plan and add it to the cache."""
        found = self._cache.find(gemm, element, devices)
        if found is not None and not found.provisional:
            return found
        if self._cache.full:
            self._cache.clear()
            self._latest.clear()
            found = None
        ordered = sorted(devices, key=lambda d: d.device)  # the order affects rounding of sums
        rates = RateArrays.of(ordered)
        bound_s = self._bound_s(gemm, element, rates)
        useful = self._useful(gemm, element, ordered, rates, bound_s)
        if len(useful) < len(devices):
            # Often only the rates of a straggler have changed, so a plan for the others is cached.
            made = self._without_residencies(gemm, element, useful)
            made = replace(made, plan=replace(made.plan, bound_s=bound_s))
        else:
            changed = None if found else self._changed(gemm, element, devices)
            if changed is None:
                with collector_paused():
                    made = CachedPlan(self._fresh(gemm, element, ordered, rates, bound_s))
            else:  # use a slower plan once, because making a better plan takes time
                planned_s = self._latest[gemm, element].planned_s
                made = CachedPlan(changed, changed.makespan_s > _WORTH_REPLANNING * planned_s)
        return self._cache.keep(gemm, element, devices, made)

    def plan_part(self, gemm: Gemm, element: ElementBytes, devices: Sequence[DeviceRates]) -> Plan:
        """Plan part of a GEMM quickly, with few sets of devices and few arrangements.

        See `PartPlanner.plan_part`.
        """
        ordered = sorted(devices, key=lambda d: d.device)
        rates = RateArrays.of(ordered)
        bound_s = self._bound_s(gemm, element, rates)
        roomy = _roomy(gemm, element, rates)
        volume = best_tile(gemm, element, rates, 2 * bound_s).volume[roomy]
        ranked = roomy[np.lexsort((roomy, -volume))]
        sizes = [max(1, len(ranked) >> halved) for halved in range(len(ranked).bit_length())]
        times_s = self._fluid_times_s(gemm, element, rates.take(ranked), sizes)
        score_s = {n: times_s[n] + n * _PART_BLOCKS * self.ps.block_s for n in sizes}
        for size in sorted(sizes, key=lambda n: (score_s[n], n)):
            members = [ordered[i] for i in np.sort(ranked[:size])]
            everyone = size == len(ordered)
            task = _Task(self, gemm, element, members, bound_s, everyone=everyone, few=True)
            plan = task.plan()
            if plan is not None:
                return plan
        return self.plan(gemm, element, devices)

    def _changed(
        self, gemm: Gemm, element: ElementBytes, devices: Sequence[DeviceRates]
    ) -> Plan | None:
        """Return the latest plan of this GEMM, updated for the few devices that left or joined.

        The result is None if many devices left or joined, or if the fleet is so small that a new
        plan takes no longer than an update. The result is also None if the PS's card limits
        transfers, because each device's share of the card depends on the number of devices.
        """
        latest = self._latest.get((gemm, element))
        if latest is None or len(devices) <= _SMALL_FLEET:
            return None
        if latest.plan.makespan_s > _WORTH_REPLANNING * latest.planned_s:
            return None  # a provisional plan may be used only once
        now = {d.device: d for d in devices}
        gone = latest.rates.keys() - now.keys()
        came = now.keys() - latest.rates.keys()
        if len(gone) + len(came) > _FEW_CHANGES or any(
            now[i] != rates for i, rates in latest.rates.items() if i in now
        ):
            return None
        if min(self.ps.egress_bytes_per_s, self.ps.ingress_bytes_per_s) < math.inf:
            return None
        plan: Plan | None = latest.plan
        try:
            for device in sorted(gone):
                if plan is not None:
                    plan = without_device(plan, element, now, device, block_s=self.ps.block_s)
            for device in sorted(came):
                if plan is not None:
                    plan = with_device(plan, element, now, device, block_s=self.ps.block_s)
        except PlanError:  # the new device has too little memory; a new plan leaves it idle
            return None
        if plan is None or plan.makespan_s > _BARELY_USABLE * latest.planned_s:
            return None
        plan = replace(plan, bound_s=self._bound_s(gemm, element, RateArrays.of(devices)))
        self._latest[gemm, element] = _Latest(plan, now, latest.planned_s)
        return plan

    def _fresh(
        self,
        gemm: Gemm,
        element: ElementBytes,
        ordered: Sequence[DeviceRates],
        rates: RateArrays,
        bound_s: float,
    ) -> Plan:
        """Return a new plan for `ordered`, the devices in ascending order of their ids."""
        chosen, others = self._subsets(gemm, element, rates, bound_s)
        plan = self._best_on(gemm, element, ordered, chosen, bound_s)
        for subset in others:
            if plan is None:  # the slowest devices would have less than one row of C
                plan = self._best_on(gemm, element, ordered, [subset], bound_s)
        assert plan is not None  # a plan for one device alone is always possible
        rates_now = {d.device: d for d in ordered}
        self._latest[gemm, element] = _Latest(plan, rates_now, plan.makespan_s)
        return plan

    def _best_on(
        self,
        gemm: Gemm,
        element: ElementBytes,
        ordered: Sequence[DeviceRates],
        subsets: Iterable[Indices],
        bound_s: float,
    ) -> Plan | None:
        """Return the best plan for any of the given subsets of devices; None if none exists."""
        best: tuple[float, Plan] | None = None
        for subset in subsets:
            everyone = len(subset) == len(ordered)
            members = [ordered[i] for i in subset]
            plan = self._on(gemm, element, members, bound_s, everyone=everyone)
            if plan is None:
                continue
            score_s = self._score_s(plan)
            if best is None or score_s < best[0]:
                best = score_s, plan
            elif plan.devices_used < best[1].devices_used / 4:
                break  # a smaller subset would take even longer
        return None if best is None else best[1]

    def _on(
        self,
        gemm: Gemm,
        element: ElementBytes,
        members: Sequence[DeviceRates],
        bound_s: float,
        *,
        everyone: bool,
    ) -> Plan | None:
        """Return the best plan for the given devices.

        The result is None if no arrangement can be rounded to integer tiles.
        """
        plans = [_Task(self, gemm, element, members, bound_s, everyone=everyone).plan()]
        if self.ps.block_s and len(members) <= _SMALL_FLEET and self.method is PlanMethod.THREE_D:
            # Cutting in depth can cost the PS more time than it saves on the links.
            flat = _Task(self, gemm, element, members, bound_s, everyone=False, flat=True)
            plans.append(flat.plan())
        found = [plan for plan in plans if plan is not None]
        return min(found, key=self._score_s, default=None)

    def _bound_s(self, gemm: Gemm, element: ElementBytes, rates: RateArrays) -> float:
        two_dimensional = self.method is PlanMethod.TWO_D
        return isolated_bound_s(gemm, element, rates, self.ps, two_dimensional=two_dimensional)

    def _score_s(self, plan: Plan) -> float:
        """Return the seconds by which plans are compared: the fleet's time plus the PS's time."""
        fleet_s = plan.makespan_s + plan.fill_s
        if not self.ps.block_s:
            return fleet_s
        cuts = (tile.cut for tile in plan.tiles)
        blocks = sum(len(cut.m_cuts) * len(cut.n_cuts) for cut in cuts)
        moved_bytes = plan.egress_bytes + plan.ingress_bytes
        return fleet_s + self.ps.block_s * blocks + self.ps.byte_s * moved_bytes

    # --- which devices ---

    def _useful(
        self,
        gemm: Gemm,
        element: ElementBytes,
        ordered: Sequence[DeviceRates],
        rates: RateArrays,
        bound_s: float,
    ) -> Sequence[DeviceRates]:
        """Return the devices except far slower devices that together contribute almost nothing."""
        # The volume of the largest tile that each device could return in twice the bound.
        volume = best_tile(gemm, element, rates, 2 * bound_s).volume
        slow = _FAR_SLOWER * volume < np.median(volume)
        if not slow.any() or volume[slow].sum() > _NEXT_TO_NOTHING * volume.sum():
            return ordered
        if not len(_with_memory(element, rates.take(np.flatnonzero(~slow)))):
            return ordered
        return [device for device, left_out in zip(ordered, slow, strict=True) if not left_out]

    def _subsets(
        self, gemm: Gemm, element: ElementBytes, rates: RateArrays, bound_s: float
    ) -> tuple[list[Indices], list[Indices]]:
        """Return the subsets of devices to plan for, most promising first, and all other subsets.

        The first subset consists of all devices, with two exceptions: the PS's card is too slow for
        all devices, or the GEMM is so small that each device's share would be tiny.
        """
        roomy = _roomy(gemm, element, rates)
        best = best_tile(gemm, element, rates, 2 * bound_s)
        # Fastest devices first. Equally fast devices are sorted by index.
        ranked = roomy[np.lexsort((roomy, -best.volume[roomy]))]
        everyone = len(ranked)
        ladder = sizes = _ladder(everyone)
        if (
            rates.downlink[ranked].sum() > self.ps.egress_bytes_per_s
            or rates.uplink[ranked].sum() > self.ps.ingress_bytes_per_s
        ):
            sizes = self._most_promising(gemm, element, rates.take(ranked), sizes)
        elif gemm.m * gemm.n >= _LEAST_ELEMENTS * everyone and (
            everyone * self.ps.block_s < bound_s
        ):
            sizes = sizes[:1]
        others = [size for size in ladder if size not in sizes]
        return [np.sort(ranked[:n]) for n in sizes], [np.sort(ranked[:n]) for n in others]

    def _most_promising(
        self,
        gemm: Gemm,
        element: ElementBytes,
        ranked: RateArrays,
        sizes: Sequence[int],
    ) -> list[int]:
        """Return the subset sizes with the shortest approximate times (see `_fluid_times_s`)."""
        times_s = self._fluid_times_s(gemm, element, ranked, sizes)
        return sorted(sizes, key=lambda size: (times_s[size], size))[:_PROMISING]

    def _fluid_times_s(
        self, gemm: Gemm, element: ElementBytes, ranked: RateArrays, sizes: Iterable[int]
    ) -> dict[int, float]:
        """Return, for each subset size, the approximate time that the fastest devices need.

        The time is in seconds, in the fluid limit, and takes the PS's card into account.
        """
        unlimited = PsRates()
        times_s = {}
        for size in sizes:
            rates = self._behind_card(ranked.take(np.arange(size)))
            step = -(-size // _SAMPLE)
            sample = rates.take(np.arange(0, size, step))
            # The sampled devices compute a proportional share of C's columns.
            share = max(1, round(gemm.n * len(sample) / size))
            times_s[size] = isolated_bound_s(
                replace(gemm, n=share),
                element,
                sample,
                unlimited,
                two_dimensional=self.method is PlanMethod.TWO_D,
            ) * (gemm.n * len(sample) / size / share)
        return times_s

    def _behind_card(self, rates: RateArrays) -> RateArrays:
        """Return the rates with all links slowed, so that their sum fits the PS's card."""
        return rates.throttled(self.ps.egress_bytes_per_s, self.ps.ingress_bytes_per_s)


def _ladder(most: int) -> list[int]:
    """Return subset sizes from `most` down to one; the smaller sizes do not depend on `most`."""
    share = 1.5 if most <= _SMALL_FLEET else 1.25
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(max(sizes[-1] + 1, round(sizes[-1] * share)))
    return [most, *(size for size in reversed(sizes) if size < most)]


def _roomy(gemm: Gemm, element: ElementBytes, rates: RateArrays) -> Indices:
    """Return the devices with enough memory for an equal share of C, cut into a few tiles.

    If no device has that much memory, return all devices that can compute any tile.

    Raises:
        PlanError: when no device has enough memory for a single multiplication.
    """
    side = (gemm.m * gemm.n / len(rates)) ** 0.5
    rows, columns = min(side, gemm.m), min(side, gemm.n)
    share = (rows + columns) * gemm.k * element.sent + rows * columns * element.finished
    usable = rates.memory * USABLE_MEMORY
    roomy = np.flatnonzero(share <= _MOST_PIECES * usable)
    if len(roomy):
        return roomy
    # No device has enough memory for an equal share, so use devices with memory for any tile.
    some = _with_memory(element, rates)
    if not len(some):
        raise PlanError(
            f"no device has the memory for a single multiplication; "
            f"the largest offers {int(rates.memory.max())} bytes"
        )
    return some


def _with_memory(element: ElementBytes, rates: RateArrays) -> Indices:
    """Return the devices with enough memory for a tile of a single multiplication."""
    least = 2 * element.sent + max(element.finished, element.partial)
    return np.flatnonzero(least <= rates.memory * USABLE_MEMORY)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """An arrangement of tiles before its sides are rounded to integers."""

    makespan_s: float
    fluid: Fluid
    balancer: Balancer


class _Task:
    """Plans one GEMM for one set of devices."""

    def __init__(
        self,
        planner: TilePlanner,
        gemm: Gemm,
        element: ElementBytes,
        devices: Sequence[DeviceRates],
        bound_s: float,
        *,
        everyone: bool,
        flat: bool = False,
        few: bool = False,
    ) -> None:
        self.gemm = gemm
        self.element = element
        self.ps = planner.ps
        self.two_dimensional = flat or planner.method is PlanMethod.TWO_D
        crumbs = gemm.m * gemm.n < _LEAST_ELEMENTS * len(devices)
        self.few = few or crumbs or len(devices) > _LARGE_FLEET
        rates = RateArrays.of(devices)
        self.rates = planner._behind_card(rates)
        throttled = self.rates is not rates
        # The times of tiles take each device's share of the PS's card into account.
        self.devices = devices
        if throttled:
            self.devices = [
                replace(
                    device,
                    downlink_bytes_per_s=float(self.rates.downlink[i]),
                    uplink_bytes_per_s=float(self.rates.uplink[i]),
                )
                for i, device in enumerate(devices)
            ]
        self.bound_s = bound_s
        self.fluid_s = bound_s
        if throttled or not everyone:
            self.fluid_s = isolated_bound_s(
                gemm, element, self.rates, PsRates(), two_dimensional=self.two_dimensional
            )
        waiting = gemm.m * gemm.n * element.partial
        self.least_depth = (
            1.0 if waiting == 0 else min(gemm.k, gemm.k * waiting / self.ps.memory_bytes)
        )

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
            # Devices that need several tiles, for lack of memory, take longer, so they get less.
            slowdown = np.where(slower, slowdown * took_s / np.maximum(alone_s, 1e-300), slowdown)
        return best

    def _tiling(
        self, slowdown: npt.NDArray[np.float64]
    ) -> tuple[Plan, npt.NDArray[np.float64], npt.NDArray[np.float64]] | None:
        """Return a plan and two arrays of seconds with one value per device.

        The first array has the time of all tiles of the device. The second array has the time that
        the device would need if it computed its share as a single tile.
        """
        memory = self.rates.memory * (USABLE_MEMORY * _MEMORY_MARGIN)
        free = best_tile(
            self.gemm,
            self.element,
            self.rates,
            self.fluid_s,
            least_depth=self.least_depth,
            two_dimensional=self.two_dimensional,
            memory=memory,
        )
        divided = free
        if not free.full_depth.all():
            divided = snapped(
                free,
                self.gemm,
                self.element,
                self.rates,
                self.fluid_s,
                least_depth=self.least_depth,
                memory=memory,
            )
        best, even = (
            BestTile(tile.volume / slowdown, tile.depth, tile.full_depth)
            for tile in (free, divided)
        )
        candidates: list[_Candidate] = []
        for columns_cut_n in (True, False):
            frame = Frame(self.gemm, self.element, columns_cut_n)
            balancer = Balancer(frame, self.rates, slowdown)
            orders = (self._order(best), even, self._order(even))
            candidates += self._balanced(balancer, drafts(frame, best, *orders, few=self.few))
        candidates.sort(key=lambda c: c.makespan_s)
        chosen: tuple[float, Boxes, Frame] | None = None
        tried = 0
        for candidate in candidates:
            found = self._integers(candidate)
            if found is None:
                continue
            if chosen is None or found[0] < chosen[0]:
                chosen = *found, candidate.balancer.frame
            tried += 1
            if tried == (2 if self.few else 3):
                break
        return None if chosen is None else self._finish(chosen[1], chosen[2])

    def _balanced(self, balancer: Balancer, drafts: Iterable[Draft]) -> list[_Candidate]:
        """Balance each draft for a few rounds, so that drafts can be ranked by their makespan."""
        found = []
        for draft in drafts:
            fluid = balancer.balance(
                draft.arrangement, draft.widths, draft.depths, self.fluid_s, rounds=3
            )
            found.append(_Candidate(fluid.makespan_s, fluid, balancer))
        return found

    def _order(self, best: BestTile) -> Indices:
        """Return the devices with a tile, sorted by depth of the tile and then by its width."""
        active = np.flatnonzero(best.volume > 0)
        sides = best.volume[active] / best.depth[active]
        return active[np.lexsort((active, -sides, -best.depth[active]))]

    def _integers(self, candidate: _Candidate) -> tuple[float, Boxes] | None:
        """Return integer tiles and their makespan.

        Sides of tiles are aligned as far as this does not lengthen the makespan too much.
        """
        balancer = candidate.balancer
        fluid = balancer.balance(
            candidate.fluid.arrangement,
            candidate.fluid.widths,
            candidate.fluid.depths,
            candidate.makespan_s,
            rounds=12,
        )
        best: tuple[float, Boxes] | None = None
        for most_aligned in (16, 4, 1):
            boxes = balancer.integers(fluid, most_aligned)
            if boxes is None:
                continue
            makespan_s = float(box_times_s(boxes, balancer.frame, self.rates).max())
            if best is None or makespan_s < best[0] * (1 - _WORTH_NOT_ALIGNING):
                best = makespan_s, boxes
            if best[0] <= fluid.makespan_s * (1 + _WORTH_NOT_ALIGNING):
                break
        return best

    def _finish(
        self, boxes: Boxes, frame: Frame
    ) -> tuple[Plan, npt.NDArray[np.float64], npt.NDArray[np.float64]]:
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
        took_s, alone_s = np.zeros(len(self.rates)), np.zeros(len(self.rates))
        alone_s[boxes.device] = box_times_s(boxes, frame, self.rates)
        busy = busy_s(tiles)
        took_s[:] = [busy.get(device.device, 0.0) for device in self.devices]
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


def _regions(boxes: Boxes, frame: Frame) -> tuple[Region, ...]:
    """Return the regions: runs of consecutive columns with equal numbers of slabs."""
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
