"""What emulated devices do, as records for traces, logs and tests."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from cleave.protocol.messages import Message


class Direction(Enum):
    """The direction of a message."""

    DOWN = "down"
    UP = "up"


@dataclass(frozen=True, slots=True)
class Transfer:
    """One message on an emulated link.

    Attributes:
        at_s: when the message was given to the link.
        device: the device whose link it is.
        begin_s, end_s: when its first byte left, and its last.
        arrives_s: when it arrives.
    """

    at_s: float
    device: int
    direction: Direction
    message: Message
    nbytes: int
    begin_s: float
    end_s: float
    arrives_s: float


@dataclass(frozen=True, slots=True)
class Multiplication:
    """One run on an emulated device."""

    device: int
    run: int
    rows: int
    columns: int
    flops: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Presence:
    """A device's arrival or departure."""

    at_s: float
    device: int
    name: str
    here: bool


Activity: TypeAlias = Transfer | Multiplication | Presence
