"""The door's counts and the log of refusals: no sockets, no clocks."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.transport.door import ConnectionLimits, Door, home_of
from cleave.transport.refusals import RefusalLog

ADDRESSES = st.sampled_from(["192.0.2.1", "192.0.2.2", "2001:db8::1", "2001:db8::2", "::1"])


@given(st.lists(st.tuples(ADDRESSES, st.booleans()), max_size=60))
def test_no_more_wait_than_may_and_none_is_forgotten(events: list[tuple[str, bool]]) -> None:
    door = Door(ConnectionLimits(waiting_per_address=3, waiting=5))
    inside: list[str] = []
    for address, comes in events:
        if comes:
            from_there = sum(home_of(other) == home_of(address) for other in inside)
            reason = door.knock(address)
            assert bool(reason) == (from_there >= 3 or len(inside) >= 5)
            inside += [] if reason else [address]
        elif address in inside:
            inside.remove(address)
            door.done(address)
        assert door.waiting == len(inside)
    for address in inside:
        door.done(address)
    assert all(not door.knock("192.0.2.9") for _ in range(3))


@pytest.mark.parametrize(
    ("address", "home"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("somewhere", "somewhere"),
    ],
)
def test_addresses_that_one_machine_may_choose_from_count_as_one(address: str, home: str) -> None:
    assert home_of(address) == home


@given(st.integers(0, 10**6))
def test_connections_leave_files_to_the_process(descriptors: int) -> None:
    fits = ConnectionLimits().within(descriptors)
    assert min(fits.waiting, fits.operators, fits.devices) >= 1
    total = fits.waiting + fits.operators + fits.devices
    assert total <= max(4, descriptors - 128)
    assert ConnectionLimits().within(10**6) == ConnectionLimits()


def test_many_refusals_are_few_lines() -> None:
    said: list[str] = []
    windows: list[Callable[[], None]] = []
    log = RefusalLog(
        said.append,
        lambda: datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        lambda _, ends: windows.append(ends),
        lines=2,
    )
    for _ in range(1000):
        log.refused("192.0.2.1", "wrong credential")
    log.refused("192.0.2.2", "too late")
    assert said == ["2026-01-02 03:04:05 refused 192.0.2.1: wrong credential"] * 2
    windows.pop()()
    assert said[2:] == [
        "2026-01-02 03:04:05 refused 999 more (998 times: wrong credential; 1 times: too late)"
    ]
    log.refused("192.0.2.1", "wrong credential")  # a new window
    assert len(said) == 4
    windows.pop()()
    assert len(said) == 4  # nothing was left to tell
    assert not windows
