"""Wait for a port that recently ended servers may still hold.

After the first server is killed, Ray takes some seconds to end the endpoints that it started.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

from cleave.errors import UsageError

FREED_S: Final = 20.0
"""Maximum seconds to wait for a port."""

_PAUSE_S: Final = 1.0

_Opened = TypeVar("_Opened")


class PortInUseError(UsageError):
    """The port is in use."""


def opened_in_time(
    opens: Callable[[], _Opened],
    say: Callable[[str], object],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> _Opened:
    """Open a listener; while its port is in use, retry for some seconds.

    Args:
        opens: opens the listener.
        say: called once with a sentence for the user, when the port is in use.
        clock: returns seconds.
        sleep: waits for a number of seconds.

    Raises:
        UsageError: when the port stays in use.
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
