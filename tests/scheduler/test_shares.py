"""How much each device does in a round of local updates, and how much its difference counts."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from cleave.planner.local_updates import planned_steps
from cleave.scheduler.rounds.shares import (
    bounded_shares,
    is_given_up,
    is_late,
    outliers,
)

speeds = st.dictionaries(st.integers(1, 20), st.floats(1e-3, 1e9), min_size=1)
# Quotients of numbers near the smallest float lose their digits.
norms = st.floats(1e-100, 1e12) | st.sampled_from([0.0, math.nan, math.inf])
counted = st.dictionaries(st.integers(1, 20), st.tuples(st.integers(1, 10**6), norms), min_size=1)


@given(speeds, st.integers(1, 1000))
def test_the_fastest_does_all_steps_and_nobody_takes_longer(
    steps_per_s: dict[int, float], every: int
) -> None:
    found = planned_steps(steps_per_s, every)
    assert found.keys() == steps_per_s.keys()
    assert max(found.values()) == every
    fastest = max(steps_per_s.values())
    for device, steps in found.items():
        takes = steps / steps_per_s[device]
        assert steps == 1 or takes <= (every + 0.5 * fastest / steps_per_s[device] + 1e-6) / fastest


@given(counted)
def test_no_difference_moves_the_average_further_than_usual_ones(
    devices: dict[int, tuple[int, float]],
) -> None:
    tokens = {device: count for device, (count, _) in devices.items()}
    norms = {device: norm for device, (_, norm) in devices.items()}
    shares = bounded_shares(tokens, norms, dict.fromkeys(norms, 1.0))
    assert shares.keys() == {device for device, norm in norms.items() if math.isfinite(norm)}
    assert sum(shares.values()) <= 1 + 1e-9
    relative = sorted(norms[d] / math.sqrt(tokens[d]) for d in shares)
    total = sum(tokens[d] for d in shares)
    for device, share in shares.items():
        usual = relative[(len(relative) - 1) // 2] * math.sqrt(tokens[device])
        assert share * norms[device] <= 4 * usual * tokens[device] / total * (1 + 1e-9)
        if device not in outliers(tokens, norms, dict.fromkeys(norms, 1.0)):
            assert math.isclose(share, tokens[device] / total)
    assert outliers(tokens, norms, dict.fromkeys(norms, 1.0)) >= norms.keys() - shares.keys()


def test_a_minority_of_any_norm_is_named() -> None:
    tokens = dict.fromkeys(range(5), 100)
    norms = {0: 1.0, 1: 1.1, 2: 0.9, 3: 1e9, 4: math.nan}
    assert outliers(tokens, norms, dict.fromkeys(norms, 1.0)) == {3, 4}
    assert bounded_shares(tokens, norms, dict.fromkeys(norms, 1.0))[3] * 1e9 <= 4 * 1.1 / 4
    assert outliers(tokens, dict.fromkeys(norms, 0.0), dict.fromkeys(norms, 1.0)) == set()


def test_slow_devices_stop_once_all_others_have_finished() -> None:
    assert is_late(13.0, {1: 10.0, 2: 9.0}, {1, 2})
    assert not is_late(12.0, {1: 10.0, 2: 9.0}, {1, 2})
    assert not is_late(100.0, {1: 10.0}, {1, 2})  # another is not done either
    assert not is_late(100.0, {}, set())  # nobody waits for it
    assert is_given_up(41.0, {1: 10.0}, {1})
    assert not is_given_up(39.0, {1: 10.0}, {1})


def test_new_devices_make_no_older_one_unusual() -> None:
    tokens, norms = dict.fromkeys(range(5), 100), {0: 1.0, 1: 1.0, 2: 1.1, 3: 0.9, 4: 6.0}
    ages = {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0, 4: 30.0}
    assert outliers(tokens, norms, ages) == set()
    assert outliers(tokens, norms, {**ages, 4: 1.0}) == {4}
    assert outliers(tokens, norms, dict.fromkeys(norms, 30.0)) == {4}
    assert outliers(tokens, norms | {4: 17.0}, ages) == {4}
    assert bounded_shares(tokens, norms | {4: 1e9}, ages)[4] * 1e9 <= 16 / 5 * (1 + 1e-9)
