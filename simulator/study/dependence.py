"""Sensitivity analysis: how a row's ratio changes if one condition or assumption changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from cleave.energy.account import Ps
from cleave.energy.assumptions import Assumptions, load_assumptions
from cleave.energy.comparison import ComparisonQuestion, Ratios
from cleave.energy.grid import load_grids
from cleave.energy.meter import Basis
from cleave.energy.sensitivity import Bar, Case, tornado, widest_first
from cleave.energy.typical import Typical, load_typical
from profiles.device_profile import DeviceKind, DeviceProfile, Power
from profiles.library import load_profiles
from simulator.study.conditions import (
    ConditionState,
    carbon_axes,
    combinations,
    energy_axes,
    grids,
    lasting,
)
from simulator.study.rows import GpuRun, StudyRow, simulated
from simulator.study.setups import OTHER_SHARES


class Accountant:
    """Computes the ratios of the GPU's energy and carbon to the devices' energy and carbon.

    Values that device profiles lack are replaced by typical figures.

    Attributes:
        typical: figures that replace missing values.
        of_energy, of_carbon: all combinations of conditions for claims about energy and about
            carbon, each with its settings and state. The first combination is the central case.
        middle: state of the central case.
    """

    def __init__(self) -> None:
        self._profiles = load_profiles()
        self.typical = load_typical()
        every = (*energy_axes(), *carbon_axes())
        self.of_energy = list(combinations(energy_axes(), start()))
        self.of_carbon = list(combinations(every, start()))
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
        """Return the comparison of a row's devices with the GPU, before ratios are computed.

        Args:
            row: set-up and method whose devices are compared.
            gpu: the same training steps on the GPU.
            state: assumptions, and training speeds as shares of multiplication speed.
            typical: figures that replace values missing in profiles; None means `self.typical`.
            card: profile of the GPU; None means the profile in `gpu`.
            ps: energy of the parameter server; None means that it does not count.
        """
        cloud = gpu.at(state.gpu_share)
        cloud = replace(cloud, profile=card or cloud.profile)
        usages = [row.spell_at(state.device_share)]
        return ComparisonQuestion(usages, self._profiles, typical or self.typical, ps, cloud)

    def ratios(self, row: StudyRow, gpu: GpuRun, state: ConditionState) -> Ratios:
        """Return the ratios of the GPU's energy and carbon to those of a row's devices.

        Args:
            row: set-up and method whose devices are compared.
            gpu: the same training steps on the GPU.
            state: assumptions, and training speeds as shares of multiplication speed.
        """
        return self.question(row, gpu, state).ratios(state.case)


def start() -> ConditionState:
    """Return Cleave's default assumptions with the median country's carbon intensity."""
    middle = grids()[1]
    return ConditionState(Case(load_assumptions(), middle, middle))


WAITING_PHONE_W: Final = 1.0  # average power of a phone in use, by Boavizta
GPU_LEAST: Final = 0.7  # lowest assumed power of the GPU, as a share of its board power
PS_W: Final = (0.0, 26.1)  # power of the parameter server: none, or that of a laptop under load
LIFETIMES_YEARS: Final = (2.0, 3.0, 4.0)
UTILISATIONS: Final = tuple(share / 100 for share in range(20, 85, 5))


@dataclass(frozen=True, slots=True)
class Dependence:
    """The sensitivity of a row's energy or carbon ratio to each assumption.

    Attributes:
        row: set-up and method whose ratio is analysed.
        of: "energy", or "carbon" for the ratio of attributed carbon.
        middle: ratio in the central case.
        bars: for each assumption, the ratio at the low and at the high end of its range. The
            widest bar is first.
    """

    row: StudyRow
    of: str
    middle: float
    bars: Sequence[Bar]


@dataclass(frozen=True, slots=True)
class _Ends:
    name: str
    settings: tuple[str, str]
    low: Ratios
    high: Ratios


def dependences(
    accountant: Accountant, row: StudyRow, gpu: GpuRun, middle: ConditionState, seed: int
) -> list[Dependence]:
    """Return the sensitivity of a row's energy ratio and of its attributed carbon ratio.

    Args:
        accountant: computes the ratios.
        row: set-up and method to analyse.
        gpu: the same training steps on the GPU.
        middle: state of the central case.
        seed: random seed of simulations with other device speeds.
    """
    asked: dict[str, Callable[[Ratios], float | None]] = {
        "energy": lambda found: found.energy,
        "carbon": lambda found: found.attributed,
    }
    intensities = [grid.gco2e_per_kwh for grid in load_grids()]
    others = list(_ends(accountant, row, gpu, middle, seed))
    question = accountant.question(row, gpu, middle)
    found = []
    for name, of in asked.items():
        ratio = of(question.ratios(middle.case))
        if ratio is None:
            continue

        def figure(case: Case, of: Callable[[Ratios], float | None] = of) -> float | None:
            return of(question.ratios(case))

        bars = tornado(figure, middle.case, intensities, cloud=True, kinds=question.kinds)
        for ends in others:
            low, high = of(ends.low), of(ends.high)
            if low is not None and high is not None:
                bars.append(Bar(ends.name, *ends.settings, low, high))
        found.append(Dependence(row, name, ratio, widest_first(bars, ratio=True)))
    return found


def _ends(
    accountant: Accountant, row: StudyRow, gpu: GpuRun, middle: ConditionState, seed: int
) -> Iterator[_Ends]:
    """Yield the ratios at both ends of each assumption that only this study makes.

    These are the training speeds and the power of the GPU, the device speed, the power of waiting
    phones, and the power of the parameter server.
    """
    case, central = middle.case, accountant.ratios(row, gpu, middle)
    low_share, high_share = OTHER_SHARES
    percents = (f"{low_share:.0%}", f"{high_share:.0%}")
    shares = [replace(middle, gpu_share=share) for share in OTHER_SHARES]
    low, high = (accountant.ratios(row, gpu, state) for state in shares)
    yield _Ends("GPU's speed in training, of multiplication alone", percents, low, high)
    if row.setup.trains_slower:
        shares = [replace(middle, device_share=share) for share in OTHER_SHARES]
        low, high = (accountant.ratios(row, gpu, state) for state in shares)
        yield _Ends("devices' speed in training, of multiplication alone", percents, low, high)
    power = gpu.profile.power
    if power is not None and power.compute_w is not None:
        cool_w = GPU_LEAST * power.compute_w
        cool = accountant.question(row, gpu, middle, card=_drawing(gpu.profile, cool_w))
        yield _Ends(
            "power of the GPU",
            (f"{cool_w:.0f} W", f"{power.compute_w:.0f} W"),
            cool.ratios(case),
            central,
        )
    speeds = row.setup.measured_flops_per_s
    slow, fast = (_at_speed(row, flops_per_s, seed) for flops_per_s in speeds)
    if slow is not None and fast is not None:
        yield _Ends(
            "speed of a device",
            (f"{speeds[0] / 1e12:.2g} TFLOP/s", f"{speeds[1] / 1e12:.2g} TFLOP/s"),
            accountant.ratios(slow, gpu, middle),
            accountant.ratios(fast, gpu, middle),
        )
    if row.setup.profile.kind is DeviceKind.PHONE:
        typical = _waiting(accountant.typical, WAITING_PHONE_W)
        awake = accountant.question(row, gpu, middle, typical=typical).ratios(case)
        settings = ("0 W (left out)", f"{WAITING_PHONE_W:g} W")
        yield _Ends("power of a waiting phone", settings, central, awake)
    if row.through_ps:
        servers = (Ps(watts * row.duration_s, Basis.MODELLED) for watts in PS_W)
        none, laptop = (accountant.question(row, gpu, middle, ps=ps).ratios(case) for ps in servers)
        settings = (f"{PS_W[0]:g} W", f"{PS_W[1]:g} W")
        yield _Ends("parameter server", settings, none, laptop)


def _at_speed(row: StudyRow, flops_per_s: float, seed: int) -> StudyRow | None:
    setup = row.setup
    found = simulated(setup, row.memory[0], seed, flops_per_s / setup.flops_per_s)
    return next((other for other in found if other.method == row.method), None)


def _drawing(profile: DeviceProfile, watts: float) -> DeviceProfile:
    power = msgspec.structs.replace(profile.power or Power(), compute_w=watts)
    return msgspec.structs.replace(profile, power=power)


def _waiting(typical: Typical, watts: float) -> Typical:
    phone = typical.classes[DeviceKind.PHONE]
    awake = replace(phone, power=msgspec.structs.replace(phone.power, idle_w=watts))
    return replace(typical, classes={**typical.classes, DeviceKind.PHONE: awake})


@dataclass(frozen=True, slots=True)
class Changed:
    """The ratios of a row if one condition differs from the central case.

    Attributes:
        axis: name of the changed condition.
        setting: title of its setting.
        ratios: ratios with this setting.
    """

    axis: str
    setting: str
    ratios: Ratios


def one_by_one(accountant: Accountant, row: StudyRow, gpu: GpuRun) -> list[Changed]:
    """Return the ratios of a row for each setting of each condition.

    All other conditions are those of the central case.
    """
    axes = (*energy_axes(), *carbon_axes())
    middle = accountant.middle
    return [
        Changed(axis.name, setting.title, accountant.ratios(row, gpu, setting.applied(middle)))
        for axis in axes
        for setting in axis.settings
    ]


def in_use(
    accountant: Accountant, row: StudyRow, gpu: GpuRun, middle: ConditionState
) -> Mapping[float, Sequence[float]]:
    """Return a mapping from lifetime in years to the ratios of attributed carbon.

    Each lifetime has one ratio per item of `UTILISATIONS`, in the same order.
    """

    def at(years: float, share: float) -> float:
        made: Assumptions = lasting(middle.case.assumptions, years, share)
        state = replace(middle, case=replace(middle.case, assumptions=made))
        return accountant.ratios(row, gpu, state).attributed or 0.0

    return {years: [at(years, share) for share in UTILISATIONS] for years in LIFETIMES_YEARS}
