"""Energy and carbon against hand-worked cases."""

from __future__ import annotations

import doctest

from hypothesis import given
from hypothesis import strategies as st

from cleave.energy import meter
from cleave.energy.meter import Activity, Gap, used_by
from profiles.device_profile import Power

DID = Activity(100, 40, 100e6, 20e6, 10e6, 2e6)


def test_the_case_of_the_docstring() -> None:
    outcome = doctest.testmod(meter)
    assert (outcome.attempted, outcome.failed) == (2, 0)


def test_what_is_unknown_is_said_and_left_out() -> None:
    used = used_by(Power(compute_w=10), DID)
    assert used is not None
    assert used.energy_j == 400.0
    assert set(used.gaps) == {Gap.IDLE, Gap.RADIO}
    assert used_by(Power(idle_w=1), DID) is None
    assert used_by(None, DID) is None


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 100), st.floats(0, 100))
def test_a_device_uses_no_more_than_its_powers_allow(
    present_s: float, compute_s: float, idle_w: float, compute_w: float
) -> None:
    power = Power(idle_w=idle_w, compute_w=compute_w, radio_w=0)
    used = used_by(power, Activity(present_s, compute_s, 0, 0, 1, 1))
    assert used is not None
    least, most = sorted((idle_w, compute_w))
    assert least * present_s * (1 - 1e-9) <= used.energy_j <= most * present_s * (1 + 1e-9)
