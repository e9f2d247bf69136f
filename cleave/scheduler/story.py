"""A bounded log of the scheduler's events and instructions, by device, job and run.

Only names and numbers are kept, no payloads, so it costs almost nothing. People read it: in a
debugger, in a failing test, and in the server's log after a fault.
"""

from __future__ import annotations

from collections import deque
from dataclasses import fields
from typing import Any, Final

from cleave.scheduler.events import Event, ResultArrived
from cleave.scheduler.instructions import Instruction, Place
from cleave.scheduler.tasks import ArrayRef, Task

LENGTH: Final = 10_000
"""Entries that are kept; the oldest are removed first."""

_PLAIN: Final = (bool, int, float, str, tuple)


class Story:
    """The scheduler's latest events and instructions, oldest first."""

    def __init__(self, length: int = LENGTH) -> None:
        self._times_s: deque[float] = deque(maxlen=length)
        self._said: deque[Event | Instruction] = deque(maxlen=length)

    def add(self, at_s: float, said: Event | Instruction) -> None:
        """Note an event or an instruction, without its payload."""
        if isinstance(said, ResultArrived):  # a payload may be a hundred megabytes
            said = ResultArrived(said.device, said.run, None)
        elif isinstance(said, Place):
            said = Place(said.task, None)
        self._times_s.append(at_s)
        self._said.append(said)

    def tell(
        self, *, device: int | None = None, job: int | None = None, run: int | None = None
    ) -> list[str]:
        """Return what happened, one line per entry.

        Args:
            device, job, run: only entries about this device, job or run; all unless given.
        """
        return [
            _line(at_s, said)
            for at_s, said in zip(self._times_s, self._said, strict=True)
            if _about(said, device, job, run)
        ]


def _about(said: Event | Instruction, device: int | None, job: int | None, run: int | None) -> bool:
    values = _values(said)
    task = values.get("task")
    found_device = values.get("device", values.get("session", _device_of(values.get("rates"))))
    found_job = task.job if isinstance(task, Task) else values.get("job")
    found_job = getattr(found_job, "id", found_job)
    runs = values.get("runs", (values.get("run"),))
    return (
        (device is None or found_device == device)
        and (job is None or found_job == job)
        and (run is None or run in runs)
    )


def _values(said: Event | Instruction) -> dict[str, Any]:
    """Return what is shown of an event or instruction, by field."""
    return {f.name: getattr(said, f.name) for f in fields(said) if f.name != "payload"}


def _device_of(rates: Any) -> int | None:
    return getattr(rates, "device", None)


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
