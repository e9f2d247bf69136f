"""The held-out losses of a run: which is the lowest, and for how long."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf, isfinite, nan
from typing import Any


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
        for record in records:
            if record.get("event") == "eval" and record["step"] <= step:
                loss = record["eval_loss"]  # null where it was not finite
                found.lowest(nan if loss is None else float(loss), record["step"])
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
