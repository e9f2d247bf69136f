"""Sessions, gaps and hours: presences in order, in their window, as long as they should be."""

from __future__ import annotations

import itertools
import math
import random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiles.availability import DAY_S, Availability, AvailabilityFamily, Durations, PresencePeriod

HOUR_S = 3600.0

durations = st.builds(
    Durations,
    mean_s=st.floats(60, 1e6),
    family=st.sampled_from(AvailabilityFamily),
    shape=st.floats(0.3, 3),
)
hours = st.tuples(st.floats(0, 24), st.floats(0, 24)).filter(lambda h: (h[1] - h[0]) % 24 > 0.1)
availabilities = st.builds(
    Availability, session=st.none() | durations, gap=st.none() | durations, hours=st.none() | hours
)
seeds = st.integers(0, 2**32)


def first(
    availability: Availability, count: int, seed: int, hour: float = 0.0
) -> list[PresencePeriod]:
    """The first presences."""
    return list(itertools.islice(availability.presences(random.Random(seed), hour), count))


def within(availability: Availability, seconds: float, seed: int) -> list[PresencePeriod]:
    """The presences that begin before a time, cut off there."""
    found = itertools.takewhile(
        lambda presence: presence.from_s < seconds, availability.presences(random.Random(seed))
    )
    return [PresencePeriod(begin, min(end, seconds)) for begin, end in found]


# --- durations ---


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        (AvailabilityFamily.EXPONENTIAL, 1.0),
        (AvailabilityFamily.WEIBULL, 0.6),
        (AvailabilityFamily.WEIBULL, 2.0),
        (AvailabilityFamily.LOGNORMAL, 0.5),
        (AvailabilityFamily.LOGNORMAL, 1.0),
    ],
)
def test_the_mean_is_the_mean_in_every_family(family: AvailabilityFamily, shape: float) -> None:
    drawn, rng = Durations(600.0, family, shape), random.Random(1)
    assert fmean(drawn.draw(rng) for _ in range(100_000)) == pytest.approx(600, rel=0.03)


# --- presences ---


@given(availabilities, seeds, st.floats(0, 24))
def test_presences_are_in_order_and_do_not_overlap(
    availability: Availability, seed: int, start_hour: float
) -> None:
    found = first(availability, 20, seed, start_hour)
    assert found[0].from_s >= 0
    assert all(begin <= end for begin, end in found)
    assert all(a.to_s <= b.from_s for a, b in itertools.pairwise(found))


@given(availabilities.filter(lambda a: a.hours is not None), seeds, st.floats(0, 24))
def test_presences_lie_within_the_hours(
    availability: Availability, seed: int, start_hour: float
) -> None:
    assert availability.hours is not None
    opens, closes = availability.hours
    length = (closes - opens) % 24
    for begin_s, end_s in first(availability, 20, seed, start_hour):
        since_opening = (start_hour + begin_s / HOUR_S - opens + 1e-6) % 24
        assert since_opening <= length + 1e-5
        assert since_opening + (end_s - begin_s) / HOUR_S <= length + 1e-5


def test_by_default_a_device_is_always_there() -> None:
    assert Availability().always
    assert list(Availability().presences(random.Random(0))) == [PresencePeriod(0.0, math.inf)]


def test_sessions_without_gaps_follow_each_other() -> None:
    found = first(Availability(Durations(600.0)), 50, 4)
    assert found[0].from_s == 0
    assert all(a.to_s == b.from_s for a, b in itertools.pairwise(found))


@pytest.mark.parametrize(("session_s", "gap_s"), [(3600.0, 1200.0), (600.0, 600.0), (60.0, 540.0)])
def test_the_share_of_time_is_that_of_the_means(session_s: float, gap_s: float) -> None:
    availability = Availability(
        Durations(session_s, AvailabilityFamily.WEIBULL, 0.6), Durations(gap_s)
    )
    span_s = 4_000 * (session_s + gap_s)
    there_s = sum(end - begin for begin, end in within(availability, span_s, 5))
    assert there_s / span_s == pytest.approx(session_s / (session_s + gap_s), abs=0.03)


def test_the_share_at_time_zero_is_that_of_the_means_too() -> None:
    availability = Availability(Durations(3600.0), Durations(1200.0))
    there = [first(availability, 1, seed)[0].from_s == 0 for seed in range(4_000)]
    assert fmean(there) == pytest.approx(0.75, abs=0.03)


# --- hours of the day ---


@pytest.mark.parametrize(
    ("hours", "start_hour", "wanted"),
    [
        # The window before midnight is open at time zero, until 7.
        ((22.0, 7.0), 0.0, [(0, 7), (22, 31), (46, 55)]),
        ((22.0, 7.0), 23.0, [(0, 8), (23, 32)]),
        ((9.0, 17.0), 17.0, [(16, 24), (40, 48)]),
        ((18.0, 24.0), 0.0, [(18, 24), (42, 48)]),
    ],
)
def test_windows(
    hours: tuple[float, float], start_hour: float, wanted: list[tuple[float, float]]
) -> None:
    found = first(Availability(hours=hours), len(wanted), 0, start_hour)
    assert [(begin / HOUR_S, end / HOUR_S) for begin, end in found] == wanted


def test_hours_cut_sessions_and_keep_what_lies_within() -> None:
    plain = Availability(Durations(4 * HOUR_S), Durations(HOUR_S))
    windowed = Availability(plain.session, plain.gap, (22.0, 7.0))
    span_s = 30 * DAY_S

    def seconds(availability: Availability, begin_s: float, end_s: float) -> float:
        cut = ((max(a, begin_s), min(b, end_s)) for a, b in within(availability, span_s, 6))
        return sum(b - a for a, b in cut if b > a)

    for day in range(1, 29):
        night = (day * DAY_S - 2 * HOUR_S, day * DAY_S + 7 * HOUR_S)
        assert seconds(windowed, *night) == pytest.approx(seconds(plain, *night))
        assert seconds(windowed, night[1], night[1] + 15 * HOUR_S) == 0


@pytest.mark.parametrize(
    "hours", [(0.0, 24.0), (7.0, 7.01), (-1.0, 7.0), (7.0, 24.5), (math.nan, 7.0), (7.0, math.inf)]
)
def test_impossible_hours(hours: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match=r"hours are .*; use two different hours from 0 to 24"):
        Availability(hours=hours)
