"""Failed attempts, limited per address."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cleave.transport.connection_limits import RateLimit
from tests.server.clocks import Clock


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
