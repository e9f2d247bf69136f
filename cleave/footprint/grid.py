"""How much carbon a country's electricity costs. Figures and their source: `grid_carbon.md`."""

from __future__ import annotations

import csv
import difflib
from dataclasses import dataclass
from importlib.resources import files

from cleave.errors import UsageError


@dataclass(frozen=True, slots=True)
class Grid:
    """A country's electricity, averaged over a year.

    Attributes:
        code: ISO 3166-1 alpha-3.
        gco2e_per_kwh: life cycle, grams of CO2 equivalent.
    """

    code: str
    country: str
    gco2e_per_kwh: float
    year: int

    def gco2e(self, energy_j: float) -> float:
        """Grams of CO2 equivalent of so many joules; 1 kWh = 3.6e6 J."""
        return energy_j / 3.6e6 * self.gco2e_per_kwh


def load_grid(country: str) -> Grid:
    """The electricity of a country.

    Args:
        country: its three-letter code or its English name, in any case.

    Raises:
        UsageError: when there are no figures for it.
    """
    text = files("cleave.footprint").joinpath("grid_carbon.csv").read_text(encoding="utf-8")
    wanted, names = country.strip().lower(), []
    for row in csv.DictReader(text.splitlines()):
        if wanted in (row["iso_country"].lower(), row["country"].lower()):
            intensity = float(row["gco2e_per_kwh"])
            return Grid(row["iso_country"], row["country"], intensity, int(row["year"]))
        names.append(row["country"])
    near = difflib.get_close_matches(country.strip().title(), names, n=3)
    close = f", near are {', '.join(near)}" if near else ""
    raise UsageError(
        f"there are no figures for the electricity of {country!r}{close}; give a country's name, "
        f"or its three-letter code, like DEU"
    )
