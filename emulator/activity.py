"""Records of the activities of emulated devices, for tests, traces and event logs.

A viewer (ui.perfetto.dev or chrome://tracing) shows three rows of a trace per device: receive,
compute, send.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeAlias

from cleave.device.core import Order
from cleave.errors import UsageError
from cleave.files import write_output
from cleave.machine.backends import Compute
from cleave.machine.graph_run import GraphRun
from cleave.protocol import messages
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
    """Return a record of a task's execution, or None for a fetch, which computes nothing."""
    match order:
        case Compute():
            return Multiplication(
                device, order.run, order.rows, order.columns, order.flops, begin_s, end_s
            )
        case GraphRun():
            return GraphExecution(device, order.run, order.flops, begin_s, end_s)
        case _:
            return None


_ROWS = {"receive": 1, "compute": 2, "send": 3}


class TraceWriter:
    """Collects the first `limit` activities for a Trace Event Format file, and counts the rest."""

    def __init__(self, limit: int = 2_000_000) -> None:
        self.left_out = 0
        self._limit = limit
        self._events: list[dict[str, Any]] = []
        self._names: dict[int, str] = {}

    def __call__(self, activity: Activity) -> None:
        """Add one activity to the trace. If the trace is full, increment `left_out` instead."""
        arguments: dict[str, Any] = {}
        match activity:
            case Transfer(begin_s=begin_s, end_s=end_s):
                row = "receive" if activity.direction is Direction.DOWN else "send"
                label = _label(activity.message)
                arguments = {"bytes": activity.nbytes, "queued_s": begin_s - activity.at_s}
            case Multiplication(begin_s=begin_s, end_s=end_s):
                row, label = "compute", f"{activity.rows}x{activity.columns}"
                arguments = {"run": activity.run, "flops": activity.flops}
            case GraphExecution(begin_s=begin_s, end_s=end_s):
                row, label = "compute", "graph"
                arguments = {"run": activity.run, "flops": activity.flops}
            case Presence(at_s=begin_s):
                self._names.setdefault(activity.device, activity.name)
                row, label, end_s = "receive", "joins" if activity.here else "leaves", begin_s
        if len(self._events) >= self._limit:
            self.left_out += 1
            return
        self._events.append(
            {
                "name": label,
                "cat": row,
                "ph": "X",
                "ts": begin_s * 1e6,
                "dur": (end_s - begin_s) * 1e6,
                "pid": activity.device,
                "tid": _ROWS[row],
                "args": arguments,
            }
        )

    def write(self, path: Path) -> None:
        """Write the trace to a file. Raises UsageError if the file cannot be written."""
        heads: list[dict[str, Any]] = []
        for device in sorted({event["pid"] for event in self._events}):
            name = self._names.get(device, f"device {device}")
            heads.append(_meta("process_name", device, 0, {"name": name}))
            heads.append(_meta("process_sort_index", device, 0, {"sort_index": device}))
            for row, number in _ROWS.items():
                heads.append(_meta("thread_name", device, number, {"name": row}))
                heads.append(_meta("thread_sort_index", device, number, {"sort_index": number}))
        document = {"traceEvents": [*heads, *self._events], "displayTimeUnit": "ms"}
        try:
            write_output(path, json.dumps(document, separators=(",", ":")).encode())
        except OSError as error:
            raise UsageError(f"the trace cannot be written to {path}: {error.strerror}") from None


def _meta(name: str, device: int, row: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": device, "tid": row, "args": arguments}


def _label(message: Message) -> str:
    match message:
        case messages.Put() | messages.PutCoded():
            return f"put {message.rows}x{message.columns}"
        case messages.Result() | messages.ResultCoded():
            return f"result {message.rows}x{message.columns}"
        case _:
            return message.TYPE


class TraceLog:
    """Writes a JSON line per activity. In virtual time, equal seeds produce equal logs."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write

    def __call__(self, activity: Activity) -> None:
        """Write one activity as a JSON line."""
        match activity:
            case Transfer() as a:
                times = (a.begin_s, a.end_s, a.arrives_s)
                line = [a.direction.value, a.device, _label(a.message), a.nbytes, *times]
            case Multiplication() as a:
                line = ["multiply", a.device, a.run, a.rows, a.columns, a.begin_s, a.end_s]
            case GraphExecution() as a:
                line = ["graph", a.device, a.run, a.flops, a.begin_s, a.end_s]
            case Presence() as a:
                line = ["join" if a.here else "leave", a.device, a.name, a.at_s]
        self._write(json.dumps(line) + "\n")
