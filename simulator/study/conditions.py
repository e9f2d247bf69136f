"""The conditions under which the paper's claims are tested: what counts, and what is assumed.

Each condition is an axis with a few settings. The first setting of every axis together form the
central case. It counts what the paper's formulae count, and the machine around the GPU. Devices and
GPU train at the same share of their multiplication speed. Claims about energy are tested on all
combinations of the first five axes, and claims about carbon on all combinations of all seven axes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Final

from cleave.energy.assumptions import Assumptions, ByKind, load_assumptions
from cleave.energy.grid import load_grids
from cleave.energy.sensitivity import Case
from cleave.energy.typical import Spread
from simulator.study.setups import EQUAL_SHARE, OTHER_SHARES
from simulator.verdict import Verdict


@dataclass(frozen=True, slots=True)
class ConditionState:
    """The assumptions and training speeds from which a ratio is computed.

    Attributes:
        case: assumptions about energy and carbon.
        device_share, gpu_share: training speed of a device and of the GPU, as a share of its speed
            in matrix multiplication alone.
    """

    case: Case
    device_share: float = EQUAL_SHARE
    gpu_share: float = EQUAL_SHARE


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of a condition.

    Attributes:
        title: name of the setting in the report.
        applied: function that returns a copy of a state with this setting.
    """

    title: str
    applied: Callable[[ConditionState], ConditionState]


@dataclass(frozen=True, slots=True)
class Axis:
    """A condition and its possible settings.

    Attributes:
        name: name of the condition in the report.
        settings: settings to test. The first setting is that of the central case.
    """

    name: str
    settings: tuple[Setting, ...]


def energy_axes() -> tuple[Axis, ...]:
    """Return the five conditions that affect both energy and carbon."""
    network = load_assumptions().network_j_per_byte

    def with_network(made: Assumptions) -> Assumptions:
        return replace(made, network_j_per_byte=network)

    return (
        Axis(
            "chargers",
            (
                Setting("as the rules ask", _same),
                Setting("2.9 times for phones, 1.25 for laptops", lambda s: _made(s, lossy)),
            ),
        ),
        Axis(
            "network between devices",
            (
                Setting("not counted", lambda s: _made(s, Assumptions.without_network)),
                Setting("0.007 kWh/GB", lambda s: _made(s, with_network)),
            ),
        ),
        Axis(
            "around the GPU",
            (
                Setting("machine and PUE", _same),
                Setting("PUE alone", lambda s: _made(s, without_host)),
                Setting("nothing", lambda s: _made(s, bare_gpu)),
            ),
        ),
        Axis(
            "power of devices",
            tuple(
                Setting(spread.value, lambda s, spread=spread: _powered(s, spread))  # type: ignore[misc]
                for spread in (Spread.MEDIAN, Spread.LEAST, Spread.MOST)
            ),
        ),
        Axis(
            "speed in training, of multiplication alone",
            (
                Setting("50 % both", _same),
                *(
                    Setting(f"laptops {100 * share:g} %, GPU 50 %", _reaching(device_share=share))
                    for share in OTHER_SHARES
                ),
                *(
                    Setting(f"laptops 50 %, GPU {100 * share:g} %", _reaching(gpu_share=share))
                    for share in OTHER_SHARES
                ),
            ),
        ),
    )


def carbon_axes() -> tuple[Axis, ...]:
    """Return the two conditions that affect only carbon."""
    low, middle, high = grids()
    pairs = {
        f"{middle:.0f} both": (middle, middle),
        f"{low:.0f} both": (low, low),
        f"{high:.0f} both": (high, high),
        f"{low:.0f} devices, {high:.0f} GPU": (low, high),
        f"{high:.0f} devices, {low:.0f} GPU": (high, low),
    }
    lifetimes = {
        f"{years:g} years, {share:.0%} in use": (years, share)
        for years in (2.0, 4.0)
        for share in (0.2, 0.8)
    }
    return (
        Axis(
            "gCO2e/kWh",
            tuple(
                Setting(name, lambda s, pair=pair: _fed(s, *pair))  # type: ignore[misc]
                for name, pair in pairs.items()
            ),
        ),
        Axis(
            "lifetime and utilisation",
            (
                Setting("as assumed", _same),
                *(
                    Setting(name, lambda s, of=of: _made(s, lambda made: lasting(made, *of)))  # type: ignore[misc]
                    for name, of in lifetimes.items()
                ),
            ),
        ),
    )


def combinations(
    axes: Sequence[Axis], start: ConditionState
) -> Iterator[tuple[Mapping[str, str], ConditionState]]:
    """Yield all combinations of settings, with the central case first.

    Args:
        axes: conditions to combine.
        start: state to which the settings are applied.

    Yields:
        A mapping from the name of each axis to the title of its setting, and the resulting state.
    """
    for settings in product(*(axis.settings for axis in axes)):
        state = start
        for setting in settings:
            state = setting.applied(state)
        names = (axis.name for axis in axes)
        yield dict(zip(names, (s.title for s in settings), strict=True)), state


def grids() -> tuple[float, float, float]:
    """Return the 10 %, 50 % and 90 % quantiles of all countries' carbon intensity, in gCO2e/kWh."""
    found = sorted(grid.gco2e_per_kwh for grid in load_grids())
    last = len(found) - 1
    return found[len(found) // 10], found[len(found) // 2], found[last - len(found) // 10]


# --- changes to assumptions ---


def lossy(made: Assumptions) -> Assumptions:
    """Set the losses of all chargers and power supplies to the high end of their range."""
    return replace(made, supply_ratio=_highest(made.supply_ratio))


def without_host(made: Assumptions) -> Assumptions:
    """Leave out the power of the machine around the GPU, but not the data centre's PUE."""
    return replace(made, host_share=replace(made.host_share, value=0.0))


def bare_gpu(made: Assumptions) -> Assumptions:
    """Leave out the power of the machine around the GPU and the data centre's PUE."""
    return replace(without_host(made), pue=replace(made.pue, value=1.0))


def lasting(made: Assumptions, years: float, utilisation: float) -> Assumptions:
    """Set the lifetime of all machines, and the share of the lifetime in which they are in use.

    Args:
        made: assumptions to change.
        years: lifetime in years.
        utilisation: share of the lifetime, 0 to 1.
    """
    used = replace(made.utilisation, value=utilisation)
    return replace(made, one_lifetime_years=years, utilisation=used)


def _highest(table: ByKind) -> ByKind:
    return {kind: replace(figure, value=figure.high) for kind, figure in table.items()}


def _same(state: ConditionState) -> ConditionState:
    return state


def _made(state: ConditionState, change: Callable[[Assumptions], Assumptions]) -> ConditionState:
    return replace(state, case=replace(state.case, assumptions=change(state.case.assumptions)))


def _reaching(**shares: float) -> Callable[[ConditionState], ConditionState]:
    return lambda state: replace(state, **shares)  # type: ignore[arg-type]


def _powered(state: ConditionState, spread: Spread) -> ConditionState:
    return replace(state, case=replace(state.case, class_power=spread))


def _fed(state: ConditionState, fleet: float, cloud: float) -> ConditionState:
    case = replace(state.case, fleet_gco2e_per_kwh=fleet, cloud_gco2e_per_kwh=cloud)
    return replace(state, case=case)


LAPTOPS_AT_ALL: Final = "laptops 100 %, GPU 50 %"
"""Title of the speed setting that favours laptops: they train at full multiplication speed, and the
GPU at half of its multiplication speed."""
ENERGY_CLAIM: Final = (1.5, 4.0)
CARBON_CLAIM: Final = (3.5, 8.0)
"""Ranges that the paper claims for the GPU's energy and carbon divided by those of the devices."""


Settings = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Found:
    """The result of testing a claimed ratio under all combinations of conditions.

    Attributes:
        central: ratio in the central case of `conditions`.
        least, most: lowest and highest ratio of all combinations.
        held: number of combinations with at least the claimed ratio.
        tried: number of all combinations.
        only_if: maps a condition to text on the settings with which the claim can hold. Conditions
            that allow all settings are left out.
    """

    central: float
    least: float
    most: float
    held: int
    tried: int
    only_if: Settings

    @property
    def verdict(self) -> Verdict:
        """Return whether the claim holds in all, some or no combinations of conditions."""
        if self.held == self.tried:
            return Verdict.HOLDS
        return Verdict.SOMETIMES if self.held else Verdict.FAILS


def held_against(
    axes: Sequence[Axis], tried: Sequence[tuple[Settings, float]], claimed: float
) -> Found:
    """Test a claimed ratio under given combinations of conditions.

    Args:
        axes: conditions with their settings.
        tried: settings and ratio of each combination. The first combination is the central case.
        claimed: lower end of the claimed range of ratios.
    """
    ratios = [found for _, found in tried]
    holding = [settings for settings, found in tried if found >= claimed]
    return Found(
        ratios[0], min(ratios), max(ratios), len(holding), len(tried), _needed(axes, holding)
    )


def _needed(axes: Sequence[Axis], holding: Sequence[Settings]) -> Settings:
    """Map the name of each condition to text on the settings with which a claim can hold.

    Conditions are left out if the claim can hold with all their settings. The text lists the
    settings with which the claim can hold, or those with which it cannot hold if they are fewer.

    Args:
        axes: conditions with their settings.
        holding: settings of all combinations with at least the claimed ratio.
    """
    needed = {}
    for axis in axes:
        titles = [setting.title for setting in axis.settings]
        seen = {settings[axis.name] for settings in holding}
        left = [title for title in titles if title in seen]
        gone = [title for title in titles if title not in seen]
        if left and gone:
            few = len(left) <= len(gone)
            needed[axis.name] = " or ".join(left) if few else "not " + " nor ".join(gone)
    return needed


def together(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the verdict that all verdicts agree on, or `Verdict.SOMETIMES` if they differ."""
    found = set(verdicts)
    return found.pop() if len(found) == 1 else Verdict.SOMETIMES
