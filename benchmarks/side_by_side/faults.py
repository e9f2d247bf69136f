"""Stops or kills a device in the middle of a step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Final

from benchmarks.side_by_side.setting import Fault

AFTER_STEP: Final = 2
"""Number of the step (from 1) before the fault, which comes in the middle of the next step."""

STOPPED_S: Final = 60.0
_MIDDLE: Final = 0.5  # of a step

Later = Callable[[float, Callable[[], None]], None]
"""A function that calls another after some seconds."""


def by_timer(seconds: float, act: Callable[[], None]) -> None:
    """Call a function after some seconds, in a daemon thread."""
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()


class Disturber:
    """Sends a fault's signals.

    Args:
        fault: the fault.
        send: function that sends a signal to the device.
        later: function that calls another after some seconds.
    """

    def __init__(
        self, fault: Fault, send: Callable[[signal.Signals], None], later: Later = by_timer
    ) -> None:
        self._fault = fault
        self._send = send
        self._later = later

    def step_ended(self, step: int, seconds: float) -> bool:
        """Record the end of a step and its seconds; return whether the fault comes next."""
        if self._fault is Fault.NONE or step != AFTER_STEP:
            return False
        act = self._stop if self._fault is Fault.STOP else self._kill
        self._later(_MIDDLE * seconds, act)
        return True

    def _stop(self) -> None:
        self._send(signal.SIGSTOP)
        self._later(STOPPED_S, lambda: self._send(signal.SIGCONT))

    def _kill(self) -> None:
        self._send(signal.SIGKILL)
