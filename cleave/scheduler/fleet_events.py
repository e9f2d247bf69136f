"""Events that are reported to observers of the fleet."""

from __future__ import annotations

from enum import Enum
from typing import Protocol

from cleave.scheduler.sessions.session import Session


class EventKind(Enum):
    """The kind of a fleet event. The user interface shows the enum values."""

    JOIN = "join"
    LEAVE = "leave"
    # a device was disconnected or refused because it returned wrong results
    QUARANTINE = "quarantine"

    OVERDUE = "overdue"  # a device became overdue, or an overdue device answered

    ASIDE = "aside"  # a device was set aside, or passed a trial and gets tasks again

    REISSUE = "reissue"  # tasks were reassigned to other devices, or duplicated on other devices

    WRONG = "wrong"
    JOB = "job"
    # the last device that can multiply matrices left, or such a device joined again
    PAUSE = "pause"


class EventListener(Protocol):
    """A callback that the server's event loop calls for each fleet event."""

    def __call__(self, kind: EventKind, session: Session | None, text: str) -> None:
        """Handle an event.

        Args:
            session: the session that the event concerns, in its state at that time; None without
                one.
            text: a description for people.
        """
        ...
