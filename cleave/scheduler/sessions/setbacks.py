"""Setting aside devices whose runs all fail, with trials at growing intervals. No I/O.

A failed run is not a wrong result and costs no reputation. But other devices must redo its tasks,
so a device that only fails is worse than none. A device that fails now and then is useful: only
the failed run is repeated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

ASIDE_AFTER: Final = 8
"""Number of consecutive failed runs after which a device is set aside. A device that fails three
runs of ten by chance does so once in 20,000 runs."""

TRIAL_S: Final = 10.0
"""Seconds until the first trial of a device that was set aside; the wait doubles each time."""

MOST_TRIAL_S: Final = 600.0


def trial_in_s(times: int) -> float:
    """Return the seconds until a device's next trial after `times` consecutive setbacks."""
    doubled = min(max(0, times - 1), 30)
    return min(MOST_TRIAL_S, TRIAL_S * 2.0**doubled)


@dataclass(slots=True)
class Setbacks:
    """A device's recent failures.

    Attributes:
        in_a_row: number of failed runs since the last completed run.
        times: number of times it was set aside or failed a trial since it last completed a run of a
            job.
        last: the device's own reason for its last failure.
        aside: whether it is set aside.
        trial_s: time of its next trial, if it is set aside.
    """

    in_a_row: int = 0
    times: int = 0
    last: str = ""
    aside: bool = False
    trial_s: float = 0.0

    @classmethod
    def remembered(cls, times: int, last: str) -> Setbacks:
        """Return the setbacks of a returning device; if any, its next failure sets it aside."""
        return cls(ASIDE_AFTER - 1 if times else 0, times, last)

    @property
    def text(self) -> str:
        """Return why the device is set aside; empty if it is not."""
        if not self.aside:
            return ""
        return (
            f"its runs fail, the last with: {self.last}; tried again after "
            f"{trial_in_s(self.times):.0f} s"
        )

    def failed(self, reason: str, now_s: float) -> bool:
        """Count a failed run; return whether the device must be set aside now."""
        self.in_a_row += 1
        self.last = reason
        if self.aside or self.in_a_row < ASIDE_AFTER:
            return False
        self.aside = True
        self.put_off(now_s)
        return True

    def put_off(self, now_s: float) -> None:
        """Postpone the next trial, for longer each time."""
        self.times += 1
        self.trial_s = now_s + trial_in_s(self.times)

    def due(self, now_s: float) -> bool:
        """Return whether a trial is due."""
        return self.aside and now_s >= self.trial_s

    def back(self) -> None:
        """Record a passed trial: one more failure sets the device aside again."""
        self.aside = False
        self.in_a_row = ASIDE_AFTER - 1

    def did(self) -> bool:
        """Count a completed run; return whether it clears earlier setbacks."""
        self.in_a_row = 0
        if self.aside or not self.times:
            return False
        self.times = 0
        return True
