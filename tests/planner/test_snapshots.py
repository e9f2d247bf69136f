"""The rule for the snapshot interval of resident stages."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.planner.stages.snapshots import SnapshotCosts, least_interval

COSTS = SnapshotCosts(
    step_s=100, upload_s=1000, idle_s=20, replay_s=30, restart_s=200, between_losses_s=6000
)


def test_an_average_step_by_hand() -> None:
    # The idle uplink takes a snapshot in 50 steps. In 10 steps, 80 s of each step are exposed.
    assert COSTS.step_with_losses_s(10) == pytest.approx(100 + 80 + (200 + 30 * 15) / 60)
    assert COSTS.step_with_losses_s(60) == pytest.approx(100 + (200 + 30 * (30 + 50)) / 60)


def test_the_interval_by_hand() -> None:
    # sqrt(2 / 3 * 1000 * 6000 / (30 * 100)) = 36.5
    assert COSTS.best_interval() == 37
    assert replace(COSTS, between_losses_s=math.inf).best_interval() == 50
    assert COSTS.best_interval(least=80) == 80
    assert replace(COSTS, upload_s=1e-9).best_interval() == 1
    assert replace(COSTS, idle_s=0).best_interval() == 37


def test_without_losses_and_with_a_long_interval_a_step_is_as_long_as_ever() -> None:
    assert replace(COSTS, between_losses_s=math.inf).step_with_losses_s(50) == 100


@given(
    st.floats(1, 1000),
    st.floats(0.01, 10_000),
    st.floats(0, 1),
    st.floats(0.001, 1),
    st.floats(10, 1e6),
)
def test_no_interval_is_better(
    step_s: float, upload_s: float, idle: float, replay: float, between_s: float
) -> None:
    costs = SnapshotCosts(step_s, upload_s, idle * step_s, replay * step_s, 10, between_s)
    found = costs.best_interval()
    most = max(3 * found, 100)
    best = min(costs.step_with_losses_s(k) for k in {1, *range(max(1, found - 2), found + 3), most})
    # A whole number of steps costs at most the replay of the part that was rounded.
    rounded_s = 1.5 * costs.replay_s * step_s / between_s
    assert costs.step_with_losses_s(found) <= best + rounded_s + 1e-9


@given(st.floats(60, 1e6), st.floats(1, 10))
def test_fewer_losses_never_shorten_the_interval(between_s: float, factor: float) -> None:
    often, seldom = (replace(COSTS, between_losses_s=s) for s in (between_s, between_s * factor))
    assert often.best_interval() <= seldom.best_interval()


def test_a_tenth_more_traffic() -> None:
    assert least_interval(snapshot_bytes=12e9, boundary_bytes=3e9) == pytest.approx(40)
