"""Move devices regularly from endpoints with many to endpoints with few."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from cleave.cluster.balance import Balance
from cleave.cluster.door_calls import DoorCalls, DoorLostError, ask_all

_logger = logging.getLogger(__name__)

LOOK_S: Final = 5.0
"""Seconds between checks of the number of devices at each endpoint."""

_ANSWERS_S: Final = 5.0
"""Seconds after which a silent endpoint gets no devices in this round."""

Knowing = Callable[[], Sequence[float | None]]
"""Returns, for each endpoint, the first server's time up to which it knows the admitted devices.

None means that the endpoint is lost or new: no devices are sent to it or in transit to it.
"""


class Spreading:
    """Spreads devices in its own thread, until it is closed.

    Args:
        doors: endpoints of all servers, the first server's first.
        knowing: devices known to each endpoint.
    """

    def __init__(self, doors: Sequence[DoorCalls], knowing: Knowing) -> None:
        self._doors, self._knowing = doors, knowing
        self._balance = Balance()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._spread_often, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop moving devices."""
        self._closed.set()
        self._thread.join()

    def _spread_often(self) -> None:
        while not self._closed.wait(LOOK_S):
            try:
                spread(self._doors, self._balance, self._knowing(), time.monotonic())
            except Exception as error:  # noqa: BLE001 - the next time may succeed
                _logger.error("devices are not spread: %s: %s", type(error).__name__, error)


def everybody(doors: int) -> Knowing:
    """Return a `Knowing` by which each endpoint admits every device: all share one credential."""
    return lambda: [math.inf] * doors


def spread(
    doors: Sequence[DoorCalls],
    balance: Balance,
    known_before_s: Sequence[float | None],
    now_s: float,
) -> None:
    """Move idle devices from endpoints with many to endpoints with few.

    Args:
        doors: endpoints of all servers, the first server's first.
        balance: decides the moves.
        known_before_s: see `Knowing`.
        now_s: current time, in seconds.
    """
    answers = ask_all(doors, "load", timeout_s=_ANSWERS_S)
    pairs = zip(answers, known_before_s, strict=True)
    loads = [load if known_s is not None else None for load, known_s in pairs]
    for move in balance.next(loads, now_s):
        known_s = known_before_s[move.target]
        # Devices at other endpoints came from the first one, so all endpoints know them.
        before_s = known_s if not move.source and known_s is not None else math.inf
        sent = 0
        try:
            address = doors[move.target].call("address", timeout_s=_ANSWERS_S)
            wanted = move.devices, address, before_s
            sent = doors[move.source].call("send", *wanted, timeout_s=_ANSWERS_S)
        except DoorLostError as lost:
            _logger.debug("%s", lost)  # the endpoint is lost; retry next time
        balance.sent_fewer(move, move.devices - sent)
