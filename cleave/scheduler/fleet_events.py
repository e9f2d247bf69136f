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
    """A device was set aside because all its runs failed, or a device passed a trial and gets tasks
    again."""

    REISSUE = "reissue"
    """Tasks were reassigned to other devices, or duplicated on other devices."""

    WRONG = "wrong"
    JOB = "job"
    PAUSE = "pause"
    """The last device that can multiply matrices left, or such a device joined again."""


class EventListener(Protocol):
    """A callback that the server's event loop calls for each fleet event."""

    def __call__(self, kind: EventKind, session: Session | None, text: str) -> None:
        """Handle an event.

        Args:
            kind: the kind of event.
            session: the device session that the event concerns, in its state at the time of the
                event; None if the event concerns no session.
            text: a description for people.
        """
        ...
