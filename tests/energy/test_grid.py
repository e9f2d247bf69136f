"""Electricity by country and by hour."""

from __future__ import annotations

from pathlib import Path

import pytest

from cleave.energy.grid import electricity, load_grids, load_hours
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


def test_a_table_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        load_hours(tmp_path / "home.csv")


def test_every_country_has_a_plausible_intensity() -> None:
    grids = load_grids()
    assert len(grids) > 200
    assert all(0 <= grid.gco2e_per_kwh < 1500 for grid in grids)
