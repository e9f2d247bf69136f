"""The latest events of a server, in order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from cleave.scheduler.fleet_events import EventKind
from cleave.scheduler.sessions.admission import clean_text

KEPT: Final = 2000
"""Number of events remembered."""

MAX_TEXT: Final = 200
"""Maximum characters of an event's text."""


class Event(NamedTuple):
    """An event.

    Attributes:
        id: number of the event, counted from 1.
        time_s: Unix time in seconds.
        device: session id of the device concerned; 0 for none.
        text: description for people.
    """

    id: int
    time_s: float
    kind: EventKind
    device: int
    text: str


class EventLog:
    """The latest events. Thread-safe.

    Args:
        clock: returns Unix time, in seconds.
        kept: number of events remembered.
    """

    def __init__(self, clock: Callable[[], float], kept: int = KEPT) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._events: deque[Event] = deque(maxlen=kept)
        self._last = 0

    def add(self, kind: EventKind, device: int, text: str) -> None:
        """Add an event that happens now."""
        with self._lock:
            self._last += 1
            event = Event(self._last, self._clock(), kind, device, clean_text(text, MAX_TEXT))
            self._events.append(event)

    def after(self, id: int, most: int) -> tuple[list[Event], int]:
        """Return up to `most` of the latest events with a greater id, and the latest event's id.

        Events are in order, oldest first. The second value is 0 before the first event.
        """
        with self._lock:
            wanted = min(most, max(0, self._last - id), len(self._events))
            return list(self._events)[len(self._events) - wanted :], self._last
