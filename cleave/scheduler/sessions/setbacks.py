"""Decide when to set aside devices whose runs fail, and schedule their trials.

This module does no I/O.

A failed run is not a wrong result and adds no penalty points. However, its task must be repeated,
so a device on which every run fails slows down training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# Consecutive failed runs after which a device is set aside. A device that fails 30% of its runs at
# random reaches this number once in about 20,000 runs.
ASIDE_AFTER: Final = 8
TRIAL_S: Final = 10.0  # seconds until the first trial; each further trial doubles the wait
MOST_TRIAL_S: Final = 600.0


def trial_in_s(times: int) -> float:
    """Return the time in seconds until a device's next trial after `times` consecutive setbacks."""
    doubled = min(max(0, times - 1), 30)
    return min(MOST_TRIAL_S, TRIAL_S * 2.0**doubled)


@dataclass(slots=True)
class Setbacks:
    """A device's recent failed runs and failed trials."""

    in_a_row: int = 0  # number of failed runs since the last completed run
    # number of times the device was set aside or failed a trial since it last completed a run
    times: int = 0
    last: str = ""  # the error text that the device sent with its last failed run
    aside: bool = False
    trial_s: float = 0.0  # time of the next trial if the device is set aside

    @classmethod
    def remembered(cls, times: int, last: str) -> Setbacks:
        """Return a rejoining device's setbacks. If `times` > 0, one failure sets it aside."""
        return cls(ASIDE_AFTER - 1 if times else 0, times, last)

    @property
    def text(self) -> str:
        """Return why the device is set aside, or an empty string if it is not."""
        if not self.aside:
            return ""
        return (
            f"its runs fail, the last with: {self.last}; tried again after "
            f"{trial_in_s(self.times):.0f} s"
        )

    def failed(self, reason: str, now_s: float) -> bool:
        """Count a failed run. Return whether the run causes the device to be set aside."""
        self.in_a_row += 1
        self.last = reason
        if self.aside or self.in_a_row < ASIDE_AFTER:
            return False
        self.aside = True
        self.put_off(now_s)
        return True

    def put_off(self, now_s: float) -> None:
        """Postpone the next trial. The wait doubles each time, up to `MOST_TRIAL_S`."""
        self.times += 1
        self.trial_s = now_s + trial_in_s(self.times)

    def due(self, now_s: float) -> bool:
        """Return whether the device is set aside and its next trial is due."""
        return self.aside and now_s >= self.trial_s

    def back(self) -> None:
        """Record a passed trial. One more failed run sets the device aside again."""
        self.aside = False
        self.in_a_row = ASIDE_AFTER - 1

    def did(self) -> bool:
        """Count a completed run. Return whether the run cleared earlier setbacks."""
        self.in_a_row = 0
        if self.aside or not self.times:
            return False
        self.times = 0
        return True
