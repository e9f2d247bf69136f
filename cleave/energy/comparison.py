"""Compare the energy and carbon of a fleet with those of a data centre.

A sensitivity is the change of a figure with one assumption, while all others stay the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from cleave.energy.account import (
    CloudUsage,
    DeviceUsage,
    Footprint,
    Ps,
    cloud_footprint,
    fleet_footprint,
)
from cleave.energy.typical import Assumptions, ByKind, Figure, Spread, Typical
from profiles.device_profile import DeviceKind, DeviceProfile

LIFETIME_YEARS = (2.0, 4.0)


@dataclass(frozen=True, slots=True)
class Case:
    """The assumptions from which a figure is computed. A carbon intensity is None if unknown.

    `class_power` selects among the power values measured on devices of a class.
    """

    assumptions: Assumptions
    fleet_gco2e_per_kwh: float | None
    cloud_gco2e_per_kwh: float | None
    class_power: Spread = Spread.MEDIAN


@dataclass(frozen=True, slots=True)
class Bar:
    """The effect of one assumption on a figure.

    Attributes:
        low_setting, high_setting: lowest and highest value of the assumption, shown to the user.
        low, high: the figure for the lowest and for the highest value of the assumption.
    """

    name: str
    low_setting: str
    high_setting: str
    low: float
    high: float

    @property
    def swing(self) -> float:
        return abs(self.high - self.low)


_Ends = tuple[str, str, str, Case, Case]  # title, texts and cases of the lowest and highest value


def sensitivities(
    figure: Callable[[Case], float | None],
    case: Case,
    intensities: Iterable[float],
    *,
    cloud: bool,
    kinds: Collection[DeviceKind],
) -> list[Bar]:
    """Return the effect of each assumption, widest first, without assumptions that have none.

    Args:
        figure: computes the figure, such as carbon or a ratio. An assumption for which the figure
            is None gets no bar.
        case: the base case. Each bar changes one assumption of this case.
        intensities: carbon intensities of the world's grids in gCO2e/kWh. Their 10th and 90th
            percentiles are the low and high values for electricity.
        cloud: whether the figure is a ratio of data centre to fleet. Such ratios are above 0.
        kinds: kinds of the devices and GPUs in the comparison.
    """
    made = case.assumptions
    grids = sorted(intensities)
    p10, p90 = grids[len(grids) // 10], grids[len(grids) - 1 - len(grids) // 10]

    def with_made(**changes: Figure | ByKind | float) -> Case:
        return replace(case, assumptions=replace(made, **changes))  # type: ignore[arg-type]

    def ends(title: str, name: str, unit: str = "") -> _Ends:
        one: Figure = getattr(made, name)
        low, high = (with_made(**{name: replace(one, value=v)}) for v in (one.low, one.high))
        return title, f"{one.low:.3g} {unit}".rstrip(), f"{one.high:.3g} {unit}".rstrip(), low, high

    def all_ends(title: str, name: str, unit: str, scale: float = 1.0) -> _Ends:
        table: ByKind = getattr(made, name)
        low = with_made(**{name: {k: replace(f, value=f.low) for k, f in table.items()}})
        high = with_made(**{name: {k: replace(f, value=f.high) for k, f in table.items()}})
        asked = [figure for kind, figure in table.items() if kind in kinds]
        at_low = _span([figure.low * scale for figure in asked], unit)
        at_high = _span([figure.high * scale for figure in asked], unit)
        return title, at_low, at_high, low, high

    def on_grids(title: str, name: str) -> _Ends:
        low, high = (replace(case, **{name: gco2e}) for gco2e in (p10, p90))  # type: ignore[arg-type]
        return title, f"{p10:.0f} g/kWh", f"{p90:.0f} g/kWh", low, high

    short, long = LIFETIME_YEARS
    at_short, at_long = (with_made(one_lifetime_years=years) for years in LIFETIME_YEARS)
    least, most = (replace(case, class_power=spread) for spread in (Spread.LEAST, Spread.MOST))
    power = "power of devices whose profile has none"
    asked: list[_Ends] = [
        ("lifetime", f"{short:g} years", f"{long:g} years", at_short, at_long),
        ends("utilisation", "utilisation"),
        on_grids("electricity of the fleet", "fleet_gco2e_per_kwh"),
        all_ends("charger and power supply loss", "supply_ratio", "times"),
        ends("network", "network_j_per_byte", "J/byte"),
        all_ends("making of devices without a sheet", "embodied_gco2e", "kgCO2e", 1e-3),
        (power, Spread.LEAST.value, Spread.MOST.value, least, most),
    ]
    if cloud:
        asked += [
            on_grids("electricity of the data centre", "cloud_gco2e_per_kwh"),
            ends("PUE", "pue"),
            ends("around the GPU", "host_share"),
        ]
    bars = []
    for name, low_setting, high_setting, low, high in asked:
        at_low, at_high = figure(low), figure(high)
        if at_low is not None and at_high is not None:
            bars.append(Bar(name, low_setting, high_setting, at_low, at_high))
    return _widest_first(bars, ratio=cloud)


def _widest_first(bars: Iterable[Bar], *, ratio: bool) -> list[Bar]:
    """Return the bars, widest first, without the bars of width 0.

    The width is the absolute value of `high - low` or, for a ratio, of the logarithm of
    `high / low`.
    """

    def width(bar: Bar) -> float:
        return abs(math.log(bar.high / bar.low)) if ratio else bar.swing

    return sorted((bar for bar in bars if bar.swing > 0), key=width, reverse=True)


def _span(values: Sequence[float], unit: str) -> str:
    low, high = min(values, default=0.0), max(values, default=0.0)
    return f"{low:.3g} {unit}" if low == high else f"{low:.3g} to {high:.3g} {unit}"


@dataclass(frozen=True, slots=True)
class Ratios:
    """Ratios of a data centre's energy and carbon to those of a fleet for the same training.

    A ratio above 1 means that the fleet uses less energy or emits less carbon. None means unknown.

    Attributes:
        attributed: ratio of carbon, including a share of manufacturing for both.
        sunk_cost: ratio of carbon, including a share of manufacturing for the data centre only.
        operational: ratio of the carbon of electricity.
    """

    energy: float | None
    attributed: float | None
    sunk_cost: float | None
    operational: float | None


def ratios(fleet: Footprint, cloud: Footprint) -> Ratios:
    """Return the ratios of a data centre's energy and carbon to those of a fleet."""
    here, there = fleet.operational_gco2e, cloud.operational_gco2e
    if not fleet.complete:
        return Ratios(None, None, None, None)
    energy = _over(cloud.energy_j, fleet.energy_j)
    if here is None or there is None:
        return Ratios(energy, None, None, None)
    whole_there = None if cloud.embodied_unknown else there + cloud.embodied_gco2e
    whole_here = None if fleet.embodied_unknown else here + fleet.embodied_gco2e
    return Ratios(
        energy, _over(whole_there, whole_here), _over(whole_there, here), _over(there, here)
    )


def _over(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None or b <= 0 else a / b


@dataclass(frozen=True, slots=True)
class ComparisonQuestion:
    """The known inputs of a comparison. Assumptions are given separately as a `Case`.

    Attributes:
        usages: usage of the fleet's devices, grouped by profile.
        profiles: maps the name of a profile to the profile.
        typical: typical power, used for devices whose profile specifies no power.
        ps: energy of the PS; None if unknown.
        cloud: usage of the data centre; None to account for the fleet alone.
    """

    usages: Sequence[DeviceUsage]
    profiles: Mapping[str, DeviceProfile]
    typical: Typical
    ps: Ps | None = None
    cloud: CloudUsage | None = None

    @property
    def kinds(self) -> set[DeviceKind]:
        """Return the known kinds of the fleet's devices and of the data centre's GPU."""
        found = (usage.kind_by(self.profiles) for usage in self.usages)
        kinds = {kind for kind in found if kind is not None}
        return kinds if self.cloud is None else kinds | {self.cloud.profile.kind}

    def fleet(self, case: Case) -> Footprint:
        return fleet_footprint(
            self.usages,
            self.profiles,
            self.typical.at(case.class_power),
            case.assumptions,
            case.fleet_gco2e_per_kwh,
            self.ps,
        )

    def ratios(self, case: Case) -> Ratios:
        """Return the ratios of the data centre to the fleet under the assumptions of a case.

        Raises:
            ValueError: if `cloud` is None.
        """
        if self.cloud is None:
            raise ValueError("there is no data centre to compare with")
        cloud = cloud_footprint(self.cloud, case.assumptions, case.cloud_gco2e_per_kwh)
        return ratios(self.fleet(case), cloud)

    def figure(self, case: Case) -> float | None:
        """Return the figure whose sensitivities are shown; None if unknown.

        The figure is the ratio of attributed carbon. Without a data centre, it is the fleet's
        attributed carbon in gCO2e.
        """
        if self.cloud is None:
            return self.fleet(case).attributed_gco2e
        return self.ratios(case).attributed
