"""Events that are reported to observers of the fleet."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TypeAlias

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
    # training started to wait for devices, disk space or other servers, or training resumed
    PAUSE = "pause"


# Called on the event loop for each event. Arguments: kind of event, session (None if the event does
# not concern a session), and description for users.
EventListener: TypeAlias = Callable[[EventKind, Session | None, str], None]
