"""The carbon intensity of countries' electricity, from `grid_carbon.csv` (see `grid_carbon.md`)."""

from __future__ import annotations

import csv
import difflib
import math
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from cleave.energy.carbon import mean_intensity, operational_gco2e
from cleave.errors import UsageError


@dataclass(frozen=True, slots=True)
class Grid:
    """A country's electricity, averaged over a year.

    Attributes:
        code: ISO 3166-1 alpha-3.
        gco2e_per_kwh: grams of CO2 equivalent over the life cycle.
    """

    code: str
    country: str
    gco2e_per_kwh: float
    year: int

    def gco2e(self, energy_j: float) -> float:
        return operational_gco2e(energy_j, self.gco2e_per_kwh)


def load_grids() -> list[Grid]:
    """Load the grids of all countries with figures."""
    text = files("cleave.energy").joinpath("grid_carbon.csv").read_text(encoding="utf-8")
    return [
        Grid(row["iso_country"], row["country"], float(row["gco2e_per_kwh"]), int(row["year"]))
        for row in csv.DictReader(text.splitlines())
    ]


def load_grid(country: str) -> Grid:
    """Load the electricity of a country.

    Args:
        country: three-letter code or English name of the country, in any case.

    Raises:
        UsageError: when there are no figures for the country.
    """
    wanted, names = country.strip().lower(), []
    for grid in load_grids():
        if wanted in (grid.code.lower(), grid.country.lower()):
            return grid
        names.append(grid.country)
    near = difflib.get_close_matches(country.strip().title(), names, n=3)
    close = f", near are {', '.join(near)}" if near else ""
    raise UsageError(
        f"there are no figures for the electricity of {country!r}{close}; give a country's name, "
        f"or its three-letter code, like DEU"
    )


def load_hours(path: Path) -> tuple[float, ...]:
    """Load the intensity of each hour of the day, in gCO2e/kWh, from the user's own table.

    Args:
        path: CSV with the columns `hour` (0 to 23, each once) and `gco2e_per_kwh`.

    Raises:
        UsageError: when the file cannot be read or has another format.
    """
    try:
        rows = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
        hours = {int(row["hour"]): float(row["gco2e_per_kwh"]) for row in rows}
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}); give a CSV file") from None
    except (KeyError, TypeError, ValueError):
        hours = {}
    whole = sorted(hours) == list(range(24)) and len(rows) == 24
    if not whole or not all(0 <= v < math.inf for v in hours.values()):
        raise UsageError(
            f"{path} is no table of hours; give the columns hour and gco2e_per_kwh with a line for "
            f"each hour from 0 to 23"
        )
    return tuple(hours[hour] for hour in range(24))


@dataclass(frozen=True, slots=True)
class Electricity:
    """The carbon intensity of a run's electricity, and its source.

    Attributes:
        gco2e_per_kwh: mean over the run.
        text: the source, as a text for people.
    """

    gco2e_per_kwh: float
    text: str


def electricity(place: str, start_hour: float, duration_s: float) -> Electricity:
    """Return the electricity of a run.

    Args:
        place: a country (see `load_grid`), or a path that ends in `.csv` (see `load_hours`).
        start_hour: hour of the day at which the run begins; used only with tables of hours.

    Raises:
        UsageError: when there are no figures for the place.
    """
    if place.endswith(".csv"):
        mean = mean_intensity(load_hours(Path(place)), start_hour, duration_s)
        return Electricity(mean, f"{place} from hour {start_hour:g}: {mean:.0f} gCO2e/kWh")
    grid = load_grid(place)
    text = f"{grid.country}, {grid.year}: {grid.gco2e_per_kwh:.0f} gCO2e/kWh"
    return Electricity(grid.gco2e_per_kwh, text)
