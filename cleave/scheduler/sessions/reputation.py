"""Count a device's wrong results and failed runs, which decide on quarantine and setting aside.

A failed run is not a wrong result and adds no penalty points. However, its task must be repeated,
so a device on which every run fails slows down training. Such a device is set aside, and then tried
from time to time. This module does no I/O.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Final

# Penalty points at which a device is quarantined. A single flipped bit must not reach this limit.
QUARANTINE: Final = 3.0

# Number of correct results that cancel one penalty point, because memory without error correction
# occasionally flips a bit. Points are cancelled whole, so that three faults reach three points.
FORGIVEN_BY: Final = 10_000

# evidence of manipulated elements at which a device is quarantined, in nats
EVIDENCE: Final = 12 * math.log(10)
_FOR_A_WRONG: Final = math.log((1 / 6) / 0.01)
_FOR_A_RIGHT: Final = math.log((5 / 6) / 0.99)

# number of correct results after which only a sample of a device's results is checked
KNOWN_AFTER: Final = 16


class Wrong(Enum):
    """The severity of a wrong result. The enum values are penalty points."""

    # One element, row or column is wrong, or all are slightly wrong, as after a flipped bit.
    SMALL = 1.0
    FORM = 1.5  # the shape, dtype or size is not the requested one, as from a faulty program
    GROSS = 3.0  # the whole block is far off, which no honest device causes


@dataclass(slots=True)
class Rounding:
    """Evidence on whether a device rounds its 16-bit results correctly.

    The server computes a few elements of each 16-bit result exactly. On an honest device, an
    element is misrounded only if its fp32 sum falls on the other side of a rounding boundary. This
    affects fewer than one element in a thousand, for any order of summation. A device that adds a
    small amount to many elements, within the tolerance of the check, misrounds many elements.

    A cumulative sum of the evidence (CUSUM, Page 1954) distinguishes the two cases. Each element
    adds the logarithm of a likelihood ratio: the probability of its rounding if a sixth of all
    elements are misrounded, divided by the probability if a hundredth are. The sum never falls
    below zero, so correct results cannot offset later wrong results.
    """

    spots: int = 0  # number of elements that the server computed exactly
    misrounded: int = 0  # number of these elements that the device misrounded
    evidence: float = 0.0  # the cumulative sum, in nats

    @property
    def biased(self) -> bool:
        """Return whether the evidence has reached `EVIDENCE`, which is rare for honest devices."""
        return self.evidence >= EVIDENCE

    def saw(self, spots: int, misrounded: int) -> None:
        """Add the evidence from one result."""
        self.spots += spots
        self.misrounded += misrounded
        gained = misrounded * _FOR_A_WRONG + (spots - misrounded) * _FOR_A_RIGHT
        self.evidence = max(0.0, self.evidence + gained)


@dataclass(slots=True)
class Reputation:
    """One device's record of checked results."""

    right: int = 0
    wrong: int = 0
    penalty: float = 0.0  # penalty points for wrong results, minus forgiven points
    # number of correct results since the first penalty point or the last forgiven point
    atoned: int = 0

    @property
    def known(self) -> bool:
        """Return whether only a sample of the device's results needs to be checked."""
        return not self.wrong and self.right >= KNOWN_AFTER

    @property
    def quarantined(self) -> bool:
        """Return whether the penalty points have reached `QUARANTINE`."""
        return self.penalty >= QUARANTINE

    def was_right(self) -> None:
        """Record that a checked result was correct."""
        self.right += 1
        if not self.penalty:
            return
        self.atoned += 1
        if self.atoned >= FORGIVEN_BY:
            self.atoned = 0
            self.penalty = max(0.0, self.penalty - 1)

    def was_wrong(self, how: Wrong) -> None:
        """Record that a checked result was wrong, and add penalty points."""
        self.wrong += 1
        self.penalty += how.value


@dataclass(slots=True)
class Suspects:
    """Possibly corrupt arrays on a device, recorded so that a flipped bit counts as one fault.

    A flipped bit in a device's copy of an array corrupts every result that uses the array. Only the
    first such result counts as a fault, and the PS resends the array. Later wrong results are
    excused if their runs were sent before the array was resent, and if all the wrong results share
    an input array. A device that returns only wrong results soon returns two that share no input
    array, and is then no longer excused.
    """

    common: frozenset[int] = frozenset()  # IDs of the input arrays that all wrong results share
    excused_runs: int = 0  # ID of the last run sent before the array was sent again

    def explains(self, run: int, inputs: frozenset[int]) -> bool:
        """Return whether one corrupt array explains all wrong results, including this run's."""
        shared = self.common & inputs
        if run > self.excused_runs or not shared:
            return False
        self.common = shared
        return True

    def begin(self, inputs: frozenset[int], last_run: int) -> None:
        """Record a wrong result that counts as a fault, and the last run sent so far."""
        self.common, self.excused_runs = inputs, last_run


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
            f"its runs fail, most recently with: {self.last}; next trial after "
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
