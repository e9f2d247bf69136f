"""Traces of a fleet's activity, for the Perfetto or Chrome trace viewer, or as an event log.

The viewer (ui.perfetto.dev, or chrome://tracing) shows each device as a group of three rows:
receive, compute, send. A matrix multiplication starts when both of its strips have arrived. The
device sends the resulting block while it receives the next strips.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cleave.errors import UsageError
from cleave.files import write_output
from cleave.protocol import messages
from cleave.protocol.messages import Message
from emulator.activity import (
    Activity,
    Direction,
    GraphExecution,
    Multiplication,
    Presence,
    Transfer,
)

_ROWS = {"receive": 1, "compute": 2, "send": 3}


class TraceWriter:
    """Collects activities and writes them as a trace (JSON, Trace Event Format).

    Args:
        limit: maximum number of events in the trace. Later events are only counted.

    Attributes:
        left_out: number of events beyond `limit`.
    """

    def __init__(self, limit: int = 2_000_000) -> None:
        self.left_out = 0
        self._limit = limit
        self._events: list[dict[str, Any]] = []
        self._names: dict[int, str] = {}

    def __call__(self, activity: Activity) -> None:
        """Add one activity to the trace. A runtime calls this method as its observer."""
        match activity:
            case Transfer():
                down = activity.direction is Direction.DOWN
                self._add(
                    "receive" if down else "send",
                    activity.device,
                    _label(activity.message),
                    activity.begin_s,
                    activity.end_s,
                    {"bytes": activity.nbytes, "queued_s": activity.begin_s - activity.at_s},
                )
            case Multiplication():
                label = f"{activity.rows}x{activity.columns}"
                work = {"run": activity.run, "flops": activity.flops}
                device = activity.device
                self._add("compute", device, label, activity.begin_s, activity.end_s, work)
            case GraphExecution():
                work = {"run": activity.run, "flops": activity.flops}
                device = activity.device
                self._add("compute", device, "graph", activity.begin_s, activity.end_s, work)
            case Presence():
                self._names.setdefault(activity.device, activity.name)
                what = "joins" if activity.here else "leaves"
                self._add("receive", activity.device, what, activity.at_s, activity.at_s, {})

    def _add(
        self,
        row: str,
        device: int,
        name: str,
        begin_s: float,
        end_s: float,
        arguments: dict[str, Any],
    ) -> None:
        if len(self._events) >= self._limit:
            self.left_out += 1
            return
        self._events.append(
            {
                "name": name,
                "cat": row,
                "ph": "X",
                "ts": begin_s * 1e6,
                "dur": (end_s - begin_s) * 1e6,
                "pid": device,
                "tid": _ROWS[row],
                "args": arguments,
            }
        )

    def write(self, path: Path) -> None:
        """Write the collected events to a trace file.

        Raises:
            UsageError: when the file cannot be written.
        """
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
    """Writes one JSON line for each activity, with times in full precision.

    Two runs with the same seed write identical logs.

    Args:
        write: called with each line, including its newline.
    """

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write

    def __call__(self, activity: Activity) -> None:
        """Write the line of one activity. A runtime calls this method as its observer."""
        match activity:
            case Transfer():
                line = [
                    activity.direction.value,
                    activity.device,
                    _label(activity.message),
                    activity.nbytes,
                    activity.begin_s,
                    activity.end_s,
                    activity.arrives_s,
                ]
            case Multiplication():
                line = [
                    "multiply",
                    activity.device,
                    activity.run,
                    activity.rows,
                    activity.columns,
                    activity.begin_s,
                    activity.end_s,
                ]
            case GraphExecution():
                line = [
                    "graph",
                    activity.device,
                    activity.run,
                    activity.flops,
                    activity.begin_s,
                    activity.end_s,
                ]
            case Presence():
                what = "join" if activity.here else "leave"
                line = [what, activity.device, activity.name, activity.at_s]
        self._write(json.dumps(line) + "\n")
