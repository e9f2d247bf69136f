"""The pending's counts and the log of refusals: no sockets, no clocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.transport.connection_limits import (
    ConnectionLimits,
    PendingConnections,
    RateLimit,
    RejectionLog,
    WaitingPlace,
    home_of,
    network_of,
)
from tests.server.clocks import Clock

ADDRESSES = st.sampled_from(["192.0.2.1", "192.0.2.2", "2001:db8::1", "2001:db8::2", "::1"])


@given(st.lists(st.tuples(ADDRESSES, st.booleans()), max_size=60))
def test_no_more_wait_than_may_and_none_is_forgotten(events: list[tuple[str, bool]]) -> None:
    pending = PendingConnections(ConnectionLimits(waiting_per_address=3, waiting=5))
    inside: dict[int, str] = {}
    for address, comes in events:
        if comes:
            before = Counter(map(network_of, inside.values()))
            from_there = sum(home_of(other) == home_of(address) for other in inside.values())
            place = pending.arrive(address)
            full = len(inside) == 5 and max(before.values()) == before[network_of(address)]
            assert isinstance(place, str) == (from_there >= 3 or full)
            if isinstance(place, WaitingPlace):
                if place.instead_of is not None:
                    home = network_of(inside.pop(place.instead_of))
                    assert before[home] == max(before.values()) > before[network_of(address)]
                inside[place.ticket] = address
        elif address in inside.values():
            ticket = next(t for t, other in inside.items() if other == address)
            del inside[ticket]
            pending.done(ticket)
        assert pending.waiting == len(inside) <= 5
    for ticket in inside:
        pending.done(ticket)
    assert all(isinstance(pending.arrive("192.0.2.9"), WaitingPlace) for _ in range(3))


STRANGERS = {
    "four addresses": [f"192.0.2.{n}" for n in range(4)],
    "many addresses": [f"10.0.{n >> 8}.{n & 255}" for n in range(1000)],
    "a network of homes": [f"2001:db8:1:{n:x}::1" for n in range(1000)],
}


@pytest.mark.parametrize("strangers", STRANGERS.values(), ids=STRANGERS)
@pytest.mark.parametrize("newcomer", ["198.51.100.7", "2001:db8:2::7"])
def test_strangers_keep_nobody_out_who_comes_from_elsewhere(
    strangers: list[str], newcomer: str
) -> None:
    pending = PendingConnections(ConnectionLimits())
    for n in range(2000):
        pending.arrive(strangers[n % len(strangers)])
    assert pending.waiting == ConnectionLimits().waiting
    place = pending.arrive(newcomer)
    assert isinstance(place, WaitingPlace)
    assert place.instead_of is not None
    for n in range(100):  # as many more, while the newcomer says its hello
        other = pending.arrive(strangers[n % len(strangers)])
        assert isinstance(other, str) or other.instead_of != place.ticket
    pending.done(place.ticket)


def test_the_oldest_of_the_most_makes_room() -> None:
    pending = PendingConnections(ConnectionLimits(waiting_per_address=3, waiting=4))
    tickets = [pending.arrive(address) for address in ("192.0.2.1", *["192.0.2.2"] * 3)]
    assert pending.arrive("192.0.2.2") == "3 connections from this address are already waiting"
    place = pending.arrive("192.0.2.3")
    assert isinstance(place, WaitingPlace)
    assert isinstance(tickets[1], WaitingPlace)
    assert place.instead_of == tickets[1].ticket
    pending = PendingConnections(ConnectionLimits(waiting=1))
    pending.arrive("192.0.2.1")
    assert pending.arrive("192.0.2.1") == "1 connections are already waiting"


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


def test_many_refusals_are_few_lines(notes: list[str]) -> None:
    windows: list[Callable[[], None]] = []
    log = RejectionLog(
        lambda: datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        lambda _, ends: windows.append(ends),
        lines=2,
    )
    for _ in range(1000):
        log.refused("192.0.2.1", "wrong credential")
    log.refused("192.0.2.2", "too late")
    log.refused("192.0.2.3", "wrong credential")  # no line is left for it
    assert notes == [  # one line for each address and reason
        "2026-01-02 03:04:05 refused 192.0.2.1: wrong credential",
        "2026-01-02 03:04:05 refused 192.0.2.2: too late",
    ]
    windows.pop()()
    assert notes[2:] == ["2026-01-02 03:04:05 refused 1,000 more (1,000 times: wrong credential)"]
    log.refused("192.0.2.1", "wrong credential")  # a new window
    assert len(notes) == 4
    windows.pop()()
    assert len(notes) == 4  # nothing was left to tell
    assert not windows
    for wait_s in range(5):  # numbers make no line of their own
        log.refused("192.0.2.1", f"too many from 192.0.2.1; try again in {wait_s} s")
    windows.pop()()
    assert "(4 times: too many from there; try again in … s)" in notes[-1]


@given(
    st.lists(st.tuples(st.floats(0, 100), st.sampled_from(["a", "b"])), max_size=60),
    st.integers(1, 5),
    st.floats(0.5, 20),
)
def test_never_more_than_the_bucket_and_what_came_back(
    steps: list[tuple[float, str]], burst: int, refill_s: float
) -> None:
    clock = Clock(0.0)
    attempts = RateLimit(clock, burst, refill_s)
    made: dict[str, list[float]] = {"a": [], "b": []}
    for pause_s, who in steps:
        clock.now_s += pause_s
        if attempts.wait_s(who) == 0:
            made[who].append(clock.now_s)
            attempts.failed(who)
    for times in made.values():
        for i, first_s in enumerate(times):
            for j, last_s in enumerate(times[i:], 1):
                assert j <= burst + (last_s - first_s) / refill_s + 1e-6


@given(st.integers(1, 8), st.floats(0.5, 100))
def test_the_wait_is_as_long_as_said(burst: int, refill_s: float) -> None:
    clock = Clock(0.0)
    attempts = RateLimit(clock, burst, refill_s)
    for _ in range(burst):
        assert attempts.wait_s("a") == 0
        attempts.failed("a")
    wait_s = attempts.wait_s("a")
    assert wait_s == refill_s
    assert attempts.wait_s("b") == 0
    clock.now_s += 0.9 * wait_s
    assert attempts.wait_s("a") > 0
    clock.now_s += 0.11 * wait_s
    assert attempts.wait_s("a") == 0


def test_a_network_of_ipv6_is_one_address() -> None:
    attempts = RateLimit(Clock(), burst=1)
    attempts.failed("2001:db8:0:1::7")
    assert attempts.wait_s("2001:db8:0:1:ffff::1") > 0
    assert attempts.wait_s("2001:db8:0:2::7") == 0
    attempts.failed("::ffff:192.0.2.1")
    assert attempts.wait_s("192.0.2.1") > 0
    attempts.failed("fe80::1%eth0")
    assert attempts.wait_s("fe80::2") > 0
    attempts.failed("")
    assert attempts.wait_s("") > 0


def test_memory_is_bounded() -> None:
    attempts = RateLimit(Clock(), burst=1, max_addresses=3)
    for number in range(100):
        attempts.failed(f"192.0.2.{number}")
    assert [n for n in range(100) if attempts.wait_s(f"192.0.2.{n}")] == [97, 98, 99]
