"""The last events of a server, in order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from cleave.scheduler.fleet_events import EventKind
from cleave.scheduler.sessions.admission import clean_text

KEPT: Final = 2000
"""Events that are remembered; older ones are forgotten."""

MAX_TEXT: Final = 200
"""Characters of an event's text."""


class Event(NamedTuple):
    """One event.

    Attributes:
        id: the event's number, counted from 1.
        time_s: when it happened, Unix time in seconds.
        device: the id of the session that it is about; 0 for none.
        text: a description for people.
    """

    id: int
    time_s: float
    kind: EventKind
    device: int
    text: str


class EventLog:
    """The last events. Any thread may call its methods.

    Args:
        clock: returns Unix time, in seconds.
        kept: how many events are remembered.
    """

    def __init__(self, clock: Callable[[], float], kept: int = KEPT) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._events: deque[Event] = deque(maxlen=kept)
        self._last = 0

    def add(self, kind: EventKind, device: int, text: str) -> None:
        """Add an event that happened now."""
        with self._lock:
            self._last += 1
            event = Event(self._last, self._clock(), kind, device, clean_text(text, MAX_TEXT))
            self._events.append(event)

    def after(self, id: int, most: int) -> tuple[list[Event], int]:
        """Return the events whose id is above this one, and the id of the latest event.

        At most `most` events are returned, the latest ones, oldest first. The second value is 0
        before the first event.
        """
        with self._lock:
            wanted = min(most, max(0, self._last - id), len(self._events))
            return list(self._events)[len(self._events) - wanted :], self._last
