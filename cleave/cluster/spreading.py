"""Regularly move devices from endpoints with many devices to endpoints with few devices."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from cleave.cluster.balance import Balance
from cleave.cluster.endpoint_calls import EndpointCalls, EndpointLostError, ask_all

_logger = logging.getLogger(__name__)

LOOK_S: Final = 5.0
"""Seconds between two checks of the number of devices at each endpoint."""

_ANSWERS_S: Final = 5.0
"""Timeout in seconds for calls to endpoints. A silent endpoint is skipped until the next check."""

Knowing = Callable[[], Sequence[float | None]]
"""Returns, for each endpoint, how recent the endpoint's list of admitted devices is.

The value is a time on the first server's clock: the endpoint knows all devices that were admitted
before it. None means that the endpoint is lost or was restarted. Then no devices are moved to the
endpoint, and pending moves to it are forgotten.
"""


class Spreading:
    """Balances the number of devices per endpoint in a thread, until `close` is called.

    Args:
        endpoints: endpoints of all servers. The first entry belongs to the first server.
        knowing: returns how recent each endpoint's list of admitted devices is.
    """

    def __init__(self, endpoints: Sequence[EndpointCalls], knowing: Knowing) -> None:
        self._endpoints, self._knowing = endpoints, knowing
        self._balance = Balance()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._spread_often, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop moving devices, and wait until the thread has ended."""
        self._closed.set()
        self._thread.join()

    def _spread_often(self) -> None:
        while not self._closed.wait(LOOK_S):
            try:
                spread(self._endpoints, self._balance, self._knowing(), time.monotonic())
            except Exception as error:  # noqa: BLE001 - the next check may succeed
                _logger.error("devices are not spread: %s: %s", type(error).__name__, error)


def everybody(endpoints: int) -> Knowing:
    """Return a `Knowing` for endpoints that admit all devices, because devices share a credential.

    Args:
        endpoints: number of endpoints.
    """
    return lambda: [math.inf] * endpoints


def spread(
    endpoints: Sequence[EndpointCalls],
    balance: Balance,
    known_before_s: Sequence[float | None],
    now_s: float,
) -> None:
    """Move idle devices from endpoints with many devices to endpoints with few devices.

    Args:
        endpoints: endpoints of all servers. The first entry belongs to the first server.
        balance: decides how many devices move between which endpoints.
        known_before_s: result of a `Knowing`.
        now_s: current time, in seconds.
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
