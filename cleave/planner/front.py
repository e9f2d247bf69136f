"""Which devices to use when time is not all that counts: time against energy, or carbon.

Fewer devices take longer and may draw less, or draw from cleaner grids. Subsets are taken in the
order of what each device spends on a unit of work, and in the order of its speed; what no other
subset beats in both respects is the front.
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
    """What a plan should spend least of."""

    TIME = "time"
    ENERGY = "energy"
    CARBON = "carbon"


@dataclass(frozen=True, slots=True)
class Draw:
    """What a device spends while it works: watts, and grams of CO2 equivalent for each kWh."""

    power_w: float
    gco2e_per_kwh: float = 0.0

    def cost(self, seconds: float, objective: Objective) -> float:
        """Joules, or grams of CO2 equivalent."""
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
        devices: their ids.
        cost: joules or grams, as asked for; devices that wait draw nothing.
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
    """The Pareto front of time against cost, fastest first.

    Args:
        gemms: of one step.
        draws: by device; every device needs one.
        objective: energy or carbon.

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
    """How long a device takes for an equal, square share of a GEMM."""
    side = (gemm.m * gemm.n / fleet) ** 0.5
    rows, columns = min(side, gemm.m), min(side, gemm.n)
    return tile_s(
        device,
        (rows + columns) * gemm.k * element.sent,
        2 * rows * columns * gemm.k,
        rows * columns * element.finished,
    )


def _sizes(most: int) -> list[int]:
    """Half as many each time."""
    sizes = []
    while most >= 1:
        sizes.append(most)
        most //= 2
    return sizes
