"""Devices that leave soon after they came: some may, but not again and again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cleave.protocol.limits import MAX_SHORT_STAYS, SHORT_STAY_REST_S
from cleave.scheduler.sessions.joining import ShortStays


@given(st.lists(st.floats(0, 60), max_size=60))
def test_never_more_than_may_at_once_and_what_time_brought_back(pauses: list[float]) -> None:
    stays, now_s = ShortStays(), 0.0
    came: list[float] = []
    for pause_s in pauses:
        now_s += pause_s
        stays.tick(now_s)
        if stays.wait_s(1, now_s) == 0:
            came.append(now_s)
            stays.left(1, now_s, now_s + 0.1)
    for i, first_s in enumerate(came):
        for count, last_s in enumerate(came[i:], 1):
            assert count <= MAX_SHORT_STAYS + (last_s - first_s) / SHORT_STAY_REST_S + 1


def test_a_device_waits_as_long_as_it_is_told_and_no_other_does() -> None:
    stays = ShortStays()
    for _ in range(MAX_SHORT_STAYS):
        assert stays.wait_s(1, 0.0) == 0
        stays.left(1, 0.0, 0.0)
    assert stays.wait_s(1, 0.0) == SHORT_STAY_REST_S
    assert stays.wait_s(2, 0.0) == 0
    assert stays.wait_s(1, 0.9 * SHORT_STAY_REST_S) > 0
    assert stays.wait_s(1, SHORT_STAY_REST_S) == 0
