"""What is assumed has a range, a unit and a source."""

from __future__ import annotations

from dataclasses import fields

from cleave.energy.assumptions import Figure, load_assumptions
from profiles.device_profile import DeviceKind


def test_every_figure_lies_in_its_range_and_has_a_source() -> None:
    made = load_assumptions()
    figures: list[Figure] = []
    for field in fields(made):
        value = getattr(made, field.name)
        if isinstance(value, Figure):
            figures.append(value)
        elif value is not None:
            figures.extend(value.values())
    assert len(figures) > 15
    for figure in figures:
        assert figure.low <= figure.value <= figure.high, figure
        assert figure.unit
        assert figure.source
    # What multiplies energy never makes it less.
    assert made.pue.low >= 1
    assert all(figure.low >= 1 for figure in made.supply_ratio.values())


def test_making_a_typical_desktop_is_a_median_of_makers_sheets() -> None:
    made = load_assumptions().embodied_gco2e[DeviceKind.DESKTOP]
    assert (made.low, made.value, made.high) == (187_100, 248_800, 408_400)
    assert made.source == "median of 157 desktops"
