"""Ratios of GPU to device energy and carbon, and the sensitivity of the ratios to assumptions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from cleave.energy.account import Ps
from cleave.energy.assumptions import load_assumptions
from cleave.energy.comparison import ComparisonQuestion, Ratios
from cleave.energy.grid import load_grids
from cleave.energy.meter import Basis
from cleave.energy.sensitivity import Bar, Case, tornado, widest_first
from cleave.energy.typical import Typical, load_typical
from profiles.device_profile import DeviceKind, DeviceProfile
from profiles.library import load_profiles
from simulator.study.conditions import (
    ConditionState,
    carbon_axes,
    combinations,
    energy_axes,
    grids,
)
from simulator.study.rows import GpuRun, StudyRow, simulated
from simulator.study.setups import OTHER_SHARES


class Accountant:
    """Computes the GPU's energy and carbon divided by those of the devices.

    Attributes:
        typical: typical power of a device, used if the device's profile does not specify it.
        of_energy, of_carbon: settings and states of all combinations of conditions for energy and
            for carbon claims. The central case is first.
        middle: state of the central case.
    """

    def __init__(self) -> None:
        self._profiles = load_profiles()
        self.typical = load_typical()
        middle = grids()[1]  # the median country's electricity
        start = ConditionState(Case(load_assumptions(), middle, middle))
        self.of_energy = list(combinations(energy_axes(), start))
        self.of_carbon = list(combinations((*energy_axes(), *carbon_axes()), start))
        self.middle = self.of_carbon[0][1]

    def question(
        self,
        row: StudyRow,
        gpu: GpuRun,
        state: ConditionState,
        *,
        typical: Typical | None = None,
        card: DeviceProfile | None = None,
        ps: Ps | None = None,
    ) -> ComparisonQuestion:
        """Return the comparison of a row's devices with the GPU.

        Args:
            typical: typical power of devices; None to use `self.typical`.
            card: profile of the GPU; None to use the profile in `gpu`.
            ps: energy of the parameter server; None to leave this energy out.
        """
        cloud = gpu.at(state.gpu_share)
        cloud = replace(cloud, profile=card or cloud.profile)
        usages = [row.spell_at(state.device_share)]
        return ComparisonQuestion(usages, self._profiles, typical or self.typical, ps, cloud)

    def ratios(self, row: StudyRow, gpu: GpuRun, state: ConditionState) -> Ratios:
        """Return the GPU's energy and carbon divided by those of a row's devices."""
        return self.question(row, gpu, state).ratios(state.case)


WAITING_PHONE_W: Final = 1.0  # average power of a phone in use (source: Boavizta)
GPU_LEAST: Final = 0.7  # lowest assumed power of the GPU, as a share of its board power
PS_W: Final = (0.0, 26.1)  # power of the parameter server: none, or that of a laptop under load
LIFETIMES_YEARS: Final = (2.0, 3.0, 4.0)
UTILISATIONS: Final = tuple(share / 100 for share in range(20, 85, 5))


@dataclass(frozen=True, slots=True)
class Dependence:
    """The sensitivity of a study row's energy or carbon ratio to each assumption.

    Attributes:
        of: "energy", or "carbon" for the carbon ratio that includes manufacturing of the devices.
        bars: ratios at both ends of each assumption's range. The widest bar is first.
    """

    row: StudyRow
    of: str
    middle: float
    bars: Sequence[Bar]


# Name of an assumption, and the settings and ratios at the low and high ends of its range.
_Ends = tuple[str, tuple[str, str], Ratios, Ratios]


def dependences(accountant: Accountant, row: StudyRow, gpu: GpuRun, seed: int) -> list[Dependence]:
    """Return the sensitivity of a study row's energy ratio and of its attributed carbon ratio.

    `seed` is the random seed for simulations at other device speeds.
    """
    asked: dict[str, Callable[[Ratios], float | None]] = {
        "energy": lambda found: found.energy,
        "carbon": lambda found: found.attributed,
    }
    intensities = [grid.gco2e_per_kwh for grid in load_grids()]
    middle = accountant.middle
    others = list(_ends(accountant, row, gpu, seed))
    question = accountant.question(row, gpu, middle)
    found = []
    for name, of in asked.items():
        ratio = of(question.ratios(middle.case))
        if ratio is None:
            continue

        def figure(case: Case, of: Callable[[Ratios], float | None] = of) -> float | None:
            return of(question.ratios(case))

        bars = tornado(figure, middle.case, intensities, cloud=True, kinds=question.kinds)
        for title, settings, at_low, at_high in others:
            low, high = of(at_low), of(at_high)
            if low is not None and high is not None:
                bars.append(Bar(title, *settings, low, high))
        found.append(Dependence(row, name, ratio, widest_first(bars, ratio=True)))
    return found


def _ends(accountant: Accountant, row: StudyRow, gpu: GpuRun, seed: int) -> Iterator[_Ends]:
    """Yield each assumption that `tornado` leaves fixed, with the ratios at both range ends."""
    middle, setup = accountant.middle, row.setup
    case, central = middle.case, accountant.ratios(row, gpu, middle)
    low_share, high_share = OTHER_SHARES
    percents = (f"{low_share:.0%}", f"{high_share:.0%}")
    shares = [replace(middle, gpu_share=share) for share in OTHER_SHARES]
    low, high = (accountant.ratios(row, gpu, state) for state in shares)
    yield "GPU's speed in training, of multiplication alone", percents, low, high
    if setup.trains_slower:
        shares = [replace(middle, device_share=share) for share in OTHER_SHARES]
        low, high = (accountant.ratios(row, gpu, state) for state in shares)
        yield "devices' speed in training, of multiplication alone", percents, low, high
    power = gpu.profile.power
    if power is not None and power.compute_w is not None:
        cool_w = GPU_LEAST * power.compute_w
        drawing = msgspec.structs.replace(power, compute_w=cool_w)
        card = msgspec.structs.replace(gpu.profile, power=drawing)
        cool = accountant.question(row, gpu, middle, card=card).ratios(case)
        settings = (f"{cool_w:.0f} W", f"{power.compute_w:.0f} W")
        yield "power of the GPU", settings, cool, central
    speeds = setup.measured_flops_per_s
    by_speed = [
        {
            other.method: other
            for other in simulated(setup, row.memory[0], seed, flops_per_s / setup.flops_per_s)
        }
        for flops_per_s in speeds
    ]
    slow, fast = (rows.get(row.method) for rows in by_speed)
    if slow is not None and fast is not None:
        settings = (f"{speeds[0] / 1e12:.2g} TFLOP/s", f"{speeds[1] / 1e12:.2g} TFLOP/s")
        low, high = (accountant.ratios(each, gpu, middle) for each in (slow, fast))
        yield "speed of a device", settings, low, high
    if setup.profile.kind is DeviceKind.PHONE:
        phone = accountant.typical.classes[DeviceKind.PHONE]
        draws = msgspec.structs.replace(phone.power, idle_w=WAITING_PHONE_W)
        classes = {**accountant.typical.classes, DeviceKind.PHONE: replace(phone, power=draws)}
        typical = replace(accountant.typical, classes=classes)
        awake = accountant.question(row, gpu, middle, typical=typical).ratios(case)
        settings = ("0 W (left out)", f"{WAITING_PHONE_W:g} W")
        yield "power of a waiting phone", settings, central, awake
    if row.method.startswith("cleave"):  # all traffic is with a parameter server
        servers = (Ps(watts * row.duration_s, Basis.MODELLED) for watts in PS_W)
        none, laptop = (accountant.question(row, gpu, middle, ps=ps).ratios(case) for ps in servers)
        settings = (f"{PS_W[0]:g} W", f"{PS_W[1]:g} W")
        yield "parameter server", settings, none, laptop


@dataclass(frozen=True, slots=True)
class Changed:
    """The ratios of a study row with one condition changed from the central case."""

    axis: str
    setting: str
    ratios: Ratios


def one_by_one(accountant: Accountant, row: StudyRow, gpu: GpuRun) -> list[Changed]:
    """Return a row's ratios with one condition at a time set to each of its settings."""
    axes = (*energy_axes(), *carbon_axes())
    middle = accountant.middle
    return [
        Changed(axis.name, title, accountant.ratios(row, gpu, change(middle)))
        for axis in axes
        for title, change in axis.settings.items()
    ]


def in_use(accountant: Accountant, row: StudyRow, gpu: GpuRun) -> Mapping[float, Sequence[float]]:
    """Map each lifetime in years to attributed carbon ratios, one for each of `UTILISATIONS`."""

    def at(years: float, share: float) -> float:
        middle = accountant.middle
        made = middle.case.assumptions
        used = replace(made.utilisation, value=share)
        made = replace(made, one_lifetime_years=years, utilisation=used)
        state = replace(middle, case=replace(middle.case, assumptions=made))
        return accountant.ratios(row, gpu, state).attributed or 0.0

    return {years: [at(years, share) for share in UTILISATIONS] for years in LIFETIMES_YEARS}
