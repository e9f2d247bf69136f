"""Losses of another run, as of plain PyTorch, shown beside those of this one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Self

from cleave.errors import CleaveError, UsageError
from cleave.training.loop.job import MAY_CHANGE, JobSpec
from cleave.training.loop.run_folder import RunFolder


@dataclass(slots=True)
class ComparedRun:
    """Holds what another run's losses were, and how far this one's were from them.

    Attributes:
        losses: of the other run, by step.
        steps: that both have done.
        most: the largest difference in one of them, as a share of the other run's loss.
    """

    losses: Mapping[int, float] = field(default_factory=dict)
    steps: int = 0
    most: float = 0.0

    @classmethod
    def of(cls, job: JobSpec, say: Callable[[str], None]) -> Self:
        """Read the losses of the run that a job names; none if it names none.

        Args:
            job: the job.
            say: told which settings of that run are others, as losses differ then.

        Raises:
            CleaveError: when that is no run, or has done no step.
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
            raise UsageError(f"--against {job.against!r} has done no step; give a run that has")
        others = [
            f"{name} {config.get(name, default)!r}, here {getattr(job, name)!r}"
            for name, default in ((each.name, each.default) for each in fields(JobSpec))
            if (name == "steps" or name not in MAY_CHANGE)
            and config.get(name, default) != getattr(job, name)
        ]
        if others:
            say(f"{job.against} has other settings, so losses differ: {'; '.join(others)}")
        return cls(losses)

    def against(self, step: int, loss: float) -> float | None:
        """Return the other run's loss of a step, if it did that; note how far this one's is."""
        other = self.losses.get(step)
        if other:
            self.steps += 1
            apart = abs(loss - other) / abs(other)
            self.most = max(self.most, apart) if math.isfinite(apart) else math.inf
        return other

    def found(self, name: str) -> str:
        """Return what comparing showed, in a sentence; empty where nothing was compared.

        Args:
            name: of the other run.
        """
        if not self.steps:
            return ""
        return f"losses of {self.steps} steps are at most {self.most:.1e} off those of {name}"


def check_compared(job: JobSpec) -> None:
    """Refuse a job whose `against` is no run.

    Raises:
        UsageError: when it is none.
    """
    try:
        ComparedRun.of(job, lambda text: None)
    except CleaveError as error:
        raise UsageError(str(error)) from error
