"""Devices move to endpoints with few devices; a lost endpoint delays no other."""

from __future__ import annotations

import math
import threading
from typing import Any

from cleave.cluster.endpoint_calls import EndpointLostError, ask_all
from cleave.cluster.spreading import ARRIVES_S, Balance, spread


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


def test_the_first_sends_only_devices_that_the_other_knows() -> None:
    endpoints = [Fake(4), Fake(0)]
    spread(endpoints, Balance(), [math.inf, 30.0], 0.0)
    assert endpoints[0].sent == [(2, "there", 30.0)]


def test_others_send_any_of_their_devices() -> None:
    endpoints = [Fake(0), Fake(4)]
    spread(endpoints, Balance(), [math.inf, 30.0], 0.0)
    assert endpoints[1].sent == [(2, "there", math.inf)]


def test_nobody_is_sent_to_a_endpoint_that_is_new_or_was_not_looked_at_lately() -> None:
    endpoints = [Fake(4), Fake(0), Fake(0)]
    spread(endpoints, Balance(), [math.inf, None, 30.0], 0.0)
    assert endpoints[0].sent == [(2, "there", 30.0)]


def test_a_endpoint_that_is_lost_delays_no_other() -> None:
    endpoints = [Fake(4), Fake(0, lost_at="load"), Fake(0)]
    spread(endpoints, Balance(), [math.inf] * 3, 0.0)
    assert endpoints[0].sent == [(2, "there", math.inf)]


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
