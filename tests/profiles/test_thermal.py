"""The thermal model: where it settles, how it gets there, and what a fit recovers."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiles.thermal import ThermalModel, ThermalState, ThrottlePoint, fit_thermal


def throttled(ratio: float, tau_s: float = 100.0, ambient: float = 0.0) -> ThermalModel:
    """A device in normalised temperature that settles at this share of its speed."""
    points = (ThrottlePoint(ambient + 0.9 * ratio, 1.0), ThrottlePoint(ambient + ratio, ratio))
    return ThermalModel(1.0, tau_s, ambient, points)


def run(model: ThermalModel, seconds: float, every_s: float) -> list[tuple[float, float]]:
    """Throughput over time of a device that computes without a break."""
    state, speeds, clock_s = ThermalState(model, model.ambient), [(0.0, 1.0)], 0.0
    while clock_s < seconds:
        took_s = state.busy(clock_s, every_s)
        clock_s += took_s
        speeds.append((clock_s, every_s / took_s))
    return speeds


ratios = st.floats(0.1, 0.95)
points = st.lists(st.tuples(st.floats(30, 90), st.floats(0.1, 1.0)), max_size=4).map(
    lambda pairs: tuple(
        ThrottlePoint(temperature, speed)
        for temperature, speed in zip(
            sorted({t for t, _ in pairs}), sorted((s for _, s in pairs), reverse=True), strict=False
        )
    )
)


# --- where it settles ---


@given(ratios, st.floats(-20, 40))
def test_it_settles_at_the_ratio_that_it_was_made_for(ratio: float, ambient: float) -> None:
    assert throttled(ratio, ambient=ambient).sustained_speed == pytest.approx(ratio, rel=1e-6)


def test_without_throttle_points_it_never_slows_down() -> None:
    model = ThermalModel(40.0, 100.0, 25.0)
    assert model.sustained_speed == 1
    assert ThermalState(model, 25.0).busy(0.0, 1000.0) == pytest.approx(1000.0)


def test_between_points_the_speed_is_linear() -> None:
    model = ThermalModel(1.0, 10.0, 0.0, (ThrottlePoint(40.0, 1.0), ThrottlePoint(60.0, 0.5)))
    speeds = [model.speed(t) for t in (39.9, 40.0, 45.0, 60.0, 61.0)]
    assert speeds == pytest.approx([1.0, 1.0, 0.875, 0.5, 0.5])


def test_at_a_jump_the_speed_is_the_mean_of_both_sides() -> None:
    # At full speed it would reach 75 degrees, at half speed 50: it goes to and fro about 60.
    model = ThermalModel(50.0, 100.0, 25.0, (ThrottlePoint(60.0, 0.5),))
    assert model.sustained_speed == pytest.approx(0.7)
    begin, end = (ThermalState(model, 25.0).busy(0.0, work_s) for work_s in (1000.0, 3000.0))
    assert 2000.0 / (end - begin) == pytest.approx(0.7, abs=0.02)


@given(points, st.floats(5, 100), st.floats(1, 1000))
def test_long_runs_settle_at_the_sustained_speed(
    points: tuple[ThrottlePoint, ...], rise: float, tau_s: float
) -> None:
    model = ThermalModel(rise, tau_s, 25.0, points)
    state = ThermalState(model, 25.0)
    state.busy(0.0, 10 * tau_s)
    took_s = state.busy(state.at_s, 10 * tau_s)
    # Pieces are a fiftieth of the time constant: at a jump the device overshoots by as much.
    assert 10 * tau_s / took_s == pytest.approx(model.sustained_speed, abs=0.03)


# --- on the way there ---


@given(points, st.floats(-50, 150), st.floats(0, 50))
def test_hotter_is_never_faster(
    points: tuple[ThrottlePoint, ...], temperature: float, more: float
) -> None:
    model = ThermalModel(50.0, 100.0, 25.0, points)
    assert model.speed(temperature + more) <= model.speed(temperature) + 1e-12


@given(ratios, st.floats(1, 1000))
def test_under_load_the_speed_only_falls(ratio: float, tau_s: float) -> None:
    speeds = [speed for _, speed in run(throttled(ratio, tau_s), 3 * tau_s, tau_s / 20)]
    assert all(later <= earlier + 1e-6 for earlier, later in pairwise(speeds))
    assert all(ratio - 1e-6 <= speed <= 1 + 1e-6 for speed in speeds)


def test_warming_takes_the_time_constant() -> None:
    model = ThermalModel(40.0, 100.0, 25.0)
    assert model.after(25.0, 100.0, 1.0) == pytest.approx(25 + 40 * (1 - math.exp(-1)))


def test_a_rest_brings_the_speed_back() -> None:
    state = ThermalState(throttled(0.5), 0.0)
    state.busy(0.0, 1000.0)
    slow_s = ThermalState(state.model, state.temperature).busy(0.0, 1.0)
    rested_s = state.busy(state.at_s + 1000.0, 1.0)
    assert slow_s == pytest.approx(2.0, rel=0.01)
    assert rested_s == pytest.approx(1.0)


# --- fitting ---


@pytest.mark.parametrize("ratio", [0.3, 0.5, 0.58, 0.8])
@pytest.mark.parametrize("tau_s", [30.0, 187.0, 900.0])
def test_a_fit_recovers_the_model(ratio: float, tau_s: float) -> None:
    found = fit_thermal(run(throttled(ratio, tau_s), 5 * tau_s, tau_s / 20))
    assert found is not None
    assert found.sustained_speed == pytest.approx(ratio, rel=0.02)
    # The grid has eight steps a decade.
    assert abs(math.log10(found.time_constant_s / tau_s)) < 1 / 8


@pytest.mark.parametrize("speeds", [[], [(0.0, 1.0), (600.0, 0.99)], [(0.0, 1.0), (60.0, 1.02)]])
def test_a_device_that_never_slowed_down_has_no_model(speeds: list[tuple[float, float]]) -> None:
    assert fit_thermal(speeds) is None


# --- what it refuses ---


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ([(60.0, 0.0)], r"throttle point \[60.0, 0.0\] is invalid"),
        ([(60.0, 1.5)], r"throttle point \[60.0, 1.5\] is invalid"),
        ([(60.0, 0.9), (60.0, 0.5)], r"\[60.0, 0.9\] is followed by \[60.0, 0.5\]"),
        ([(60.0, 0.5), (70.0, 0.9)], r"\[60.0, 0.5\] is followed by \[70.0, 0.9\]"),
    ],
)
def test_impossible_throttle_points(points: list[tuple[float, float]], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ThermalModel(40.0, 100.0, 25.0, tuple(ThrottlePoint(*point) for point in points))
