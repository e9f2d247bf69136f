"""Energy and carbon against hand-worked cases."""

from __future__ import annotations

import doctest

from hypothesis import given
from hypothesis import strategies as st

from cleave.energy import meter
from cleave.energy.meter import Gap, gaps_of, parts_of
from profiles.device_profile import Power


def test_the_case_of_the_docstring() -> None:
    outcome = doctest.testmod(meter)
    assert (outcome.attempted, outcome.failed) == (1, 0)


def test_what_is_unknown_is_said_and_left_out() -> None:
    power = Power(compute_w=10)
    assert parts_of(power, 100, 40, 20).energy_j == 400.0
    assert gaps_of(power, ()) == (Gap.IDLE, Gap.RADIO)


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 100), st.floats(0, 100))
def test_a_device_uses_no_more_than_its_powers_allow(
    present_s: float, compute_s: float, idle_w: float, compute_w: float
) -> None:
    power = Power(idle_w=idle_w, compute_w=compute_w, radio_w=0)
    used = parts_of(power, present_s, compute_s, 0)
    least, most = sorted((idle_w, compute_w))
    assert least * present_s * (1 - 1e-9) <= used.energy_j <= most * present_s * (1 + 1e-9)
