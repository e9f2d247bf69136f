"""What is known of a device's honesty, and when it is quarantined.

Pure numbers: a store may keep them for an identity (`dataclasses.asdict`) and start a session with
them (`Reputation(**values)`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Final

QUARANTINE: Final = 3.0
"""Penalty at which a device gets no more tasks. One flipped bit must not be enough."""

FORGIVEN_BY: Final = 10_000
"""Right results, all of them checked, that cancel one whole penalty point: memory without error
correction flips a bit now and then, on honest devices too. Only whole points are forgiven; if parts
were, three faults would never quite add up to three points."""

EVIDENCE: Final = 12 * math.log(10)
"""Evidence that a device changes elements, in nats, at which it gets no more tasks."""

_FOR_A_WRONG: Final = math.log((1 / 6) / 0.01)
_FOR_A_RIGHT: Final = math.log((5 / 6) / 0.99)

KNOWN_AFTER: Final = 16
"""Right results after which a device is known. The results of devices that are not known are always
checked."""


class Wrong(Enum):
    """How a result was wrong; the values are penalties."""

    SMALL = 1.0
    """An element, a row or a column is wrong, or everything is wrong by a little. A flipped bit can
    do that."""

    FORM = 1.5
    """Another shape or dtype than was asked for: a broken or a foreign program."""

    GROSS = 3.0
    """The whole block is wrong by much, which does not happen to an honest device."""


@dataclass(slots=True)
class Rounding:
    """Whether a device's 16-bit results are the rounded products.

    The server computes a few elements of each such result exactly. An honest element differs from
    the right rounding only where its fp32 sum fell on the other side of a rounding boundary: less
    than once in a thousand, whatever the order of summing. A device that adds a little to many
    elements, within the tolerance of the check, is wrong in many. A cumulative sum of the evidence
    (Page 1954) tells the two apart. Each element adds the logarithm of a ratio: its likelihood for
    a device that changes a sixth of the elements, over its likelihood for one that misrounds a
    hundredth. The sum never falls below zero, so honest results cannot be saved up to cover later
    wrong ones.

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
        """Say whether chance explains the evidence less than once in 10^12 results."""
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
        penalty: points for the wrong results, less those forgiven since.
        atoned: right results since it got a penalty, or since a point was last forgiven.
    """

    right: int = 0
    wrong: int = 0
    penalty: float = 0.0
    atoned: int = 0

    @property
    def known(self) -> bool:
        """Say whether the device was right often enough, and never wrong, for a sample to do."""
        return not self.wrong and self.right >= KNOWN_AFTER

    @property
    def quarantined(self) -> bool:
        """Say whether the device should get no more tasks."""
        return self.penalty >= QUARANTINE

    def was_right(self) -> None:
        """Count a result that was checked and is right."""
        self.right += 1
        if not self.penalty:
            return
        self.atoned += 1
        if self.atoned >= FORGIVEN_BY:
            self.atoned = 0
            self.penalty = max(0.0, self.penalty - 1)

    def was_wrong(self, how: Wrong) -> None:
        """Count a result that was checked and is wrong."""
        self.wrong += 1
        self.penalty += how.value


@dataclass(slots=True)
class Suspects:
    """Arrays in a device's memory that may be corrupt, so that one flipped bit counts as one fault.

    A flipped bit in a device's copy of a strip makes every result of that strip wrong. The first
    such result counts, and the PS sends the strip again. Wrong results of runs that were sent
    before that are excused as long as a single array is an input of all of them. A device that
    answers everything wrong soon has two wrong results with no array in common.
    """

    common: frozenset[int] = frozenset()
    excused_runs: int = 0  # runs up to this one were sent before the array was sent again

    def explains(self, run: int, inputs: frozenset[int]) -> bool:
        """Say whether a wrong result may come from the same flipped bit as the one before."""
        shared = self.common & inputs
        if run > self.excused_runs or not shared:
            return False
        self.common = shared
        return True

    def begin(self, inputs: frozenset[int], last_run: int) -> None:
        """Record a wrong result that counts; `last_run` is the last run sent to the device."""
        self.common, self.excused_runs = inputs, last_run
