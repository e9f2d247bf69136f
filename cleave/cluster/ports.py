"""Wait for a port that the endpoints of a previous run may still use.

After the first server is killed, Ray needs some seconds to stop the endpoints of that server.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

from cleave.errors import UsageError

FREED_S: Final = 20.0
"""Maximum time to wait until a port is free, in seconds."""

_PAUSE_S: Final = 1.0

_Opened = TypeVar("_Opened")


class PortInUseError(UsageError):
    """The port to listen on is in use."""


def opened_in_time(
    opens: Callable[[], _Opened],
    say: Callable[[str], object],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> _Opened:
    """Open a listener. While its port is in use, retry for up to `FREED_S` seconds.

    Args:
        opens: opens the listener, or raises PortInUseError.
        say: called once with a message for the user if the port is in use.
        clock: returns the current time in seconds.
        sleep: sleeps for the given number of seconds.

    Returns:
        The result of `opens`.

    Raises:
        PortInUseError: when the port is still in use after `FREED_S` seconds.
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
