"""The log of refused connections: a few lines, however many are refused."""

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
"""So many refusals are told one by one, ..."""

WINDOW_S: Final = 10.0
"""... in this time; the others are counted, and the count is told when it is over."""


class RejectionLog:
    """The log of refused connections. Of what strangers sent, a line contains numbers at most.

    Args:
        now: returns the time of day.
        call_later: calls a function after so many seconds, as an event loop's method does.
        lines: how many refusals are written one by one in `WINDOW_S` seconds.
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
        """Note that a connection from an address was refused.

        Args:
            address: the address that it came from.
            reason: one of the server's own sentences. For a device that was admitted before, it may
                follow the device's name and quote what it did wrong. Reasons that differ in numbers
                only are counted together.
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
        """Write what was only counted, and begin a new period."""
        self._open = False
        if self._untold:
            reasons = "; ".join(f"{n:,} times: {what}" for what, n in self._untold.most_common(5))
            total = sum(self._untold.values())
            self._untold.clear()
            self._write(f"{total:,} more ({reasons})")

    def _write(self, what: str) -> None:
        _logger.warning("%s refused %s", f"{self._now():%Y-%m-%d %H:%M:%S}", what)


@lru_cache(maxsize=64)  # most reasons of a flood are the same
def _without_numbers(reason: str) -> str:
    return re.sub(r"\d+", "…", reason)
