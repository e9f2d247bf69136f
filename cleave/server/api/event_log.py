"""A log of a server's latest events."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from cleave.scheduler.sessions.admission import clean_text
from cleave.scheduler.sessions.session import EventKind

KEPT: Final = 2000  # number of latest events that the log keeps
MAX_TEXT: Final = 200  # maximum length of an event's text, in characters


class Event(NamedTuple):
    """An event on a server, such as the arrival of a device."""

    id: int  # counted from 1
    time_s: float  # Unix time
    kind: EventKind
    device: int  # session number; 0 if no device is concerned
    text: str  # for users


class EventLog:
    """A thread-safe log of a server's latest events. `clock` returns Unix time, in seconds."""

    def __init__(self, clock: Callable[[], float], kept: int = KEPT) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._events: deque[Event] = deque(maxlen=kept)
        self._last = 0

    def add(self, kind: EventKind, device: int, text: str) -> None:
        """Add an event with the current time. `device` is a session number; 0 for no device."""
        with self._lock:
            self._last += 1
            event = Event(self._last, self._clock(), kind, device, clean_text(text, MAX_TEXT))
            self._events.append(event)

    def after(self, id: int, most: int) -> tuple[list[Event], int]:
        """Return up to `most` of the latest events after event `id`, and the last event's id.

        The events are sorted from oldest to latest.
        """
        with self._lock:
            wanted = min(most, max(0, self._last - id), len(self._events))
            return list(self._events)[len(self._events) - wanted :], self._last
