"""Carbon against hand-worked cases, and consistency of units."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.energy import carbon
from cleave.energy.carbon import (
    S_PER_YEAR,
    embodied_gco2e,
    mean_intensity,
    operational_gco2e,
)
from cleave.energy.grid import load_grid


def test_the_cases_of_the_docstrings() -> None:
    outcome = doctest.testmod(carbon)
    assert (outcome.attempted, outcome.failed) == (3, 0)


def test_joules_and_watt_hours_grams_and_kilograms() -> None:
    # BLOOM: 1,082,990 GPU hours at 400 W are 433,196 kWh; at 57 g/kWh these are 24.7 t (Luccioni et
    # al., arXiv 2211.02001).
    energy_j = 1_082_990 * 3600 * 400
    assert energy_j / 3600 / 1000 == pytest.approx(433_196, rel=1e-5)  # Wh, kWh
    assert operational_gco2e(energy_j, 57) / 1000 / 1000 == pytest.approx(24.7, abs=0.05)  # kg, t


def test_the_grid_says_the_same() -> None:
    grid = load_grid("DEU")
    assert grid.gco2e(7.2e6) == operational_gco2e(7.2e6, grid.gco2e_per_kwh)


def test_a_whole_life_carries_all_of_it() -> None:
    # A device in use 30 % of 4 years is used for 1.2 years in its life.
    assert embodied_gco2e(1000, 1.2 * S_PER_YEAR, 4, 0.3) == pytest.approx(1000)


@given(st.lists(st.floats(0, 1000), min_size=24, max_size=24), st.floats(0, 24), st.floats(0, 1e6))
def test_a_mean_lies_between(hourly: list[float], start: float, duration_s: float) -> None:
    mean = mean_intensity(hourly, start, duration_s)
    assert min(hourly) - 1e-6 <= mean <= max(hourly) + 1e-6


def test_a_whole_day_is_the_mean_of_the_day() -> None:
    hourly = [float(h) for h in range(24)]
    assert mean_intensity(hourly, 7.3, 24 * 3600) == pytest.approx(11.5)
    assert mean_intensity(hourly, 5.5, 0) == 5
