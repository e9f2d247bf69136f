"""Regularly move devices from endpoints with many devices to endpoints with few devices."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from cleave.cluster.endpoint_calls import EndpointCalls, EndpointLostError, ask_all

ARRIVES_S: Final = 20.0
"""Time within which all devices of a move must arrive at the target endpoint.

If any device is missing after this time, the endpoint counts as unreachable for devices.
"""

SHUNNED_S: Final = 600.0  # time for which no devices are moved to an unreachable endpoint


@dataclass(frozen=True, slots=True)
class Move:
    """A move of `devices` devices between two endpoints, which are identified by index."""

    source: int
    target: int
    devices: int


@dataclass(slots=True)
class Balance:
    """Plans moves that balance the number of devices (including joining ones) per endpoint.

    `sent` maps the target of each pending move to the time of the move and the number of devices
    expected at the target after the move.
    """

    sent: dict[int, tuple[float, int]] = field(default_factory=dict)
    shunned_until_s: dict[int, float] = field(default_factory=dict)  # of unreachable endpoints

    def sent_fewer(self, move: Move, missing: int) -> None:
        """Record that `missing` devices of a move stay, because they are busy or cannot move."""
        if not missing:
            return
        sent_s, wanted = self.sent[move.target]
        self.sent[move.target] = sent_s, wanted - missing

    def forget(self, endpoint: int) -> None:
        """Discard all data about an endpoint that has been lost or restarted."""
        self.sent.pop(endpoint, None)
        self.shunned_until_s.pop(endpoint, None)

    def next(self, loads: Sequence[int | None], now_s: float) -> list[Move]:
        """Return the moves to start now; none while a previous move is pending.

        `loads` is each endpoint's number of devices, or None if the endpoint does not respond.
        """
        left = {endpoint: load for endpoint, load in enumerate(loads) if load is not None}
        for endpoint in set(range(len(loads))) - left.keys():
            self.forget(endpoint)
        for endpoint, (sent_s, wanted) in list(self.sent.items()):
            if left[endpoint] >= wanted:
                del self.sent[endpoint]
            elif now_s - sent_s >= ARRIVES_S:
                del self.sent[endpoint]
                self.shunned_until_s[endpoint] = now_s + SHUNNED_S
        if self.sent:
            return []
        endpoints = [n for n in left if self.shunned_until_s.get(n, now_s) <= now_s]
        # An unreachable endpoint may still send devices to other endpoints.
        found: dict[tuple[int, int], int] = {}
        while endpoints:
            source, target = max(left, key=lambda n: left[n]), min(endpoints, key=lambda n: left[n])
            if left[source] - left[target] <= 1:
                break
            left[source] -= 1
            left[target] += 1
            found[source, target] = found.get((source, target), 0) + 1
        for _, target in found:
            self.sent[target] = now_s, left[target]
        return [Move(source, target, count) for (source, target), count in found.items()]


_logger = logging.getLogger(__name__)

LOOK_S: Final = 5.0  # seconds between two checks of the number of devices at each endpoint

_ANSWERS_S: Final = 5.0
"""Timeout in seconds for calls to endpoints. A silent endpoint is skipped until the next check."""

Knowing = Callable[[], Sequence[float | None]]
"""Function that returns, for each endpoint, how recent the endpoint's list of admitted devices is.

The value is a time on the first server's clock. The endpoint knows all devices that were admitted
before that time. None means that the endpoint is lost, was restarted, or has an old list. In this
state, no devices are moved to the endpoint, and pending moves to it are discarded.
"""


class Spreading:
    """A thread that regularly balances the number of devices per endpoint."""

    def __init__(self, endpoints: Sequence[EndpointCalls], knowing: Knowing) -> None:
        self._endpoints, self._knowing = endpoints, knowing
        self._balance = Balance()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._spread_often, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop moving devices and wait until the thread has ended."""
        self._closed.set()
        self._thread.join()

    def _spread_often(self) -> None:
        while not self._closed.wait(LOOK_S):
            try:
                spread(self._endpoints, self._balance, self._knowing(), time.monotonic())
            except Exception as error:  # noqa: BLE001 - the next check may succeed
                _logger.error("devices could not be balanced: %s: %s", type(error).__name__, error)


def everybody(endpoints: int) -> Knowing:
    """Return a `Knowing` function for endpoints that admit all devices by a shared credential."""
    return lambda: [math.inf] * endpoints


def spread(
    endpoints: Sequence[EndpointCalls],
    balance: Balance,
    known_before_s: Sequence[float | None],
    now_s: float,
) -> None:
    """Move idle devices from endpoints with many devices to endpoints with few devices.

    `known_before_s` is, for each endpoint, the time up to which its list of admitted devices is
    complete (see `Knowing`). The first endpoint must be that of the first server.
    """
    answers = ask_all(endpoints, "load", timeout_s=_ANSWERS_S)
    pairs = zip(answers, known_before_s, strict=True)
    loads = [load if known_s is not None else None for load, known_s in pairs]
    for move in balance.next(loads, now_s):
        known_s = known_before_s[move.target]
        # Only devices at the first endpoint may be unknown to the target: devices at any other
        # endpoint were moved there from the first endpoint.
        before_s = known_s if not move.source and known_s is not None else math.inf
        sent = 0
        try:
            address = endpoints[move.target].call("address", timeout_s=_ANSWERS_S)
            wanted = move.devices, address, before_s
            sent = endpoints[move.source].call("send", *wanted, timeout_s=_ANSWERS_S)
        except EndpointLostError as lost:
            _logger.debug("%s", lost)  # an endpoint is lost; the next check retries
        balance.sent_fewer(move, move.devices - sent)
