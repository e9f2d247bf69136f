"""Log refused connections in few lines, regardless of the number of refusals."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any, Final

_logger = logging.getLogger(__name__)

LINES: Final = 10
"""Maximum number of refusals that get their own log line within `WINDOW_S` seconds."""

WINDOW_S: Final = 10.0
"""Length of a log window in seconds.

Refusals beyond the first `LINES` in a window are only counted. The log summarizes them at the end
of the window.
"""


class RejectionLog:
    """Logs refused connections. Text from unknown clients never appears in the log, except numbers.

    Args:
        now: returns the current date and time.
        call_later: calls a function after a delay in seconds, like `loop.call_later`.
        lines: maximum number of refusals that get their own log line within `WINDOW_S` seconds.
    """

    def __init__(
        self,
        now: Callable[[], datetime],
        call_later: Callable[[float, Callable[[], None]], Any],
        lines: int = LINES,
    ) -> None:
        self._now = now
        self._call_later = call_later
        self._lines = lines
        self._left = 0
        self._open = False
        self._untold: Counter[str] = Counter()

    def refused(self, address: str, reason: str) -> None:
        """Log a refused connection, or count it if the window has no log lines left.

        Args:
            address: IP address of the client.
            reason: why the connection was refused, in the server's own words. For a device that
                was admitted before, `reason` may contain the device's name and error message.
                Reasons that differ only in numbers are counted together.
        """
        if not self._open:
            self._open, self._left = True, self._lines
            self._call_later(WINDOW_S, self.flush)
        if self._left:
            self._left -= 1
            self._write(f"{address}: {reason}")
        else:
            self._untold[_without_numbers(reason.replace(address, "there"))] += 1

    def flush(self) -> None:
        """Log a summary of the counted refusals and end the current window."""
        self._open = False
        if self._untold:
            reasons = "; ".join(f"{n:,} times: {what}" for what, n in self._untold.most_common(5))
            total = sum(self._untold.values())
            self._untold.clear()
            self._write(f"{total:,} more ({reasons})")

    def _write(self, what: str) -> None:
        _logger.warning("%s refused %s", f"{self._now():%Y-%m-%d %H:%M:%S}", what)


@lru_cache(maxsize=64)  # in a flood of refusals, most reasons are equal
def _without_numbers(reason: str) -> str:
    return re.sub(r"\d+", "…", reason)
