"""Records of what emulated devices do, for traces, logs and tests."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from cleave.device.core import Order
from cleave.machine.backends import Compute
from cleave.machine.graph_run import GraphRun
from cleave.protocol.messages import Message


class Direction(Enum):
    """Direction of a message: `DOWN` from the PS to a device, `UP` from a device to the PS."""

    DOWN = "down"
    UP = "up"


@dataclass(frozen=True, slots=True)
class Transfer:
    """Record of one message on an emulated link, with times in emulated seconds.

    Attributes:
        at_s: time when the sender queued the message on the link.
        device: number of the device at the end of the link.
        nbytes: size in bytes of the encoded message, after any compression.
        begin_s, end_s: times when the first byte and the last byte leave the sender.
        arrives_s: time when the last byte arrives at the receiver.
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
    """Record of one matrix multiplication on a device, with times in emulated seconds."""

    device: int
    run: int
    rows: int
    columns: int
    flops: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class GraphExecution:
    """Record of one graph run on a device, with times in emulated seconds."""

    device: int
    run: int
    flops: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Presence:
    """Record that a device joined (`here` is True) or left (`here` is False)."""

    at_s: float
    device: int
    name: str
    here: bool


Activity: TypeAlias = Transfer | Multiplication | GraphExecution | Presence


def execution(
    device: int, order: Order, begin_s: float, end_s: float
) -> Multiplication | GraphExecution | None:
    """Return a record of an order's execution, or None for a fetch, which computes nothing."""
    match order:
        case Compute():
            return Multiplication(
                device, order.run, order.rows, order.columns, order.flops, begin_s, end_s
            )
        case GraphRun():
            return GraphExecution(device, order.run, order.flops, begin_s, end_s)
        case _:
            return None
