"""Comparison of a run's losses with the losses of another run, such as a run in plain PyTorch."""

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
    """Losses of another run, and the difference of this run's losses from them.

    Attributes:
        losses: maps a step to the other run's loss.
        steps: number of steps compared so far.
        most: largest difference of any step, as a fraction of the other run's loss. It is infinity
            if a loss of this run was not finite.
    """

    losses: Mapping[int, float] = field(default_factory=dict)
    steps: int = 0
    most: float = 0.0

    @classmethod
    def of(cls, job: JobSpec, say: Callable[[str], None]) -> Self:
        """Read the losses of the run in `job.against`.

        Args:
            job: settings of this run. If `job.against` is empty, the result has no losses.
            say: called with a message if the settings of the two runs differ.

        Raises:
            CleaveError: the other run does not exist or has no steps.
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
        """Compare this run's loss of a step with the other run's loss.

        Returns:
            The other run's loss; None if the other run has no loss for this step.
        """
        other = self.losses.get(step)
        if other:
            self.steps += 1
            apart = abs(loss - other) / abs(other)
            self.most = max(self.most, apart) if math.isfinite(apart) else math.inf
        return other

    def found(self, name: str) -> str:
        """Return a sentence with the largest difference; empty if no step was compared.

        Args:
            name: name of the other run in the sentence.
        """
        if not self.steps:
            return ""
        return f"losses of {self.steps} steps are at most {self.most:.1e} off those of {name}"


def check_compared(job: JobSpec) -> None:
    """If `job.against` names a run, check that the run can be read and has losses.

    Raises:
        UsageError: the run cannot be read or has no steps.
    """
    try:
        ComparedRun.of(job, lambda text: None)
    except CleaveError as error:
        raise UsageError(str(error)) from error
