"""A bounded log of the scheduler's events and instructions, searchable by device, job and run.

The log contains neither payloads nor messages of steps by stages. Developers read the log in a
debugger or in a failing test.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Final

from cleave.scheduler.events import Event, ResultArrived
from cleave.scheduler.instructions import Instruction, Place
from cleave.scheduler.tiles.tasks import ArrayRef, Task

# Maximum number of events and instructions in the log. The latest event is never removed.
LENGTH: Final = 10_000
_PLAIN: Final = (bool, int, float, str, tuple)


class SchedulerLog:
    """A log of the scheduler's latest events and the resulting instructions, oldest first."""

    def __init__(self, length: int = LENGTH) -> None:
        self._most = length
        self._length = 0
        self._said: deque[tuple[float, Event, Sequence[Instruction | Task]]] = deque()

    def add(self, at_s: float, event: Event, instructions: Sequence[Instruction]) -> None:
        """Log an event and the resulting instructions, without payloads."""
        if isinstance(event, ResultArrived):  # a payload may be a hundred megabytes
            event = ResultArrived(event.device, event.run, None)
            # A `Place` also has a payload, so log only its task.
            kept: Sequence[Instruction | Task] = [
                i.task if isinstance(i, Place) else i for i in instructions
            ]
        else:
            kept = instructions
        self._said.append((at_s, event, kept))
        self._length += 1 + len(instructions)
        while self._length > self._most and len(self._said) > 1:
            self._length -= 1 + len(self._said.popleft()[2])

    def lines(
        self, *, device: int | None = None, job: int | None = None, run: int | None = None
    ) -> list[str]:
        """Return one line of text for each entry that matches every ID. None matches any ID."""
        return [
            _line(at_s, said)
            for at_s, event, kept in self._said
            for said in (event, *(Place(i, None) if isinstance(i, Task) else i for i in kept))
            if _about(said, device, job, run)
        ]


def _about(said: Event | Instruction, device: int | None, job: int | None, run: int | None) -> bool:
    values = _values(said)
    task = values.get("task")
    device_of_rates = getattr(values.get("rates"), "device", None)
    found_device = values.get("device", values.get("session", device_of_rates))
    found_job = task.job if isinstance(task, Task) else values.get("job")
    found_job = getattr(found_job, "id", found_job)
    runs = values.get("runs", (values.get("run"),))
    return (
        (device is None or found_device == device)
        and (job is None or found_job == job)
        and (run is None or run in runs)
    )


def _values(said: Event | Instruction) -> dict[str, Any]:
    """Return the fields of an event or instruction, without payloads."""
    return {f.name: getattr(said, f.name) for f in fields(said) if f.name != "payload"}


def _line(at_s: float, said: Event | Instruction) -> str:
    shown = [f"{name} {_shown(value)}" for name, value in _values(said).items()]
    return f"{at_s:.3f} s: {type(said).__name__}" + (f" ({', '.join(shown)})" if shown else "")


def _shown(value: Any) -> str:
    match value:
        case Task():
            inputs = " ".join(str(array.id) for array in value.inputs)
            return f"of job {value.job} with arrays {inputs}"
        case ArrayRef():
            return f"{value.id}, {value.nbytes} bytes"
        case _ if isinstance(value, _PLAIN):
            return str(value)
        case _ if hasattr(value, "device"):
            return f"of device {value.device}"
        case _:
            return str(getattr(value, "title", type(value).__name__))
