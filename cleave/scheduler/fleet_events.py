"""What happens to a fleet, for those who watch it; nothing in the fleet depends on them."""

from __future__ import annotations

from enum import Enum
from typing import Protocol

from cleave.scheduler.session import Session


class EventKind(Enum):
    """The values are what users read."""

    JOIN = "join"
    LEAVE = "leave"
    QUARANTINE = "quarantine"
    """It left, or was turned away, because of wrong results."""

    OVERDUE = "overdue"
    """It does not answer what it should have long ago, or does again."""

    ASIDE = "aside"
    """It fails all that it is asked and gets no work for now, or passed a trial."""

    REISSUE = "reissue"
    """Tasks were given to other devices, or to others as well."""

    WRONG = "wrong"
    JOB = "job"
    PAUSE = "pause"
    """Training has no device to multiply, or has one again."""


class EventListener(Protocol):
    """Is told, in the server's loop, at once."""

    def __call__(self, kind: EventKind, session: Session | None, text: str) -> None:
        """Something happened.

        Args:
            kind: what.
            session: to whom, as it was then; None where it is nobody's.
            text: for people.
        """
        ...
