"""A port that servers of a moment ago still have is waited for, and not for ever."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cleave.cluster.endpoints import FREED_S, PortInUseError, opened_in_time
from cleave.errors import UsageError
from tests.server.clocks import Clock


def opens_after(tries: int) -> Callable[[], int]:
    """What finds its port in use so often."""
    left = [tries]

    def opens() -> int:
        if left[0]:
            left[0] -= 1
            raise PortInUseError("port 8766 is in use")
        return 8766

    return opens


def slept(clock: Clock) -> Callable[[float], None]:
    def sleep(seconds: float) -> None:
        clock.now_s += seconds

    return sleep


def test_a_port_that_is_free_again_is_taken_and_the_user_is_told_once_why_it_took_so_long() -> None:
    clock, said = Clock(0.0), list[str]()
    assert opened_in_time(opens_after(3), said.append, clock, slept(clock)) == 8766
    assert len(said) == 1
    assert "port 8766 is in use" in said[0]


def test_nothing_is_said_of_a_port_that_is_free() -> None:
    said = list[str]()
    assert opened_in_time(opens_after(0), said.append) == 8766
    assert not said


def test_a_port_that_somebody_keeps_is_given_up() -> None:
    clock = Clock(0.0)
    with pytest.raises(UsageError, match="in use"):
        opened_in_time(opens_after(1000), print, clock, slept(clock))
    assert FREED_S <= clock() < FREED_S + 5


def test_another_failure_is_told_at_once() -> None:
    def opens() -> None:
        raise UsageError("no such address")

    with pytest.raises(UsageError, match="no such address"):
        opened_in_time(opens, print)
