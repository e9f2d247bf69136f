"""A device's reputation for correct results, and the limits at which it is quarantined.

Each record contains only numbers. A store can save a record with `dataclasses.asdict`, and restore
it with `Reputation(**values)`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Final

QUARANTINE: Final = 3.0
"""Penalty points at which a device is quarantined. A single flipped bit must not reach this
limit."""

FORGIVEN_BY: Final = 10_000
"""Number of checked correct results that cancel one penalty point. Memory without error correction
occasionally flips a bit, on honest devices too. Only whole points are cancelled. If fractions were
cancelled, three faults would never quite reach three points."""

EVIDENCE: Final = 12 * math.log(10)
"""Evidence of manipulated elements, in nats, at which a device is quarantined."""

_FOR_A_WRONG: Final = math.log((1 / 6) / 0.01)
_FOR_A_RIGHT: Final = math.log((5 / 6) / 0.99)

KNOWN_AFTER: Final = 16
"""Number of correct results after which a device is trusted enough to be sampled. All results of
other devices are checked."""


class Wrong(Enum):
    """How a result was wrong. The enum values are penalty points."""

    SMALL = 1.0
    """One element, row or column is wrong, or all elements are slightly wrong. A flipped bit can
    cause this."""

    FORM = 1.5
    """The shape or dtype is not the requested one. A faulty or foreign program can cause this."""

    GROSS = 3.0
    """The whole block is far off. An honest device does not cause this."""


@dataclass(slots=True)
class Rounding:
    """Evidence of whether a device rounds its 16-bit results correctly.

    The server computes a few elements of each 16-bit result exactly. On an honest device, an
    element is misrounded only if its fp32 sum falls on the other side of a rounding boundary. This
    happens to fewer than one element in a thousand, in any order of summation. A device that adds a
    small amount to many elements, within the tolerance of the check, misrounds many elements.

    A cumulative sum of the evidence (CUSUM, Page 1954) distinguishes honest devices from such
    devices. Each element adds the logarithm of a likelihood ratio. The ratio compares a device that
    changes a sixth of all elements with a device that misrounds a hundredth. The sum never falls
    below zero, so correct results cannot offset later wrong results.

    Attributes:
        spots: number of elements that the server computed exactly.
        misrounded: number of exactly computed elements that the device misrounded.
        evidence: the cumulative sum, in nats.
    """

    spots: int = 0
    misrounded: int = 0
    evidence: float = 0.0

    @property
    def biased(self) -> bool:
        """Return whether the evidence has reached `EVIDENCE`.

        An honest device almost never reaches this limit.
        """
        return self.evidence >= EVIDENCE

    def saw(self, spots: int, misrounded: int) -> None:
        """Add the evidence of one result.

        Args:
            spots: number of elements that the server computed exactly.
            misrounded: number of exactly computed elements that the device misrounded.
        """
        self.spots += spots
        self.misrounded += misrounded
        gained = misrounded * _FOR_A_WRONG + (spots - misrounded) * _FOR_A_RIGHT
        self.evidence = max(0.0, self.evidence + gained)


@dataclass(slots=True)
class Reputation:
    """One device's record of correct and wrong results.

    Attributes:
        right: number of checked results that were correct.
        wrong: number of checked results that were wrong.
        penalty: penalty points for wrong results, minus forgiven points.
        atoned: number of correct results since the device first got a penalty point, or since a
            point was last forgiven.
    """

    right: int = 0
    wrong: int = 0
    penalty: float = 0.0
    atoned: int = 0

    @property
    def known(self) -> bool:
        """Return whether only a sample of the device's results needs to be checked.

        This requires at least `KNOWN_AFTER` correct results and no wrong result.
        """
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
    """Possibly corrupt arrays on a device. One flipped bit then counts as only one fault.

    A flipped bit in a device's copy of an array makes every result that uses the array wrong. Only
    the first such result counts as a fault, and the PS sends the array again. Later wrong results
    are excused if their runs were sent before the array was sent again, and if all the wrong
    results share an input array. A device that returns only wrong results soon returns two without
    a common input array.

    Attributes:
        common: IDs of the input arrays that all wrong results share.
        excused_runs: ID of the last run that was sent before the array was sent again.
    """

    common: frozenset[int] = frozenset()
    excused_runs: int = 0  # the last run sent before the array was sent again

    def explains(self, run: int, inputs: frozenset[int]) -> bool:
        """Return whether one corrupt array can explain this and the previous wrong results.

        Args:
            run: ID of the run with the wrong result.
            inputs: IDs of the run's input arrays.
        """
        shared = self.common & inputs
        if run > self.excused_runs or not shared:
            return False
        self.common = shared
        return True

    def begin(self, inputs: frozenset[int], last_run: int) -> None:
        """Record a wrong result that counts as a fault.

        Args:
            inputs: IDs of the run's input arrays.
            last_run: ID of the last run sent to the device.
        """
        self.common, self.excused_runs = inputs, last_run
