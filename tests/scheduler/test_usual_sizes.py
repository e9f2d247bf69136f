"""What is usual is learned from what was used, and never from what stands out."""

from __future__ import annotations

import math

import pytest

from cleave.scheduler.stages.usual_sizes import FAR, Returned, UsualSizes

PLACE = Returned.SUM, "w", 3
ANOTHER = Returned.SUM, "w", 4


def test_of_what_nothing_is_known_everything_stands_out() -> None:
    usual = UsualSizes()
    assert usual.of(PLACE) is None
    assert not usual.explains(PLACE, 0.0)


def test_a_layer_without_history_is_held_to_the_others() -> None:
    usual = UsualSizes()
    usual.saw(PLACE, 2.0)
    assert usual.explains(ANOTHER, 2.0 * FAR)
    assert not usual.explains(ANOTHER, 2.1 * FAR)
    assert usual.of((Returned.SUM, "bias", 3)) is None
    usual.saw(ANOTHER, 0.01)
    assert not usual.explains(ANOTHER, 2.0 * FAR)


@pytest.mark.parametrize("size", [math.nan, math.inf, 1e30])
def test_what_is_not_finite_is_never_usual(size: float) -> None:
    usual = UsualSizes()
    usual.saw(PLACE, 1.0)
    assert not usual.explains(PLACE, size)


def test_what_is_usual_follows_slowly_unless_it_was_computed_again() -> None:
    usual = UsualSizes()
    usual.saw(PLACE, 1.0)
    usual.saw(PLACE, 50.0)
    assert usual.of(PLACE) == 2.0
    usual.saw(PLACE, 500.0, repeated=True)
    assert usual.of(PLACE) == 500.0
    for _ in range(1000):
        usual.saw(PLACE, 1.0)
    assert usual.of(PLACE) == pytest.approx(1.0)
