"""Fleet events for observers. Nothing in the fleet depends on them."""

from __future__ import annotations

from enum import Enum
from typing import Protocol

from cleave.scheduler.sessions.session import Session


class EventKind(Enum):
    """Kinds of events. Users see the values."""

    JOIN = "join"
    LEAVE = "leave"
    QUARANTINE = "quarantine"
    """A device was disconnected or refused because its results were wrong."""

    OVERDUE = "overdue"
    """A device is overdue, or an overdue device has answered."""

    ASIDE = "aside"
    """A device was set aside because all its tasks fail, or it passed a trial and is back."""

    REISSUE = "reissue"
    """Tasks were given to other devices, in place of or in addition to the first device."""

    WRONG = "wrong"
    JOB = "job"
    PAUSE = "pause"
    """Training has no device that can multiply matrices, or has one again."""


class EventListener(Protocol):
    """A callback that the server's event loop calls as soon as an event happens."""

    def __call__(self, kind: EventKind, session: Session | None, text: str) -> None:
        """Handle an event.

        Args:
            kind: the kind of event.
            session: the session concerned, as it was at the event; None if the event concerns no
                session.
            text: a description for people.
        """
        ...
