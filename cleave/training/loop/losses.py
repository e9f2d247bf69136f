"""Track a run's held-out losses and compare its training losses with another run's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from math import inf, isfinite
from pathlib import Path
from typing import Any, Self

from cleave.errors import CleaveError, UsageError
from cleave.training.loop.job import MAY_CHANGE, JobSpec
from cleave.training.loop.run_folder import RunFolder


def losses_of(records: Iterable[Mapping[str, Any]], step: int) -> dict[int, float]:
    """Return held-out losses by step, up to `step`. A null loss (not finite) becomes infinity."""
    return {
        record["step"]: inf if record["eval_loss"] is None else float(record["eval_loss"])
        for record in records
        if record.get("event") == "eval" and record["step"] <= step
    }


@dataclass(slots=True)
class HeldOut:
    """Summary of the held-out losses of a run.

    Attributes:
        best: the lowest loss so far; infinity before the first finite loss.
        since: number of losses since the lowest loss.
        sound_before: step of the first NaN or infinite loss after the last finite loss. None if no
            NaN or infinite loss has followed it.
    """

    best: float = inf
    since: int = 0
    sound_before: int | None = None

    @classmethod
    def of(cls, records: Iterable[Mapping[str, Any]], step: int) -> HeldOut:
        """Summarize the held-out losses in a run's records of steps up to `step`."""
        found = cls()
        for after, loss in losses_of(records, step).items():
            found.lowest(loss, after)
        return found

    def lowest(self, loss: float, step: int) -> bool:
        """Record the held-out loss after `step` steps; return True if it is the lowest so far."""
        if isfinite(loss):
            self.sound_before = None
        elif self.sound_before is None:
            self.sound_before = step
        if loss < self.best:
            self.best, self.since = loss, 0
            return True
        self.since += 1
        return False


@dataclass(slots=True)
class ComparedRun:
    """The training losses of another run, and their differences from this run's losses.

    Attributes:
        most: largest difference between the two losses of one step, as a fraction of the other
            run's loss; infinity if a loss of this run was not finite.
    """

    losses: Mapping[int, float] = field(default_factory=dict)
    steps: int = 0
    most: float = 0.0

    @classmethod
    def of(cls, job: JobSpec, say: Callable[[str], None]) -> Self:
        """Read the losses of the run in `job.against`. If `against` is empty, read no losses.

        If the settings of the two runs differ, `say` is called with a message.

        Raises:
            CleaveError: if the other run cannot be read or has no training losses.
        """
        if not job.against:
            return cls()
        other = RunFolder(Path(job.against))
        config = other.read_config()
        losses = {
            record["step"]: float(record["loss"])
            for record in other.records()
            if record.get("event") == "step" and isinstance(record.get("loss"), int | float)
        }
        if not losses:
            raise UsageError(
                f"--against {job.against!r} has no completed step; use a run with completed steps"
            )
        others = [
            f"{name} {config.get(name, default)!r}, here {getattr(job, name)!r}"
            for name, default in ((each.name, each.default) for each in fields(JobSpec))
            if (name == "steps" or name not in MAY_CHANGE)
            and config.get(name, default) != getattr(job, name)
        ]
        if others:
            say(f"{job.against} has different settings, so losses differ: {'; '.join(others)}")
        return cls(losses)

    def against(self, step: int, loss: float) -> float | None:
        """Compare `loss` with the other run's loss of a step and return the other run's loss.

        Return None if the other run has no loss of that step.
        """
        other = self.losses.get(step)
        if other:
            self.steps += 1
            apart = abs(loss - other) / abs(other)
            self.most = max(self.most, apart) if math.isfinite(apart) else math.inf
        return other

    def found(self, name: str) -> str:
        """Return a message with the largest difference; empty if no step was compared.

        `name` is the name of the other run in the message.
        """
        if not self.steps:
            return ""
        return f"losses of {self.steps} steps differ from {name} by at most {self.most:.1e}"


def check_compared(job: JobSpec) -> None:
    """Raise UsageError if the run in `job.against` cannot be read or has no losses."""
    try:
        ComparedRun.of(job, lambda text: None)
    except CleaveError as error:
        raise UsageError(str(error)) from error
