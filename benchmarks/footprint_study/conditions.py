"""The conditions under which the paper's claims are tested, and the results of the tests.

Each condition is an axis with a few settings. The first settings of all axes form the central case.
The central case counts the energy that the paper's formulae count and the energy of the GPU's host.
In this case, devices and GPU train at the same share of their multiplication speed. Energy claims
are tested under all combinations of five axes, and carbon claims under those of seven axes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Final

from benchmarks.footprint_study.setups import EQUAL_SHARE, OTHER_SHARES
from cleave.energy.comparison import Case
from cleave.energy.grid import load_grids
from cleave.energy.typical import Spread, load_assumptions


@dataclass(frozen=True, slots=True)
class ConditionState:
    """The assumptions from which a ratio is computed.

    `device_share` and `gpu_share` are training speeds divided by matrix multiplication speeds.
    """

    case: Case
    device_share: float = EQUAL_SHARE
    gpu_share: float = EQUAL_SHARE


Change = Callable[[ConditionState], ConditionState]
Settings = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Axis:
    """A condition. `settings` maps titles to state changes, with the central setting first."""

    name: str
    settings: Mapping[str, Change]


def energy_axes() -> tuple[Axis, ...]:
    """Return the five conditions that affect both energy and carbon."""
    made = load_assumptions()
    no_host, no_pue = replace(made.host_share, value=0.0), replace(made.pue, value=1.0)
    lossy = {k: replace(figure, value=figure.high) for k, figure in made.supply_ratio.items()}
    no_network = made.without_network().network_j_per_byte
    speeds = {"50 % both": _changed()}
    for share in OTHER_SHARES:
        speeds[f"laptops {100 * share:g} %, GPU 50 %"] = _changed(device_share=share)
    for share in OTHER_SHARES:
        speeds[f"laptops 50 %, GPU {100 * share:g} %"] = _changed(gpu_share=share)
    return (
        Axis(
            "chargers",
            {
                "as the rules ask": _changed(),
                "2.9 times for phones, 1.25 for laptops": _assumed(supply_ratio=lossy),
            },
        ),
        Axis(
            "network between devices",
            {
                "not counted": _assumed(network_j_per_byte=no_network),
                "0.007 kWh/GB": _assumed(network_j_per_byte=made.network_j_per_byte),
            },
        ),
        Axis(
            "around the GPU",
            {
                "machine and PUE": _changed(),
                "PUE alone": _assumed(host_share=no_host),
                "nothing": _assumed(host_share=no_host, pue=no_pue),
            },
        ),
        Axis(
            "power of devices",
            {
                spread.value: _cased(class_power=spread)
                for spread in (Spread.MEDIAN, Spread.LEAST, Spread.MOST)
            },
        ),
        Axis("speed in training, of multiplication alone", speeds),
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
    lives = {"as assumed": _changed()}
    for years, share in product((2.0, 4.0), (0.2, 0.8)):
        used = replace(load_assumptions().utilisation, value=share)
        lives[f"{years:g} years, {share:.0%} in use"] = _assumed(
            one_lifetime_years=years, utilisation=used
        )
    fed = {
        name: _cased(fleet_gco2e_per_kwh=fleet, cloud_gco2e_per_kwh=cloud)
        for name, (fleet, cloud) in pairs.items()
    }
    return Axis("gCO2e/kWh", fed), Axis("lifetime and utilisation", lives)


def combinations(
    axes: Sequence[Axis], start: ConditionState
) -> Iterator[tuple[Mapping[str, str], ConditionState]]:
    """Yield the settings (by axis name) and the state of each combination, central case first."""
    names = [axis.name for axis in axes]
    for settings in product(*(axis.settings.items() for axis in axes)):
        state = start
        for _, change in settings:
            state = change(state)
        yield dict(zip(names, (title for title, _ in settings), strict=True)), state


def grids() -> tuple[float, float, float]:
    """Return the 10 %, 50 % and 90 % quantiles of countries' carbon intensities in gCO2e/kWh."""
    found = sorted(grid.gco2e_per_kwh for grid in load_grids())
    last = len(found) - 1
    return found[len(found) // 10], found[len(found) // 2], found[last - len(found) // 10]


def _changed(**shares: float) -> Change:
    return lambda state: replace(state, **shares)  # type: ignore[arg-type]


def _cased(**changes: object) -> Change:
    return lambda s: replace(s, case=replace(s.case, **changes))  # type: ignore[arg-type]


def _assumed(**changes: object) -> Change:
    def applied(state: ConditionState) -> ConditionState:
        made = replace(state.case.assumptions, **changes)  # type: ignore[arg-type]
        return replace(state, case=replace(state.case, assumptions=made))

    return applied


# Lower ends of the claimed ranges of the GPU's energy and carbon divided by the devices'.
ENERGY_CLAIM: Final = 1.5
CARBON_CLAIM: Final = 3.5


@dataclass(frozen=True, slots=True)
class Found:
    """The result of testing a claimed ratio under all combinations of conditions.

    Attributes:
        central: ratio in the central case.
        only_if: maps the name of a condition to a description of the settings with which the claim
            can hold. Conditions whose settings all allow the claim are left out.
    """

    central: float
    least: float
    most: float
    held: int
    tried: int
    only_if: Settings


def held_against(
    axes: Sequence[Axis], tried: Sequence[tuple[Settings, float]], claimed: float
) -> Found:
    """Test whether the tried ratios reach `claimed`. The first ratio is for the central case."""
    ratios = [found for _, found in tried]
    holding = [settings for settings, found in tried if found >= claimed]
    return Found(
        ratios[0], min(ratios), max(ratios), len(holding), len(tried), _needed(axes, holding)
    )


def _needed(axes: Sequence[Axis], holding: Sequence[Settings]) -> Settings:
    """Map each condition that restricts a claim to a description of the required settings.

    The description lists the settings with which the claim can hold or, if fewer, the others.
    """
    needed = {}
    for axis in axes:
        seen = {settings[axis.name] for settings in holding}
        left = [title for title in axis.settings if title in seen]
        gone = [title for title in axis.settings if title not in seen]
        if left and gone:
            few = len(left) <= len(gone)
            needed[axis.name] = " or ".join(left) if few else "not " + " nor ".join(gone)
    return needed
