"""Electricity by country and by hour."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.energy import grid
from cleave.energy.grid import (
    electricity,
    load_grid,
    load_grids,
    load_hours,
    mean_intensity,
)
from cleave.errors import UsageError


def table(path: Path, hours: list[int]) -> str:
    lines = [f"{hour},{100 if 8 <= hour < 16 else 500}" for hour in hours]
    path.write_text("\n".join(["hour,gco2e_per_kwh", *lines]))
    return str(path)


def test_a_country_and_a_day_of_ones_own(tmp_path: Path) -> None:
    germany = electricity("DEU", 0, 3600)
    assert "Germany" in germany.text
    hours = table(tmp_path / "home.csv", list(range(24)))
    assert electricity(hours, 12, 3600).gco2e_per_kwh == 100
    assert electricity(hours, 15, 7200).gco2e_per_kwh == 300


@pytest.mark.parametrize("hours", [list(range(23)), [*range(23), 22], [*range(24), 3]])
def test_a_table_that_is_not_a_day(tmp_path: Path, hours: list[int]) -> None:
    with pytest.raises(UsageError, match="each hour from 0 to 23"):
        load_hours(Path(table(tmp_path / "home.csv", hours)))


def test_an_unknown_country() -> None:
    assert load_grid("deu") == load_grid("Germany")
    with pytest.raises(UsageError, match="similar: France"):
        load_grid("Frnace")


def test_a_table_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        load_hours(tmp_path / "home.csv")


def test_every_country_has_a_plausible_intensity() -> None:
    grids = load_grids()
    assert len(grids) > 200
    assert all(0 <= grid.gco2e_per_kwh < 1500 for grid in grids)


def test_the_cases_of_the_docstrings() -> None:
    outcome = doctest.testmod(grid)
    assert (outcome.attempted, outcome.failed) == (3, 0)


@given(st.lists(st.floats(0, 1000), min_size=24, max_size=24), st.floats(0, 24), st.floats(0, 1e6))
def test_a_mean_lies_between(hourly: list[float], start: float, duration_s: float) -> None:
    mean = mean_intensity(hourly, start, duration_s)
    assert min(hourly) - 1e-6 <= mean <= max(hourly) + 1e-6


def test_a_whole_day_is_the_mean_of_the_day() -> None:
    hourly = [float(h) for h in range(24)]
    assert mean_intensity(hourly, 7.3, 24 * 3600) == pytest.approx(11.5)
    assert mean_intensity(hourly, 5.5, 0) == 5
