"""Sending devices from doors with many to doors with few, now and then."""

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
"""Seconds between two looks at which door has too many devices."""

_ANSWERS_S: Final = 5.0
"""A door that does not answer so long gets no devices now."""

Knowing = Callable[[], Sequence[float | None]]
"""Returns of each door until when it knows the devices that the first door let in, on the clock of
that one. None is for a door that is lost, or is new: nobody is sent there, or is on the way."""


class Spreading:
    """Sends them in a thread of its own, until it is closed.

    Args:
        doors: of all servers, that of the first one first.
        knowing: whom each knows.
    """

    def __init__(self, doors: Sequence[DoorCalls], knowing: Knowing) -> None:
        self._doors, self._knowing = doors, knowing
        self._balance = Balance()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._spread_often, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send nobody any more."""
        self._closed.set()
        self._thread.join()

    def _spread_often(self) -> None:
        while not self._closed.wait(LOOK_S):
            try:
                spread(self._doors, self._balance, self._knowing(), time.monotonic())
            except Exception as error:  # noqa: BLE001 - the next time may succeed
                _logger.error("devices are not spread: %s: %s", type(error).__name__, error)


def everybody(doors: int) -> Knowing:
    """Say that each door knows everybody: all let in whoever shows one credential."""
    return lambda: [math.inf] * doors


def spread(
    doors: Sequence[DoorCalls],
    balance: Balance,
    known_before_s: Sequence[float | None],
    now_s: float,
) -> None:
    """Send devices that do nothing from doors with many to doors with few.

    Args:
        doors: of all servers, that of the first one first.
        balance: decides.
        known_before_s: see `Knowing`.
        now_s: the time.
    """
    answers = ask_all(doors, "load", timeout_s=_ANSWERS_S)
    pairs = zip(answers, known_before_s, strict=True)
    loads = [load if known_s is not None else None for load, known_s in pairs]
    for move in balance.next(loads, now_s):
        known_s = known_before_s[move.target]
        # The others heard of their devices from the first one, and so have all by now.
        before_s = known_s if not move.source and known_s is not None else math.inf
        sent = 0
        try:
            address = doors[move.target].call("address", timeout_s=_ANSWERS_S)
            wanted = move.devices, address, before_s
            sent = doors[move.source].call("send", *wanted, timeout_s=_ANSWERS_S)
        except DoorLostError as lost:
            _logger.debug("%s", lost)  # it is lost just now: the next time, then
        balance.sent_fewer(move, move.devices - sent)
