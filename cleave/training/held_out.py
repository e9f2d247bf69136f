"""The held-out losses of a run: which is the lowest, and for how long."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
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
    """

    best: float = inf
    since: int = 0

    @classmethod
    def of(cls, records: Iterable[Mapping[str, Any]], step: int) -> HeldOut:
        """Return where a run stood after a step, by its records."""
        found = cls()
        for loss in losses_of(records, step).values():
            found.lowest(loss)
        return found

    def lowest(self, loss: float) -> bool:
        """Take a loss; say whether it is the lowest so far."""
        if loss < self.best:
            self.best, self.since = loss, 0
            return True
        self.since += 1
        return False
