"""The held-out losses of a run: which is the lowest, and for how long."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any


def losses_of(records: Iterable[Mapping[str, Any]], step: int) -> dict[int, float]:
    """Return the held-out losses up to a step, by step; infinity where one was not finite."""
    return {
        record["step"]: inf if record["eval_loss"] is None else float(record["eval_loss"])
        for record in records
        if record.get("event") == "eval" and record["step"] <= step
    }


@dataclass(slots=True)
class HeldOut:
    """Follows held-out losses.

    Attributes:
        best: the lowest.
        since: how many came after it.
        sound_before: after this step it was not finite, and has not been since; None if it is.
    """

    best: float = inf
    since: int = 0
    sound_before: int | None = None

    @classmethod
    def of(cls, records: Iterable[Mapping[str, Any]], step: int) -> HeldOut:
        """Return where a run stood after a step, by its records."""
        found = cls()
        for after, loss in losses_of(records, step).items():
            found.lowest(loss, after)
        return found

    def lowest(self, loss: float, step: int) -> bool:
        """Take the loss after a step; say whether it is the lowest, as none is not finite."""
        if isfinite(loss):
            self.sound_before = None
        elif self.sound_before is None:
            self.sound_before = step
        if loss < self.best:
            self.best, self.since = loss, 0
            return True
        self.since += 1
        return False
