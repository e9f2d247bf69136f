"""What is known of a device's honesty, and what follows from it.

Pure numbers: a store may keep them for an identity (`dataclasses.asdict`) and seed a session with
them (`Reputation(**values)`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Final

QUARANTINE: Final = 3.0
"""Penalty at which a device gets no more work: bits flip once, not thrice."""

FORGIVEN_BY: Final = 10_000
"""Right results, all of them checked, that make up for one whole penalty point: memory without
error correction flips a bit now and then, on honest devices too. Nothing is forgiven in parts, or
a third fault would never quite be the third."""

EVIDENCE: Final = 12 * math.log(10)
"""Nats of evidence that a device changes elements, at which it gets no more work."""

_FOR_A_WRONG: Final = math.log((1 / 6) / 0.01)
_FOR_A_RIGHT: Final = math.log((5 / 6) / 0.99)

KNOWN_AFTER: Final = 16
"""Right results after which a new device is no stranger: strangers are always checked."""


class Wrong(Enum):
    """How a result was wrong; the values are penalties."""

    SMALL = 1.0
    """An element, a row, a column, or all a little: a flipped bit may do that, once."""

    FORM = 1.5
    """Another shape or dtype than was asked for: a broken program, or a strange one."""

    GROSS = 3.0
    """The whole block, by much: nothing that happens to an honest device."""


@dataclass(slots=True)
class Rounding:
    """Whether a device's 16-bit results are the products, rounded.

    Of each such result the server computes a few elements exactly. An honest one is not the right
    rounding where its sum in fp32 fell on the other side of a boundary: less than once in a
    thousand, whatever the order of summing. Someone who adds a little to many elements, within the
    tolerance of the check, is wrong in many. A cumulative sum of the evidence (Page 1954) tells the
    two apart: the logarithm of how much likelier each element is of one who changes a sixth of them
    than of one who misses a hundredth; never below zero, so that honest work buys no credit.

    Attributes:
        spots: elements computed exactly.
        misrounded: those that were not the right rounding.
        evidence: the cumulative sum, in nats.
    """

    spots: int = 0
    misrounded: int = 0
    evidence: float = 0.0

    @property
    def biased(self) -> bool:
        """Whether chance explains it less than once in 10^12 results."""
        return self.evidence >= EVIDENCE

    def saw(self, spots: int, misrounded: int) -> None:
        """Count the elements of one result."""
        self.spots += spots
        self.misrounded += misrounded
        gained = misrounded * _FOR_A_WRONG + (spots - misrounded) * _FOR_A_RIGHT
        self.evidence = max(0.0, self.evidence + gained)


@dataclass(slots=True)
class Reputation:
    """One device's record.

    Attributes:
        right: results that were checked and right.
        wrong: results that were checked and wrong.
        penalty: what the wrong ones add up to, less what was forgiven since.
        atoned: right results since it has a penalty, or was forgiven last.
    """

    right: int = 0
    wrong: int = 0
    penalty: float = 0.0
    atoned: int = 0

    @property
    def known(self) -> bool:
        """Whether it was right often enough, and never wrong, so that a sample will do."""
        return not self.wrong and self.right >= KNOWN_AFTER

    @property
    def quarantined(self) -> bool:
        """Whether it should get no more work."""
        return self.penalty >= QUARANTINE

    def was_right(self) -> None:
        """A result was checked and is right."""
        self.right += 1
        if not self.penalty:
            return
        self.atoned += 1
        if self.atoned >= FORGIVEN_BY:
            self.atoned = 0
            self.penalty = max(0.0, self.penalty - 1)

    def was_wrong(self, how: Wrong) -> None:
        """A result was checked and is wrong."""
        self.wrong += 1
        self.penalty += how.value


@dataclass(slots=True)
class Suspects:
    """Which arrays in a device's memory may be spoiled, so that one flipped bit is one fault.

    A flipped bit in a device's copy of a strip spoils every result of that strip. The first of them
    counts, and the PS sends the strip again; what was under way meanwhile is excused as long as one
    and the same array explains everything. Who answers everything wrong soon has two strips that
    explain nothing of each other.
    """

    common: frozenset[int] = frozenset()
    excused_runs: int = 0  # runs up to this one were sent before the array was sent again

    def explains(self, run: int, inputs: frozenset[int]) -> bool:
        """Whether a wrong result is of the same flipped bit as the one before."""
        shared = self.common & inputs
        if run > self.excused_runs or not shared:
            return False
        self.common = shared
        return True

    def begin(self, inputs: frozenset[int], last_run: int) -> None:
        """A wrong result that counts; `last_run` is the last that was sent to this device."""
        self.common, self.excused_runs = inputs, last_run
