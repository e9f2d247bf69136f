"""What the PS's core orders its shell to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from cleave.protocol.messages import Message
from cleave.scheduler.tasks import Unit


@dataclass(slots=True)
class Send:
    """Send this message on this session, after those sent before."""

    session: int
    message: Message


@dataclass(slots=True)
class Close:
    """End this session."""

    session: int


@dataclass(slots=True)
class Joined:
    """For information: this device may be given work from now on."""

    session: int


@dataclass(slots=True)
class Check:
    """Check this result of a device, then call `checked`."""

    session: int
    run: int
    unit: Unit
    payload: Any


@dataclass(slots=True)
class Place:
    """Put this result in its place in the output of its work, then call `placed`."""

    unit: Unit
    payload: Any


@dataclass(slots=True)
class Done:
    """This work is complete."""

    work: int


@dataclass(slots=True)
class Failure:
    """This work cannot be completed."""

    work: int
    reason: str


@dataclass(slots=True)
class Late:
    """For information: this device does not answer what it should have long ago, or does again."""

    session: int
    late: bool


@dataclass(slots=True)
class Aside:
    """For information: this device gets no work for now, and why; or it gets some again."""

    session: int
    aside: bool
    reason: str


@dataclass(slots=True)
class Note:
    """For information: something that an operator should know."""

    text: str


Order: TypeAlias = Send | Close | Joined | Late | Aside | Note | Check | Place | Done | Failure
