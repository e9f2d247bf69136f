"""Activities of emulated devices, as records for traces, logs and tests."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from cleave.device.core import Order
from cleave.machine.graph_run import GraphRun
from cleave.machine.multiplication import Compute
from cleave.protocol.messages import Message


class Direction(Enum):
    """Direction of a message."""

    DOWN = "down"
    UP = "up"


@dataclass(frozen=True, slots=True)
class Transfer:
    """One message on an emulated link.

    Attributes:
        at_s: when the message was queued on the link.
        device: number of the device that has the link.
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
    """One matrix product on an emulated device."""

    device: int
    run: int
    rows: int
    columns: int
    flops: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class GraphExecution:
    """One run of a graph on an emulated device."""

    device: int
    run: int
    flops: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Presence:
    """Arrival or departure of a device."""

    at_s: float
    device: int
    name: str
    here: bool


Activity: TypeAlias = Transfer | Multiplication | GraphExecution | Presence


def execution(
    device: int, order: Order, begin_s: float, end_s: float
) -> Multiplication | GraphExecution | None:
    """Return the record of an order's execution; None for an order that computes nothing."""
    match order:
        case Compute():
            return Multiplication(
                device, order.run, order.rows, order.columns, order.flops, begin_s, end_s
            )
        case GraphRun():
            return GraphExecution(device, order.run, order.flops, begin_s, end_s)
        case _:
            return None
