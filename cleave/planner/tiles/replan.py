"""Cache plans and update them when one device leaves or joins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Final

import numpy as np

from cleave.gemm import Gemm, Span, Tile
from cleave.planner.plan import DeviceRates, ElementBytes, Plan, PlannedTile
from cleave.planner.tiles.balance import Arrangement, Balancer, Frame
from cleave.planner.tiles.boxes import planned_tiles, spans_s
from cleave.planner.tiles.shape import RateArrays

_MOST_PLANS: Final = 4096

# All fields except the ID.
_RATES: Final = attrgetter(*(f.name for f in fields(DeviceRates) if f.name != "device"))

_Rates = tuple[object, ...]
_Of = tuple[Gemm, ElementBytes, _Rates]


@dataclass(frozen=True, slots=True)
class CachedPlan:
    """A cached plan. A `provisional` plan is used only once, because it may be slow."""

    plan: Plan
    provisional: bool = False


class PlanCache:
    """A cache of plans. Fleets with equal rates share a plan, with the device IDs replaced.

    A device that reconnects has a new ID, and usually the same rates as before. Fleets share a plan
    if their rates are equal in the order of device IDs, because a planner sorts devices by ID and
    would make the same plan.
    """

    def __init__(self) -> None:
        self._by_fleet: dict[_Of, CachedPlan] = {}
        self._by_rates: dict[_Of, tuple[tuple[int, ...], CachedPlan]] = {}

    @property
    def full(self) -> bool:
        """Return True if the cache has reached its maximum size and should be cleared."""
        return len(self._by_fleet) >= _MOST_PLANS

    def clear(self) -> None:
        self._by_fleet.clear()
        self._by_rates.clear()

    def find(
        self, gemm: Gemm, element: ElementBytes, devices: Sequence[DeviceRates]
    ) -> CachedPlan | None:
        """Return the plan cached for this fleet or one with equal rates; None if not cached."""
        fleet = gemm, element, tuple(devices)
        found = self._by_fleet.get(fleet)
        if found is None:
            numbers, rates = _split(devices)
            similar = self._by_rates.get((gemm, element, rates))
            if similar is not None:
                renamed = dict(zip(similar[0], numbers, strict=True))
                tiles = tuple(t._replace(device=renamed[t.device]) for t in similar[1].plan.tiles)
                found = replace(similar[1], plan=replace(similar[1].plan, tiles=tiles))
                self._by_fleet[fleet] = found
        return found

    def keep(
        self,
        gemm: Gemm,
        element: ElementBytes,
        devices: Sequence[DeviceRates],
        cached: CachedPlan,
    ) -> CachedPlan:
        """Cache a plan, replacing any earlier plan for this fleet, and return `cached`."""
        numbers, rates = _split(devices)
        self._by_fleet[gemm, element, tuple(devices)] = cached
        self._by_rates[gemm, element, rates] = numbers, cached
        return cached


def _split(devices: Sequence[DeviceRates]) -> tuple[tuple[int, ...], _Rates]:
    """Return the device IDs in ascending order, and the rates of the devices in the same order."""
    ordered = sorted(devices, key=lambda device: device.device)
    numbers = tuple(device.device for device in ordered)
    return numbers, tuple(map(_RATES, ordered))


def updated(
    plan: Plan,
    element: ElementBytes,
    rates: Mapping[int, DeviceRates],
    device: int,
    block_s: float,
) -> Plan | None:
    """Return a plan updated for a device that left or joined; None if an update is impossible.

    The rows of a lost device are divided among the other devices of its slab. A plan cannot be
    updated if the lost device had several tiles. A new device joins the slowest slab. `rates`
    contains the rates of all connected devices, by ID.
    """
    if device in rates:
        tile = max(plan.tiles, key=lambda t: (t.time_s, -t.device)).tile
        mates = [t.device for t in _slab(plan, tile)]
        return _with_slab(plan, element, tile, [*mates, device], rates, block_s)
    own = [t.tile for t in plan.tiles if t.device == device]
    if not own:
        return plan
    if len(own) > 1:
        return None
    # Several devices of the slab may have left at the same time.
    mates = [t.device for t in _slab(plan, own[0]) if t.device in rates]
    return _with_slab(plan, element, own[0], mates, rates, block_s)


def _slab(plan: Plan, tile: Tile) -> list[PlannedTile]:
    """Return the tiles in the slab of `tile`. Tiles of a slab have equal columns and depth."""
    if plan.columns_cut_n:
        return [t for t in plan.tiles if t.tile.n == tile.n and t.tile.k == tile.k]
    return [t for t in plan.tiles if t.tile.m == tile.m and t.tile.k == tile.k]


def _with_slab(
    plan: Plan,
    element: ElementBytes,
    tile: Tile,
    devices: Sequence[int],
    rates: Mapping[int, DeviceRates],
    block_s: float,
) -> Plan | None:
    """Return the plan with the slab of `tile` divided among `devices`; None if impossible."""
    old = _slab(plan, tile)
    before = {t.device for t in old}
    cut_n = plan.columns_cut_n
    filled = sum(t.tile.m.size if cut_n else t.tile.n.size for t in old)
    others = {t.device for t in plan.tiles if t.device not in before}
    if (
        not devices
        or len(before) != len(old)
        # A device with little memory has several tiles, and these tiles do not fill the slab.
        or filled != (plan.gemm.m if cut_n else plan.gemm.n)
        or others & set(devices)
    ):
        return None
    members = sorted(devices)
    frame = Frame(plan.gemm, element, cut_n)
    arrays = RateArrays.of([rates[device] for device in members])
    balancer = Balancer(frame, arrays, np.ones(len(members)))
    start = np.zeros(1, np.intp)
    arrangement = Arrangement(np.arange(len(members)), start, start)
    across = tile.n if cut_n else tile.m
    guess_s = max(t.time_s for t in old)
    rows = balancer.slab_rows(arrangement, across.size, tile.k.size, guess_s)
    owners, boxes = [], []
    for device, (first, last) in zip(members, rows.tolist(), strict=True):
        if first < last:
            m, n = (Span(first, last), tile.n) if cut_n else (tile.m, Span(first, last))
            owners.append(rates[device])
            boxes.append(Tile(m, n, tile.k))
    tiles = planned_tiles(plan.gemm, element, owners, boxes, tiles=len(plan.tiles), block_s=block_s)
    kept = [t for t in plan.tiles if t.device not in before]
    every = (*kept, *tiles)
    bare_s, filled_s = spans_s(every)
    more = len({t.device for t in tiles}) - len(before)
    regions = tuple(
        replace(r, devices=r.devices + more) if r.m.overlaps(tile.m) and r.n.overlaps(tile.n) else r
        for r in plan.regions
    )
    return replace(plan, tiles=every, makespan_s=bare_s, fill_s=filled_s - bare_s, regions=regions)
