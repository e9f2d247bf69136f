"""Events that are reported to observers of the fleet.

The fleet works the same without observers.
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol

from cleave.scheduler.sessions.session import Session


class EventKind(Enum):
    """The kind of a fleet event. The user interface shows the enum values."""

    JOIN = "join"
    LEAVE = "leave"
    QUARANTINE = "quarantine"
    """A device was disconnected or refused because it returned wrong results."""

    OVERDUE = "overdue"
    """A device became overdue, or an overdue device answered."""

    ASIDE = "aside"
    """A device was set aside because all its tasks fail, or it passed a trial and gets tasks
    again."""

    REISSUE = "reissue"
    """Tasks were given to other devices. The first device may keep its copies of the tasks."""

    WRONG = "wrong"
    JOB = "job"
    PAUSE = "pause"
    """The last device that can multiply matrices left, or such a device joined again."""


class EventListener(Protocol):
    """A callback for fleet events. The server's event loop calls it when an event happens."""

    def __call__(self, kind: EventKind, session: Session | None, text: str) -> None:
        """Handle an event.

        Args:
            kind: the kind of event.
            session: the device session that the event is about, in its state at that time; None for
                an event about no session.
            text: a description for people.
        """
        ...
