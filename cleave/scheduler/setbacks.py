"""Devices that only fail: set aside, and tried again ever later. Pure.

Failing is not lying: it costs no reputation. But what a device fails others do in its place, so one
that does nothing else is worse than none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

ASIDE_AFTER: Final = 3
"""Runs that a device fails, with none done in between, before it is set aside."""

TRIAL_S: Final = 10.0
"""After so long a device that was set aside is tried, then after twice as long."""

MOST_TRIAL_S: Final = 600.0


def trial_in_s(times: int) -> float:
    """How long a device waits for its next trial when it has failed so many in a row."""
    doubled = min(max(0, times - 1), 30)
    return min(MOST_TRIAL_S, TRIAL_S * 2.0**doubled)


@dataclass(slots=True)
class Setbacks:
    """What a device failed lately.

    Attributes:
        in_a_row: runs that it failed since it did one.
        times: how often it was set aside, or failed a trial, since it did a run of real work.
        last: why it failed last, as it says.
        aside: whether it is set aside.
        trial_s: when it is tried again, then.
    """

    in_a_row: int = 0
    times: int = 0
    last: str = ""
    aside: bool = False
    trial_s: float = 0.0

    @classmethod
    def remembered(cls, times: int, last: str) -> Setbacks:
        """Of a device that comes again: one more failure sets it aside if it was so before."""
        return cls(ASIDE_AFTER - 1 if times else 0, times, last)

    @property
    def text(self) -> str:
        """Why it is set aside; empty while it is not."""
        if not self.aside:
            return ""
        return (
            f"its runs fail, the last with: {self.last}; tried again after "
            f"{trial_in_s(self.times):.0f} s"
        )

    def failed(self, reason: str, now_s: float) -> bool:
        """It failed a run; returns whether it is to be set aside now."""
        self.in_a_row += 1
        self.last = reason
        if self.aside or self.in_a_row < ASIDE_AFTER:
            return False
        self.aside = True
        self.put_off(now_s)
        return True

    def put_off(self, now_s: float) -> None:
        """It is tried later; the next time later still."""
        self.times += 1
        self.trial_s = now_s + trial_in_s(self.times)

    def due(self, now_s: float) -> bool:
        """Whether it is to be tried."""
        return self.aside and now_s >= self.trial_s

    def back(self) -> None:
        """It passed a trial: one more failure sets it aside again."""
        self.aside = False
        self.in_a_row = ASIDE_AFTER - 1

    def did(self) -> bool:
        """It did a run; returns whether that makes up for setbacks."""
        self.in_a_row = 0
        if self.aside or not self.times:
            return False
        self.times = 0
        return True
