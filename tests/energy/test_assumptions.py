"""What is assumed has a range, a unit and a source."""

from __future__ import annotations

from dataclasses import fields

from cleave.energy.typical import Figure, load_assumptions


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
