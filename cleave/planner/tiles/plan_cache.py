"""A cache of plans. The key consists of a GEMM and the rates of a fleet's devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Final

from cleave.gemm import Gemm
from cleave.planner.plan import DeviceRates, ElementBytes, Plan

_MOST_PLANS: Final = 4096

_RATES: Final = attrgetter(*(f.name for f in fields(DeviceRates) if f.name != "device"))
"""All fields of a device except its ID."""

_Rates = tuple[object, ...]
_Of = tuple[Gemm, ElementBytes, _Rates]


@dataclass(frozen=True, slots=True)
class CachedPlan:
    """A cached plan.

    Attributes:
        provisional: True if the plan may be used only once, because a better plan may exist.
    """

    plan: Plan
    provisional: bool = False


class PlanCache:
    """A cache of plans. A plan is also found for a fleet with other device IDs and equal rates.

    A device that reconnects has a new ID, and usually has the same rates as before. If two fleets
    have the same rates in the order of device IDs, they share a cached plan, in which the IDs are
    replaced. A planner sorts devices by ID, so it would make the same plan for both fleets.
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
        """Return the cached plan for this fleet, or for a fleet with equal rates; None if none."""
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
        """Add a plan to the cache, replacing an earlier plan for this fleet; return the plan."""
        numbers, rates = _split(devices)
        self._by_fleet[gemm, element, tuple(devices)] = cached
        self._by_rates[gemm, element, rates] = numbers, cached
        return cached


def _split(devices: Sequence[DeviceRates]) -> tuple[tuple[int, ...], _Rates]:
    """Return the device IDs in ascending order, and the rates of the devices in the same order."""
    ordered = sorted(devices, key=lambda device: device.device)
    numbers = tuple(device.device for device in ordered)
    return numbers, tuple(map(_RATES, ordered))
