"""The held-out losses of a run, and the lowest of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any


def losses_of(records: Iterable[Mapping[str, Any]], step: int) -> dict[int, float]:
    """Return the held-out losses up to a step, by step; infinity for one that is not finite."""
    return {
        record["step"]: inf if record["eval_loss"] is None else float(record["eval_loss"])
        for record in records
        if record.get("event") == "eval" and record["step"] <= step
    }


@dataclass(slots=True)
class HeldOut:
    """Tracks held-out losses.

    Attributes:
        best: the lowest loss.
        since: number of losses since the lowest.
        sound_before: first step of the current non-finite losses; None if the latest is finite.
    """

    best: float = inf
    since: int = 0
    sound_before: int | None = None

    @classmethod
    def of(cls, records: Iterable[Mapping[str, Any]], step: int) -> HeldOut:
        """Return the state after a step, from a run's records."""
        found = cls()
        for after, loss in losses_of(records, step).items():
            found.lowest(loss, after)
        return found

    def lowest(self, loss: float, step: int) -> bool:
        """Add the loss after a step; return whether it is the lowest. Only a finite loss can be."""
        if isfinite(loss):
            self.sound_before = None
        elif self.sound_before is None:
            self.sound_before = step
        if loss < self.best:
            self.best, self.since = loss, 0
            return True
        self.since += 1
        return False
