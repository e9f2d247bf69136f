"""The carbon of electricity, by country or hour, and of manufacturing a device.

    C_operational = E / 3.6e6 I                         E in joules, I in gCO2e/kWh
    C_embodied    = M t_used / (lifetime utilisation)   times in seconds, C and M in gCO2e

E is the electricity used, and I its carbon intensity. M is the carbon of manufacturing the device,
and `utilisation` the share of its lifetime for which it is in use.

The formulae follow arXiv 2507.01803. `grid_carbon.md` describes the source of `grid_carbon.csv`.
"""

from __future__ import annotations

import csv
import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from cleave.errors import UsageError

J_PER_KWH = 3.6e6
S_PER_YEAR = 365.25 * 24 * 3600
_HOUR_S = 3600.0


def operational_gco2e(energy_j: float, gco2e_per_kwh: float) -> float:
    """Return the carbon of an amount of electricity, in grams of CO2 equivalent.

    Example: a laptop that draws 36 W for 10 hours uses 0.36 kWh, which is 144 g at 400 g/kWh:

        >>> operational_gco2e(36 * 36000, 400)
        144.0
    """
    return energy_j / J_PER_KWH * gco2e_per_kwh


def embodied_gco2e(
    made_gco2e: float, used_s: float, lifetime_years: float, utilisation: float
) -> float:
    """Return the share of a device's manufacturing carbon attributed to a run, in gCO2e.

    Example: manufacturing a phone emits 53 kgCO2e. The phone is in use for half of its 2.5 years. A
    run of 0.0125 years is 1 % of this use:

        >>> round(embodied_gco2e(53000, 0.0125 * S_PER_YEAR, 2.5, 0.5))
        530
    """
    return made_gco2e * used_s / (lifetime_years * S_PER_YEAR * utilisation)


def mean_intensity(hourly: Sequence[float], start_hour: float, duration_s: float) -> float:
    """Return the mean carbon intensity of a run at constant power, from an hourly table.

    Example: the intensity is 100 gCO2e/kWh from 23:00, 200 from 0:00 and 400 from 1:00. A 2-hour
    run from 23:30 spends half an hour at 100, one hour at 200 and half an hour at 400:

        >>> mean_intensity([200, 400] + [300] * 21 + [100], 23.5, 7200)
        225.0

    Args:
        hourly: 24 carbon intensities in gCO2e/kWh, one for each hour from midnight.
        start_hour: hour of the day at which the run begins, 0 to 24.
        duration_s: duration of the run. For 0, the result is the intensity at `start_hour`.
    """
    at = start_hour % 24
    if duration_s < 1e-3:  # below the resolution of the sum over hours
        return hourly[int(at) % 24]
    days, left_s = divmod(duration_s, 24 * _HOUR_S)
    total = days * 24 * sum(hourly) / 24
    left = left_s / _HOUR_S
    while left > 1e-12:
        lasts = min(left, int(at) + 1 - at)
        total += lasts * hourly[int(at) % 24]
        at = (at + lasts) % 24
        left -= lasts
    return total / (duration_s / _HOUR_S)


@dataclass(frozen=True, slots=True)
class Grid:
    """The mean life-cycle carbon intensity of a country's electricity in one year.

    `code` is the ISO 3166-1 alpha-3 code of the country.
    """

    code: str
    country: str
    gco2e_per_kwh: float
    year: int

    def gco2e(self, energy_j: float) -> float:
        return operational_gco2e(energy_j, self.gco2e_per_kwh)


def load_grids() -> list[Grid]:
    """Load the mean carbon intensity of electricity in each country of `grid_carbon.csv`."""
    text = files("cleave.energy").joinpath("grid_carbon.csv").read_text(encoding="utf-8")
    return [
        Grid(row["iso_country"], row["country"], float(row["gco2e_per_kwh"]), int(row["year"]))
        for row in csv.DictReader(text.splitlines())
    ]


def load_grid(country: str) -> Grid:
    """Load the carbon intensity of a country's electricity.

    Args:
        country: three-letter code or English name of the country, in upper or lower case.

    Raises:
        UsageError: if the carbon intensity of the country is unknown.
    """
    wanted, names = country.strip().lower(), []
    for grid in load_grids():
        if wanted in (grid.code.lower(), grid.country.lower()):
            return grid
        names.append(grid.country)
    near = difflib.get_close_matches(country.strip().title(), names, n=3)
    close = f" (similar: {', '.join(near)})" if near else ""
    raise UsageError(
        f"there are no figures for the electricity of {country!r}{close}; use a country's name, or "
        "its three-letter code, such as DEU"
    )


def load_hours(path: Path) -> tuple[float, ...]:
    """Load a table of the carbon intensity in each hour of the day from a CSV file.

    Args:
        path: file with the columns `hour` and `gco2e_per_kwh`, and one line per hour from 0 to 23.

    Returns:
        24 carbon intensities in gCO2e/kWh, starting at midnight.

    Raises:
        UsageError: if the file cannot be read, or does not contain a valid table.
    """
    try:
        rows = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
        hours = {int(row["hour"]): float(row["gco2e_per_kwh"]) for row in rows}
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read ({error.strerror}); use a readable CSV file"
        ) from None
    except (KeyError, TypeError, ValueError):
        hours = {}
    whole = sorted(hours) == list(range(24)) and len(rows) == 24
    if not whole or not all(0 <= v < math.inf for v in hours.values()):
        raise UsageError(
            f"{path} is not a table of hourly values; use the columns hour and gco2e_per_kwh, with "
            "a line for each hour from 0 to 23"
        )
    return tuple(hours[hour] for hour in range(24))


@dataclass(frozen=True, slots=True)
class Electricity:
    """The mean carbon intensity of a run's electricity. `text` tells users where it comes from."""

    gco2e_per_kwh: float
    text: str


def electricity(place: str, start_hour: float, duration_s: float) -> Electricity:
    """Return the carbon intensity of a run's electricity.

    Args:
        place: name or three-letter code of a country, or path of a `.csv` file of hourly values.
        start_hour: hour of the day at which the run begins; used only with a CSV file.
        duration_s: duration of the run; used only with a CSV file.

    Raises:
        UsageError: if the country's carbon intensity is unknown, or the CSV file is invalid.
    """
    if place.endswith(".csv"):
        mean = mean_intensity(load_hours(Path(place)), start_hour, duration_s)
        return Electricity(mean, f"{place} from hour {start_hour:g}: {mean:.0f} gCO2e/kWh")
    grid = load_grid(place)
    text = f"{grid.country}, {grid.year}: {grid.gco2e_per_kwh:.0f} gCO2e/kWh"
    return Electricity(grid.gco2e_per_kwh, text)
