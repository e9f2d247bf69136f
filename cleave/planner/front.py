"""Which devices to use when energy or carbon counts as well as time.

Fewer devices take longer, but may draw less, or draw from cleaner grids. Subsets are tried in order
of what each device spends per operation, and in order of speed. The front consists of the subsets
that no other beats in both time and cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from cleave.gemm import Gemm
from cleave.planner.cost import tile_s
from cleave.planner.plan import DeviceRates, ElementBytes, Planner, PsRates
from cleave.planner.report import CountedGemm, StepReport, plan_step
from cleave.planner.tiles import busy_s

_JOULES_PER_KWH = 3.6e6


class Objective(Enum):
    """What a plan should minimise."""

    TIME = "time"
    ENERGY = "energy"
    CARBON = "carbon"


@dataclass(frozen=True, slots=True)
class Draw:
    """What a device draws while it works, in W, and its grid's grams of CO2 equivalent per kWh."""

    power_w: float
    gco2e_per_kwh: float = 0.0

    def cost(self, seconds: float, objective: Objective) -> float:
        """Return joules, or grams of CO2 equivalent, for the given objective."""
        joules = self.power_w * seconds
        return (
            joules
            if objective is Objective.ENERGY
            else joules / _JOULES_PER_KWH * (self.gco2e_per_kwh)
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """A subset of the fleet and what a step costs on it.

    Attributes:
        devices: the ids of the devices.
        cost: joules or grams of CO2 equivalent; waiting devices count as drawing nothing.
    """

    devices: tuple[int, ...]
    step: StepReport
    cost: float


def front(
    planner: Planner,
    gemms: Sequence[CountedGemm],
    element: ElementBytes,
    devices: Sequence[DeviceRates],
    ps: PsRates,
    draws: Mapping[int, Draw],
    objective: Objective,
) -> list[Choice]:
    """Return the Pareto front of time against cost, fastest first.

    Args:
        gemms: the GEMMs of one step.
        draws: by device id; every device needs an entry.
        objective: what the cost is: energy or carbon.

    Raises:
        PlanError: when the GEMMs fit no device.
    """
    largest = max(gemms, key=lambda g: g.gemm.volume * g.count).gemm
    seconds = {d.device: _share_s(largest, element, d, len(devices)) for d in devices}

    def spent(device: DeviceRates) -> float:
        return draws[device.device].cost(seconds[device.device], objective)

    frugal = sorted(devices, key=lambda d: (spent(d), d.device))
    fast = sorted(devices, key=lambda d: (seconds[d.device], d.device))
    subsets = {
        tuple(sorted(d.device for d in order[:size]))
        for order in (frugal, fast)
        for size in _sizes(len(devices))
    }
    by_id = {d.device: d for d in devices}
    choices = []
    for subset in sorted(subsets):
        step = plan_step(planner, gemms, element, [by_id[i] for i in subset], ps)
        cost = sum(
            draws[device].cost(busy, objective) * count
            for r, count in zip(step.reports, step.counts, strict=True)
            for device, busy in busy_s(r.plan.tiles).items()
        )
        choices.append(Choice(subset, step, cost))
    choices.sort(key=lambda c: (c.step.makespan_s, c.cost))
    best: list[Choice] = []
    for choice in choices:
        if not best or choice.cost < best[-1].cost:
            best.append(choice)
    return best


def _share_s(gemm: Gemm, element: ElementBytes, device: DeviceRates, fleet: int) -> float:
    """Return the seconds that a device takes for an equal, square share of a GEMM."""
    side = (gemm.m * gemm.n / fleet) ** 0.5
    rows, columns = min(side, gemm.m), min(side, gemm.n)
    return tile_s(
        device,
        (rows + columns) * gemm.k * element.sent,
        2 * rows * columns * gemm.k,
        rows * columns * element.finished,
    )


def _sizes(most: int) -> list[int]:
    """Return the sizes of subsets: each half the one before."""
    sizes = []
    while most >= 1:
        sizes.append(most)
        most //= 2
    return sizes
