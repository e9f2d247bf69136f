"""Waiting for a port that servers of a moment ago may still have.

Where the first server was killed, Ray takes some seconds to end the doors that it had started.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

from cleave.errors import UsageError

FREED_S: Final = 20.0
"""So long is waited for a port."""

_PAUSE_S: Final = 1.0

_Opened = TypeVar("_Opened")


class PortInUseError(UsageError):
    """Somebody else listens there."""


def opened_in_time(
    opens: Callable[[], _Opened],
    say: Callable[[str], object],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> _Opened:
    """Open what listens on a port; where that is in use, try again for some seconds.

    Args:
        opens: does so.
        say: called, once, with a sentence for the user if that takes long.
        clock: in seconds.
        sleep: waits so many seconds.

    Raises:
        UsageError: when the port is in use still.
    """
    until_s, told = clock() + FREED_S, False
    while True:
        try:
            return opens()
        except PortInUseError as error:
            if clock() >= until_s:
                raise
            if not told:
                told = True
                say(f"waiting {FREED_S:.0f} s at most for servers that may end just now: {error}")
            sleep(_PAUSE_S)
