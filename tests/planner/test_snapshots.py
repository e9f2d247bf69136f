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


def test_the_interval_by_hand() -> None:
    # 25 steps have 25 * 20 s of idle uplink, and wait 25 / 60 times for 200 + 30 * 37.5 s.
    assert 24 * 20 + 24 / 60 * (200 + 30 * 36) < 1000 < 25 * 20 + 25 / 60 * (200 + 30 * 37.5)
    assert COSTS.best_interval() == 25
    assert COSTS.best_interval(least=80) == 80
    assert replace(COSTS, upload_s=1e-9).best_interval() == 1


def test_without_losses_the_idle_uplink_is_the_limit() -> None:
    never = replace(COSTS, between_losses_s=math.inf)
    assert never.best_interval() == 50
    assert never.step_with_losses_s(1) == never.step_s


def test_an_average_step_by_hand() -> None:
    # An upload takes d steps: 1000 = d (20 + (200 + 30 (50 + d)) / 60), so d is 17.5.
    lost = (200 + 30 * (50 + 17.516)) / 6000
    assert COSTS.step_with_losses_s(100) == pytest.approx(100 / (1 - lost), 1e-4)
    assert COSTS.step_with_losses_s(1000) == math.inf


@given(
    st.floats(1, 1000),
    st.floats(10, 10_000),
    st.floats(0, 1),
    st.floats(0.001, 1),
    st.floats(100, 1e6),
)
def test_no_interval_is_better(
    step_s: float, upload_s: float, idle: float, replay: float, between_s: float
) -> None:
    costs = SnapshotCosts(step_s, upload_s, idle * step_s, replay * step_s, 10, between_s)
    found = costs.best_interval()
    steps = [costs.step_with_losses_s(k) for k in (found - 1, found, found + 1, 9 * found)]
    assert steps == sorted(steps)
    assert steps[0] == costs.step_with_losses_s(0.0)  # uploads need more than that


@given(st.floats(60, 1e6), st.floats(1, 10))
def test_fewer_losses_never_shorten_the_interval(between_s: float, factor: float) -> None:
    often, seldom = (replace(COSTS, between_losses_s=s) for s in (between_s, between_s * factor))
    assert often.best_interval() <= seldom.best_interval()
    assert often.step_with_losses_s(30) >= seldom.step_with_losses_s(30)


def test_a_tenth_more_traffic() -> None:
    found = least_interval(snapshot_bytes=12e9, boundary_bytes=3e9, share=0.1)
    assert found == pytest.approx(40)
