"""The interval between checkpoints: a number of steps or a time."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from cleave.errors import UsageError

DEFAULT: Final = "10min"
"""Default interval between checkpoints. A crash loses at most about this much training time."""

_UNITS_S: Final = {"s": 1.0, "min": 60.0, "h": 3600.0}
_TIME: Final = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*(s|min|h)")
_MOST_DIGITS: Final = 18


@dataclass(frozen=True, slots=True)
class Interval:
    """An interval between checkpoints, in steps or in seconds.

    If both attributes are 0, no checkpoints are written.

    Attributes:
        steps: number of optimizer steps between checkpoints.
        seconds: minimum time between checkpoints. The first step that ends later than this after
            the last checkpoint is followed by a checkpoint.
    """

    steps: int = 0
    seconds: float = 0.0

    @classmethod
    def of(cls, text: int | str) -> Interval:
        """Parse an interval such as `500` (steps), `90s`, `10min`, `2h`, or `0` (no checkpoints).

        Raises:
            UsageError: when `text` is neither a number of steps nor a time.
        """
        said = str(text).strip()
        if said.isascii() and said.isdigit() and len(said) <= _MOST_DIGITS:
            return cls(steps=int(said))
        found = _TIME.fullmatch(said)
        seconds = float(found[1]) * _UNITS_S[found[2]] if found else 0.0
        if not seconds:
            raise UsageError(
                f"--checkpoint-every is {text!r}; give a number of steps, a time like 90s, 10min "
                f"or 2h, or 0 for no checkpoints"
            )
        return cls(seconds=seconds)

    def __bool__(self) -> bool:
        return bool(self.steps or self.seconds)

    def due(self, step: int, since_s: float) -> bool:
        """Return True if a checkpoint is due after a step.

        Args:
            step: number of completed steps of the run, including those before it was resumed.
            since_s: seconds since the last checkpoint, or since the run started or resumed.
        """
        if self.steps:
            return step % self.steps == 0
        return bool(self.seconds) and since_s >= self.seconds
