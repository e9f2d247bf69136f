"""A cache of plans, by GEMM and fleet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Final

from cleave.gemm import Gemm
from cleave.planner.plan import DeviceRates, ElementBytes, Plan

_MOST_PLANS: Final = 4096

_RATES: Final = attrgetter(*(f.name for f in fields(DeviceRates) if f.name != "device"))
"""All fields of a device except its id."""

_Rates = tuple[object, ...]
_Of = tuple[Gemm, ElementBytes, _Rates]


@dataclass(frozen=True, slots=True)
class CachedPlan:
    """A plan, and whether it may be used again.

    Attributes:
        provisional: whether the plan may be used only once.
    """

    plan: Plan
    provisional: bool = False


class PlanCache:
    """Finds plans by GEMM and fleet, or by the rates of the fleet's devices.

    A device that reconnects has a new id, and mostly its old rates. So fleets with the same rates
    in the order of their ids share a plan with different ids. A planner reads devices in that
    order, so it would make the same plan.
    """

    def __init__(self) -> None:
        self._by_fleet: dict[_Of, CachedPlan] = {}
        self._by_rates: dict[_Of, tuple[tuple[int, ...], CachedPlan]] = {}

    @property
    def full(self) -> bool:
        """Return whether the cache should be cleared."""
        return len(self._by_fleet) >= _MOST_PLANS

    def clear(self) -> None:
        self._by_fleet.clear()
        self._by_rates.clear()

    def find(
        self, gemm: Gemm, element: ElementBytes, devices: Sequence[DeviceRates]
    ) -> CachedPlan | None:
        """Return the plan kept for this fleet or for one with equal rates; None if not found."""
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
        """Keep a plan, in place of an earlier one for this fleet; return it."""
        numbers, rates = _split(devices)
        self._by_fleet[gemm, element, tuple(devices)] = cached
        self._by_rates[gemm, element, rates] = numbers, cached
        return cached


def _split(devices: Sequence[DeviceRates]) -> tuple[tuple[int, ...], _Rates]:
    """Return the devices' ids, ascending, and their rates in the same order."""
    ordered = sorted(devices, key=lambda device: device.device)
    numbers = tuple(device.device for device in ordered)
    return numbers, tuple(map(_RATES, ordered))
