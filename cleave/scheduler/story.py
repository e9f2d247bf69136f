"""A bounded log of the scheduler's events and instructions, by device, job and run.

Only names and numbers are kept, no payloads, so it costs almost nothing. People read it: in a
debugger, in a failing test, and in the server's log after a fault.
"""

from __future__ import annotations

from collections import deque
from dataclasses import fields
from typing import Any, Final

from cleave.scheduler.tasks import ArrayRef, Task

LENGTH: Final = 10_000
"""Entries that are kept; the oldest are removed first."""

_PLAIN: Final = (bool, int, float, str, tuple)


class Story:
    """The scheduler's latest events and instructions, oldest first."""

    def __init__(self, length: int = LENGTH) -> None:
        self._entries: deque[tuple[float, Any, tuple[Any, ...]]] = deque(maxlen=length)

    def add(self, at_s: float, said: Any) -> None:
        """Record an event or an instruction, which must be a dataclass with slots."""
        kind = type(said)
        # A payload may be a hundred megabytes, and is nobody's story.
        kept = tuple(getattr(said, name) for name in kind.__slots__ if name != "payload")
        self._entries.append((at_s, kind, kept))

    def tell(
        self, *, device: int | None = None, job: int | None = None, run: int | None = None
    ) -> list[str]:
        """Return what happened, one line per entry.

        Args:
            device, job, run: only entries about this device, job or run; all unless given.
        """
        return [
            _line(at_s, kind, kept)
            for at_s, kind, kept in self._entries
            if _about(kind, kept, device, job, run)
        ]


def _about(
    kind: Any, kept: tuple[Any, ...], device: int | None, job: int | None, run: int | None
) -> bool:
    values = dict(zip((n for n in kind.__slots__ if n != "payload"), kept, strict=True))
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


def _device_of(rates: Any) -> int | None:
    return getattr(rates, "device", None)


def _line(at_s: float, kind: Any, kept: tuple[Any, ...]) -> str:
    names = [field.name for field in fields(kind) if field.name != "payload"]
    said = [f"{name} {_shown(value)}" for name, value in zip(names, kept, strict=True)]
    return f"{at_s:.3f} s: {kind.__name__}" + (f" ({', '.join(said)})" if said else "")


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
