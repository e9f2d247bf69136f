"""Events of a fleet, for those who watch it; nothing in the fleet depends on them."""

from __future__ import annotations

from enum import Enum
from typing import Protocol

from cleave.scheduler.sessions.session import Session


class EventKind(Enum):
    """Kinds of events; users read the values."""

    JOIN = "join"
    LEAVE = "leave"
    QUARANTINE = "quarantine"
    """A device was disconnected or refused because of wrong results."""

    OVERDUE = "overdue"
    """A device did not answer in time, or answers again."""

    ASIDE = "aside"
    """A device fails everything and gets no tasks for now, or it passed a trial and gets tasks
    again."""

    REISSUE = "reissue"
    """Tasks were given to other devices, instead of the first one or in addition to it."""

    WRONG = "wrong"
    JOB = "job"
    PAUSE = "pause"
    """Training has no device that can multiply, or has one again."""


class EventListener(Protocol):
    """Called in the server's loop as soon as something happens."""

    def __call__(self, kind: EventKind, session: Session | None, text: str) -> None:
        """Take note of an event.

        Args:
            kind: what happened.
            session: the session that it concerns, as it was then; None where it concerns no
                session.
            text: a description for people.
        """
        ...
