"""Limit on the bytes that a machine may send and receive per hour, day or month."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from cleave.errors import UsageError
from cleave.files import write_atomically

if TYPE_CHECKING:
    from cleave.device.session import DeviceStatus

_LEAST_S: Final = 0.2
_FIRST_S: Final = 2.0
_MOST_S: Final = 5.0
_UNITS: Final = {"MB": 1e6, "GB": 1e9, "TB": 1e12}


class Span(Enum):
    """The time span of a data cap. Hours, days and months follow the local clock."""

    HOUR = "hour"
    DAY = "day"
    MONTH = "month"
    COMMAND = ""
    """The whole runtime of the command."""

    def named(self, now: datetime) -> str:
        """Return a name for the hour, day or month that contains `now`; empty for `COMMAND`."""
        pattern = {Span.HOUR: "%Y-%m-%d %H", Span.DAY: "%Y-%m-%d", Span.MONTH: "%Y-%m"}
        return now.strftime(pattern[self]) if self in pattern else ""


@dataclass(frozen=True, slots=True)
class DataCap:
    """A limit on the sum of downlink and uplink bytes.

    Attributes:
        nbytes: maximum number of bytes in one span.
        span: time span after which the count restarts.
    """

    nbytes: int
    span: Span

    def __str__(self) -> str:
        unit = next((u for u in ("TB", "GB") if self.nbytes >= _UNITS[u]), "MB")
        per = f"/{self.span.value}" if self.span is not Span.COMMAND else ""
        return f"{self.nbytes / _UNITS[unit]:g}{unit}{per}"


def parse_data_cap(text: str) -> DataCap:
    """Parse a limit such as `500MB/hour`, `5GB/day` or `50GB/month`; `5GB` spans the whole command.

    Raises:
        UsageError: when the text is not a valid limit, or is under 1 MB.
    """
    match = re.fullmatch(
        r"(\d+(?:\.\d+)?)\s*(MB|GB|TB)(?:/(hour|day|month))?", text.strip(), re.IGNORECASE
    )
    nbytes = float(match[1]) * _UNITS[match[2].upper()] if match else 0.0
    if match is None or nbytes < 1e6:
        raise UsageError(
            f"--max-data {text!r} is no limit; write it like 500MB/hour, 5GB/day or 50GB/month, or "
            f"5GB for as long as this command runs"
        )
    return DataCap(math.floor(nbytes), Span((match[3] or "").lower()))


class CountingSession(Protocol):
    """A session that counts the bytes it transfers, such as `DeviceSession`."""

    @property
    def status(self) -> DeviceStatus: ...


class DataMeter:
    """Counts the bytes that all `cleave join` processes of this machine transfer in a span.

    An unreadable file counts as empty. Failed writes are ignored. Until a write succeeds, only the
    bytes of this process are added to the count.

    Args:
        cap: the limit.
        path: file that stores the count between runs; unused for `Span.COMMAND`.
        now: returns the local time.
        clock: returns monotonic time in seconds.
    """

    def __init__(
        self,
        cap: DataCap,
        path: Path,
        now: Callable[[], datetime] = datetime.now,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cap, self._path, self._now, self._clock = cap, path, now, clock
        self._span = cap.span.named(now())
        self._used = 0 if cap.span is Span.COMMAND else self._load()
        self._session: CountingSession | None = None
        self._counted = 0
        self._rate = 0.0  # highest rate in this session, in bytes per second
        self._looked_s = clock()

    def follow(self, session: CountingSession) -> None:
        """Start counting the bytes of a new session, after a last count of the previous session."""
        self.used()
        self._session, self._counted, self._rate = session, 0, 0.0

    def used(self) -> int:
        """Update the count and return the bytes transferred in the current span."""
        now_s = self._clock()
        more = self._more()
        self._rate = max(self._rate, more / max(now_s - self._looked_s, _LEAST_S))
        self._looked_s = now_s
        span = self._cap.span.named(self._now())
        if span != self._span:
            self._span, self._used = span, 0
        self._used += more
        if more and self._cap.span is not Span.COMMAND:
            self._save(more)
        return self._used

    def until_s(self) -> float:
        """Return the time, on `clock`, of the next check, before this rate can reach the cap."""
        left = max(0, self._cap.nbytes - self._used)
        reached_s = left / self._rate if self._rate else _FIRST_S
        return self._clock() + min(_MOST_S, max(_LEAST_S, reached_s / 2))

    def _more(self) -> int:
        if self._session is None:
            return 0
        done = self._session.status.done
        before, self._counted = self._counted, done.downlink_bytes + done.uplink_bytes
        return self._counted - before

    def _load(self) -> int:
        return self._held().get(self._span, 0)

    def _held(self) -> dict[str, int]:
        """Read the file: a map from the name of a span to the bytes counted in that span."""
        try:
            held = json.loads(self._path.read_text())
            if "span" in held:  # the old format, with a single span
                held = {held["span"]: held["bytes"]}
            return {str(span): int(count) for span, count in held.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def _save(self, more: int) -> None:
        """Add bytes to the current hour, day and month in the file.

        All devices of this machine share the file. The write is atomic.
        """
        held, now = self._held(), self._now()
        spans = (span.named(now) for span in Span if span is not Span.COMMAND)
        counts = {span: held.get(span, 0) + more for span in spans}
        self._used = counts[self._span] = max(self._used, counts[self._span])
        try:
            write_atomically(self._path, json.dumps(counts).encode(), 0o600, sync=False)
        except OSError:
            return
