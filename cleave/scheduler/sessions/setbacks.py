"""Devices whose runs all fail: they are set aside, and tried again at growing intervals. Pure.

A failed run is not a wrong result and costs no reputation. But other devices must do the failed
tasks, so a device that only fails is worse than none. One that fails now and then is of use: a run
that it failed is asked for again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

ASIDE_AFTER: Final = 8
"""Runs that a device fails in a row before it is set aside. By chance alone, a device that fails
three runs of ten does so once in 20,000 runs."""

TRIAL_S: Final = 10.0
"""Seconds after which a device that was set aside is first tried; each further wait is twice as
long."""

MOST_TRIAL_S: Final = 600.0


def trial_in_s(times: int) -> float:
    """Return how long a device waits for its next trial after so many setbacks in a row."""
    doubled = min(max(0, times - 1), 30)
    return min(MOST_TRIAL_S, TRIAL_S * 2.0**doubled)


@dataclass(slots=True)
class Setbacks:
    """A device's recent failures.

    Attributes:
        in_a_row: runs that it failed since it last did one.
        times: how often it was set aside, or failed a trial, since it last did a run of a job.
        last: the reason of its last failure, as it states it.
        aside: whether it is set aside.
        trial_s: when it is tried again, if it is set aside.
    """

    in_a_row: int = 0
    times: int = 0
    last: str = ""
    aside: bool = False
    trial_s: float = 0.0

    @classmethod
    def remembered(cls, times: int, last: str) -> Setbacks:
        """Return the setbacks of a device that comes back.

        If it was set aside before, one more failure sets it aside again.
        """
        return cls(ASIDE_AFTER - 1 if times else 0, times, last)

    @property
    def text(self) -> str:
        """Say why the device is set aside; empty while it is not."""
        if not self.aside:
            return ""
        return (
            f"its runs fail, the last with: {self.last}; tried again after "
            f"{trial_in_s(self.times):.0f} s"
        )

    def failed(self, reason: str, now_s: float) -> bool:
        """Count a failed run; return whether the device is to be set aside now."""
        self.in_a_row += 1
        self.last = reason
        if self.aside or self.in_a_row < ASIDE_AFTER:
            return False
        self.aside = True
        self.put_off(now_s)
        return True

    def put_off(self, now_s: float) -> None:
        """Put the next trial off, for longer each time."""
        self.times += 1
        self.trial_s = now_s + trial_in_s(self.times)

    def due(self, now_s: float) -> bool:
        """Say whether the device is to be tried now."""
        return self.aside and now_s >= self.trial_s

    def back(self) -> None:
        """Note that the device passed a trial: one more failure sets it aside again."""
        self.aside = False
        self.in_a_row = ASIDE_AFTER - 1

    def did(self) -> bool:
        """Count a run that the device did; return whether that clears its earlier setbacks."""
        self.in_a_row = 0
        if self.aside or not self.times:
            return False
        self.times = 0
        return True
