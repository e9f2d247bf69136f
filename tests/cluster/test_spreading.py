"""Devices move to endpoints with few devices; a lost endpoint delays no other."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest

from cleave.cluster.endpoint_calls import EndpointLostError, ask_all
from cleave.cluster.spreading import ARRIVES_S, SHUNNED_S, Balance, Move, spread


class Fake:
    """An endpoint with so many devices, which may be lost."""

    def __init__(self, load: int, *, lost_at: str = "") -> None:
        self.load, self.lost_at = load, lost_at
        self.sent: list[tuple[int, str, float]] = []

    def call(self, name: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        if name == self.lost_at:
            raise EndpointLostError("it is lost")
        if name == "load":
            return self.load
        if name == "address":
            return "there"
        assert name == "send"
        devices, address, before_s = arguments
        self.sent.append((devices, address, before_s))
        return devices

    def tell(self, name: str, *arguments: Any) -> None:
        raise AssertionError


def test_a_endpoint_is_not_left_alone_since_the_sender_was_lost() -> None:
    endpoints, balance = [Fake(4, lost_at="send"), Fake(0)], Balance()
    spread(endpoints, balance, [math.inf] * 2, 0.0)
    endpoints[0].lost_at = ""
    spread(endpoints, balance, [math.inf] * 2, ARRIVES_S)
    assert len(endpoints[0].sent) == 1


def test_endpoints_are_asked_at_the_same_time() -> None:
    both = threading.Barrier(2, timeout=60)

    class Meets(Fake):
        def call(self, name: str, *arguments: Any, timeout_s: float | None = None) -> Any:
            both.wait()
            return super().call(name, *arguments, timeout_s=timeout_s)

    assert ask_all([Meets(1), Meets(2)], "load", timeout_s=60.0) == [1, 2]
    assert ask_all([], "load", timeout_s=1.0) == []


@pytest.mark.parametrize(
    ("endpoints", "known_s", "sender", "before_s"),
    [
        # The first sends only devices that the other knows; others send any of their devices.
        ([Fake(4), Fake(0)], [math.inf, 30.0], 0, 30.0),
        ([Fake(0), Fake(4)], [math.inf, 30.0], 1, math.inf),
        # An endpoint that is new, or was not polled lately, or is lost, gets none.
        ([Fake(4), Fake(0), Fake(0)], [math.inf, None, 30.0], 0, 30.0),
        ([Fake(4), Fake(0, lost_at="load"), Fake(0)], [math.inf] * 3, 0, math.inf),
    ],
)
def test_devices_are_sent_to_who_knows_them(
    endpoints: list[Fake], known_s: list[float | None], sender: int, before_s: float
) -> None:
    spread(endpoints, Balance(), known_s, 0.0)
    assert endpoints[sender].sent == [(2, "there", before_s)]


@pytest.mark.parametrize(
    ("loads", "moves"),
    [
        ([4, 0], [Move(0, 1, 2)]),
        ([3, 2], []),
        ([], []),
        ([9, 0, 0], [Move(0, 1, 3), Move(0, 2, 3)]),
    ],
)
def test_no_endpoint_keeps_two_more_than_another(loads: list[int], moves: list[Move]) -> None:
    assert Balance().next(loads, 0.0) == moves


def test_nothing_is_moved_while_devices_are_on_their_way() -> None:
    balance = Balance()
    assert balance.next([8, 0], 0.0)
    assert balance.next([4, 1], 5.0) == []
    assert balance.next([4, 4], 10.0) == []
    assert balance.next([9, 4], 15.0) == [Move(0, 1, 2)]


def test_an_endpoint_that_devices_do_not_reach_is_left_alone_for_a_while() -> None:
    balance = Balance()
    assert balance.next([8, 0, 4], 0.0)
    assert balance.next([8, 0, 4], ARRIVES_S) == [Move(0, 2, 2)]
    balance.sent.clear()
    assert balance.next([6, 0, 6], ARRIVES_S + 1) == []
    assert balance.next([6, 0, 6], ARRIVES_S + SHUNNED_S)


def test_an_endpoint_that_does_not_answer_is_expected_nothing_of() -> None:
    balance = Balance()
    assert balance.next([8, 0], 0.0)
    assert balance.next([8, None], 5.0) == []
    assert balance.next([8, 0], ARRIVES_S) == [Move(0, 1, 4)]
    assert balance.next([None, None], ARRIVES_S) == []


def test_an_endpoint_is_not_left_alone_since_no_device_could_be_sent_there() -> None:
    balance = Balance()
    (move,) = balance.next([8, 0], 0.0)
    balance.sent_fewer(move, 3)
    assert balance.next([8, 0], 5.0) == []  # one is on its way
    assert balance.next([7, 1], 10.0) == [Move(0, 1, 3)]
    balance.sent_fewer(Move(0, 1, 3), 3)
    assert balance.next([7, 1], 15.0) == [Move(0, 1, 3)]  # none was sent, and nobody is waited for
