"""Limit of the bytes that a machine may send and receive per hour, day or month."""

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
    """The time span over which bytes are counted, by the local clock."""

    HOUR = "hour"
    DAY = "day"
    MONTH = "month"
    COMMAND = ""
    """From the start of the command to its end."""

    def named(self, now: datetime) -> str:
        """Return the name of the span that contains a time."""
        pattern = {Span.HOUR: "%Y-%m-%d %H", Span.DAY: "%Y-%m-%d", Span.MONTH: "%Y-%m"}
        return now.strftime(pattern[self]) if self in pattern else ""


@dataclass(frozen=True, slots=True)
class DataCap:
    """A limit of bytes, downlink and uplink together.

    Attributes:
        nbytes: the limit.
        span: the span to which it applies.
    """

    nbytes: int
    span: Span

    def __str__(self) -> str:
        unit = next((u for u in ("TB", "GB") if self.nbytes >= _UNITS[u]), "MB")
        per = f"/{self.span.value}" if self.span is not Span.COMMAND else ""
        return f"{self.nbytes / _UNITS[unit]:g}{unit}{per}"


def parse_data_cap(text: str) -> DataCap:
    """Parse a limit such as `500MB/hour`, `5GB/day`, `50GB/month`, or `5GB` for the whole command.

    Raises:
        UsageError: when the text is not such a limit.
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
    """A session that counts its bytes, such as `DeviceSession`."""

    @property
    def status(self) -> DeviceStatus: ...


class DataMeter:
    """Counts bytes over a span, across several runs of the command and devices of a machine.

    An unreadable file counts as empty. A failed write is ignored: until the next one succeeds, only
    this process's bytes count.

    Args:
        cap: the limit.
        path: the file that keeps the count between runs; it is not used for `Span.COMMAND`.
        now: returns the local time.
        clock: monotonic time in seconds.
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
        self._rate = 0.0  # highest bytes per second in this session
        self._looked_s = clock()

    def follow(self, session: CountingSession) -> None:
        """Count a session's bytes from now on, and the previous session's remaining ones."""
        self.used()
        self._session, self._counted, self._rate = session, 0, 0.0

    def used(self) -> int:
        """Return the bytes counted in the current span."""
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
        """Return when to check again on `clock`, before the cap can be reached at this rate."""
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
        """Return the bytes in the file, by span."""
        try:
            held = json.loads(self._path.read_text())
            if "span" in held:  # the old format, with a single span
                held = {held["span"]: held["bytes"]}
            return {str(span): int(count) for span, count in held.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def _save(self, more: int) -> None:
        """Add bytes to every current span in the file, which other devices of this machine share.

        The write is atomic.
        """
        held, now = self._held(), self._now()
        spans = (span.named(now) for span in Span if span is not Span.COMMAND)
        counts = {span: held.get(span, 0) + more for span in spans}
        self._used = counts[self._span] = max(self._used, counts[self._span])
        try:
            write_atomically(self._path, json.dumps(counts).encode(), 0o600, sync=False)
        except OSError:
            return
