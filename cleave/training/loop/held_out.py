"""Tracking of a run's held-out losses: the lowest loss, and whether the losses are finite."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any


def losses_of(records: Iterable[Mapping[str, Any]], step: int) -> dict[int, float]:
    """Return a map from steps to held-out losses, for all steps up to `step`.

    A loss that is not finite becomes infinity.

    Args:
        records: the records of the run, as JSON objects.
        step: the last step that is included.
    """
    return {
        record["step"]: inf if record["eval_loss"] is None else float(record["eval_loss"])
        for record in records
        if record.get("event") == "eval" and record["step"] <= step
    }


@dataclass(slots=True)
class HeldOut:
    """Tracks the held-out losses of a run.

    Attributes:
        best: the lowest loss so far; infinity before the first finite loss.
        since: number of losses recorded since the lowest loss.
        sound_before: step of the first of the latest consecutive losses that are not finite. None
            if the latest loss is finite.
    """

    best: float = inf
    since: int = 0
    sound_before: int | None = None

    @classmethod
    def of(cls, records: Iterable[Mapping[str, Any]], step: int) -> HeldOut:
        """Restore the state after a step from the records of a run.

        Args:
            records: the records of the run, as JSON objects.
            step: the last step whose loss is included.
        """
        found = cls()
        for after, loss in losses_of(records, step).items():
            found.lowest(loss, after)
        return found

    def lowest(self, loss: float, step: int) -> bool:
        """Add a held-out loss, and return True if it is the lowest loss so far.

        A loss that is not finite is never the lowest.

        Args:
            loss: the held-out loss.
            step: number of completed steps.
        """
        if isfinite(loss):
            self.sound_before = None
        elif self.sound_before is None:
            self.sound_before = step
        if loss < self.best:
            self.best, self.since = loss, 0
            return True
        self.since += 1
        return False
