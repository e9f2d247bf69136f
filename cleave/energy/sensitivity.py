"""Sensitivity of a figure to the assumptions.

Each assumption is varied from the low end to the high end of its range, with all other assumptions
unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cleave.energy.assumptions import Assumptions, ByKind, Figure
from cleave.energy.typical import Spread
from cleave.errors import UsageError, not_installed
from cleave.files import save_figure
from profiles.device_profile import DeviceKind

LIFETIME_YEARS = (2.0, 4.0)


@dataclass(frozen=True, slots=True)
class Case:
    """The assumptions from which a figure is computed.

    Attributes:
        assumptions: assumed figures for everything that was not measured.
        fleet_gco2e_per_kwh: carbon intensity of the fleet's electricity; None if unknown.
        cloud_gco2e_per_kwh: carbon intensity of the data centre's electricity; None if unknown.
        class_power: which of the power values measured on similar devices to use for a device
            whose profile states no power.
    """

    assumptions: Assumptions
    fleet_gco2e_per_kwh: float | None
    cloud_gco2e_per_kwh: float | None
    class_power: Spread = Spread.MEDIAN


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of a tornado plot: the effect of one assumption on a figure.

    Attributes:
        name: name of the assumption.
        low_setting, high_setting: lowest and highest value of the assumption, as texts.
        low, high: the figure at the lowest and at the highest value of the assumption.
    """

    name: str
    low_setting: str
    high_setting: str
    low: float
    high: float

    @property
    def swing(self) -> float:
        """Return the absolute difference between `low` and `high`."""
        return abs(self.high - self.low)


def tornado(
    figure: Callable[[Case], float | None],
    case: Case,
    intensities: Iterable[float],
    *,
    cloud: bool,
    kinds: Collection[DeviceKind] = tuple(DeviceKind),
) -> list[Bar]:
    """Return the bars of a tornado plot, widest first.

    An assumption that does not change the figure gets no bar.

    Args:
        figure: computes the figure, such as carbon or a ratio, from a case. If the figure is None
            for an assumption's low or high value, that assumption gets no bar.
        case: the base case, in which one assumption at a time is varied.
        intensities: carbon intensities of the world's grids in gCO2e/kWh. Their 10th and 90th
            percentiles are the low and high values for electricity.
        cloud: whether the figure is a ratio of data centre to fleet, which is above 0.
        kinds: kinds of the devices and GPUs in the comparison.
    """
    made = case.assumptions
    grids = sorted(intensities)
    p10, p90 = grids[len(grids) // 10], grids[len(grids) - 1 - len(grids) // 10]

    def with_made(**changes: Figure | ByKind | float) -> Case:
        return replace(case, assumptions=replace(made, **changes))  # type: ignore[arg-type]

    def ends(name: str, unit: str = "") -> tuple[str, str, str, Case, Case]:
        one: Figure = getattr(made, name)
        low, high = (with_made(**{name: replace(one, value=v)}) for v in (one.low, one.high))
        return (
            _NAMES[name],
            f"{one.low:.3g} {unit}".rstrip(),
            f"{one.high:.3g} {unit}".rstrip(),
            low,
            high,
        )

    def all_ends(name: str, unit: str, scale: float = 1.0) -> tuple[str, str, str, Case, Case]:
        table: ByKind = getattr(made, name)
        low = with_made(**{name: {k: replace(f, value=f.low) for k, f in table.items()}})
        high = with_made(**{name: {k: replace(f, value=f.high) for k, f in table.items()}})
        asked = [figure for kind, figure in table.items() if kind in kinds]
        at_low = _span([figure.low * scale for figure in asked], unit)
        at_high = _span([figure.high * scale for figure in asked], unit)
        return _NAMES[name], at_low, at_high, low, high

    short, long = LIFETIME_YEARS
    asked = [
        (
            "lifetime",
            f"{short:g} years",
            f"{long:g} years",
            with_made(one_lifetime_years=short),
            with_made(one_lifetime_years=long),
        ),
        ends("utilisation"),
        (
            "electricity of the fleet",
            f"{p10:.0f} g/kWh",
            f"{p90:.0f} g/kWh",
            replace(case, fleet_gco2e_per_kwh=p10),
            replace(case, fleet_gco2e_per_kwh=p90),
        ),
        all_ends("supply_ratio", "times"),
        ends("network_j_per_byte", "J/byte"),
        all_ends("embodied_gco2e", "kgCO2e", 1e-3),
        (
            "power of devices whose profile does not say",
            Spread.LEAST.value,
            Spread.MOST.value,
            replace(case, class_power=Spread.LEAST),
            replace(case, class_power=Spread.MOST),
        ),
    ]
    if cloud:
        asked += [
            (
                "electricity of the data centre",
                f"{p10:.0f} g/kWh",
                f"{p90:.0f} g/kWh",
                replace(case, cloud_gco2e_per_kwh=p10),
                replace(case, cloud_gco2e_per_kwh=p90),
            ),
            ends("pue"),
            ends("host_share"),
        ]
    bars = []
    for name, low_setting, high_setting, low, high in asked:
        at_low, at_high = figure(low), figure(high)
        if at_low is not None and at_high is not None:
            bars.append(Bar(name, low_setting, high_setting, at_low, at_high))
    return widest_first(bars, ratio=cloud)


def widest_first(bars: Iterable[Bar], *, ratio: bool) -> list[Bar]:
    """Sort the bars of a tornado plot, widest first, and drop bars of width 0.

    Args:
        bars: the bars, in any order.
        ratio: whether the figure is a ratio. The width of a bar is then the logarithm of the
            quotient of `high` and `low`; otherwise it is their difference.
    """

    def width(bar: Bar) -> float:
        return abs(math.log(bar.high / bar.low)) if ratio else bar.swing

    return sorted((bar for bar in bars if bar.swing > 0), key=width, reverse=True)


def _span(values: Sequence[float], unit: str) -> str:
    low, high = min(values, default=0.0), max(values, default=0.0)
    return f"{low:.3g} {unit}" if low == high else f"{low:.3g} to {high:.3g} {unit}"


_NAMES = {
    "utilisation": "utilisation",
    "supply_ratio": "charger and power supply loss",
    "network_j_per_byte": "network",
    "embodied_gco2e": "making of devices without a sheet",
    "pue": "PUE",
    "host_share": "around the GPU",
}


def draw_tornado(
    path: Path,
    bars: Sequence[Bar],
    middle: float,
    title: str,
    unit: str,
    *,
    ratio: bool,
    claimed: tuple[float, float] | None = None,
) -> None:
    """Draw a tornado plot into an image file.

    Args:
        path: the image file. The suffix, such as .png, sets the format.
        bars: the bars from top to bottom, normally widest first.
        middle: the figure in the base case.
        title: title of the plot.
        unit: unit of the figure, shown as the label of the axis.
        ratio: whether the figure is a ratio. For a ratio, the axis is logarithmic and a line marks
            the value 1.
        claimed: lowest and highest value of a range to shade; None to shade nothing.

    Raises:
        UsageError: when matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise not_installed("--plot", "matplotlib", "train") from None
    figure = Figure(figsize=(9, 1.6 + 0.5 * len(bars)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for row, bar in enumerate(reversed(bars)):
        # If both ends are on the same side of `middle`, shift the labels apart vertically.
        apart = 5 if (bar.low >= middle) == (bar.high >= middle) else 0
        for end, setting, colour, up in (
            (bar.low, bar.low_setting, "tab:blue", apart),
            (bar.high, bar.high_setting, "tab:orange", -apart),
        ):
            axes.barh(row, end - middle, left=middle, color=colour, height=0.6)
            right = end >= middle
            axes.annotate(
                setting,
                (end, row),
                xytext=(4 if right else -4, up),
                textcoords="offset points",
                ha="left" if right else "right",
                va="center",
                fontsize=8,
            )
    axes.set_yticks(range(len(bars)), [bar.name for bar in reversed(bars)])
    axes.axvline(middle, color="black", linewidth=1)
    if claimed is not None:
        axes.axvspan(*claimed, color="tab:green", alpha=0.15)
    if ratio:
        axes.set_xscale("log")
        axes.axvline(1, color="grey", linewidth=1, linestyle="--")
    axes.set(title=title, xlabel=unit)
    ends = [middle, *(claimed or ()), *(bar.low for bar in bars), *(bar.high for bar in bars)]
    if ratio:  # leave space for the labels
        axes.set_xlim(min(ends) / 10, max(1.0, max(ends)) * 10)
    else:
        room = 0.15 * (max(ends) - min(ends))
        axes.set_xlim(min(ends) - room, max(ends) + room)
    axes.spines[["top", "right", "left"]].set_visible(False)
    try:
        save_figure(figure, path, 150)
    except (OSError, ValueError) as error:
        raise UsageError(f"{str(path)!r} cannot be drawn: {error}; give a .png") from error
