"""A device's reputation for correct results, and when it is quarantined.

The records are plain numbers: a store may save them (`dataclasses.asdict`) and start a session
with them (`Reputation(**values)`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Final

QUARANTINE: Final = 3.0
"""Penalty at which a device is quarantined. One flipped bit must not be enough."""

FORGIVEN_BY: Final = 10_000
"""Number of checked correct results that cancel one penalty point. Memory without error correction
flips a bit now and then, on honest devices too. Only whole points are forgiven; with fractions,
three faults would never quite reach three points."""

EVIDENCE: Final = 12 * math.log(10)
"""Evidence, in nats, that a device changes elements, at which it is quarantined."""

_FOR_A_WRONG: Final = math.log((1 / 6) / 0.01)
_FOR_A_RIGHT: Final = math.log((5 / 6) / 0.99)

KNOWN_AFTER: Final = 16
"""Correct results after which a device is known. Unknown devices' results are always checked."""


class Wrong(Enum):
    """How a result was wrong. The values are penalties."""

    SMALL = 1.0
    """An element, row or column is wrong, or all are slightly wrong; a flipped bit can do that."""

    FORM = 1.5
    """The shape or dtype is not the requested one: a broken or foreign program."""

    GROSS = 3.0
    """The whole block is far off, which does not happen to an honest device."""


@dataclass(slots=True)
class Rounding:
    """Evidence of whether a device's 16-bit results are correctly rounded products.

    The server computes a few elements of each such result exactly. An honest element is misrounded
    only if its fp32 sum fell on the other side of a rounding boundary. That happens less than once
    in a thousand, in any order of summing. A device that adds a little to many elements, within the
    check's tolerance, is wrong in many.

    A cumulative sum of the evidence (Page 1954) tells the two apart. Each element adds the log of a
    likelihood ratio: a device that changes a sixth of the elements, over one that misrounds a
    hundredth. The sum never falls below zero, so honest results cannot offset later wrong ones.

    Attributes:
        spots: number of elements computed exactly.
        misrounded: number of these elements that were misrounded.
        evidence: the cumulative sum, in nats.
    """

    spots: int = 0
    misrounded: int = 0
    evidence: float = 0.0

    @property
    def biased(self) -> bool:
        """Return whether the evidence would arise by chance less than once in 10^12 results."""
        return self.evidence >= EVIDENCE

    def saw(self, spots: int, misrounded: int) -> None:
        """Count the elements of one result."""
        self.spots += spots
        self.misrounded += misrounded
        gained = misrounded * _FOR_A_WRONG + (spots - misrounded) * _FOR_A_RIGHT
        self.evidence = max(0.0, self.evidence + gained)


@dataclass(slots=True)
class Reputation:
    """One device's record of right and wrong results.

    Attributes:
        right: number of checked results that were right.
        wrong: number of checked results that were wrong.
        penalty: points for wrong results, minus forgiven points.
        atoned: right results since the device got a penalty or since a point was last forgiven.
    """

    right: int = 0
    wrong: int = 0
    penalty: float = 0.0
    atoned: int = 0

    @property
    def known(self) -> bool:
        """Return whether the device was right often enough, and never wrong, to be sampled."""
        return not self.wrong and self.right >= KNOWN_AFTER

    @property
    def quarantined(self) -> bool:
        """Return whether the penalty has reached `QUARANTINE`."""
        return self.penalty >= QUARANTINE

    def was_right(self) -> None:
        """Count a checked result that is right."""
        self.right += 1
        if not self.penalty:
            return
        self.atoned += 1
        if self.atoned >= FORGIVEN_BY:
            self.atoned = 0
            self.penalty = max(0.0, self.penalty - 1)

    def was_wrong(self, how: Wrong) -> None:
        """Count a checked result that is wrong."""
        self.wrong += 1
        self.penalty += how.value


@dataclass(slots=True)
class Suspects:
    """Possibly corrupt arrays on a device, so that one flipped bit counts as one fault.

    A flipped bit in a device's copy of a strip makes every result of that strip wrong. Only the
    first such result counts, and the PS sends the strip again. Wrong results of runs sent before
    that are excused as long as one array is an input of all of them. A device that answers
    everything wrong soon has two wrong results without a common array.
    """

    common: frozenset[int] = frozenset()
    excused_runs: int = 0  # the last run sent before the array was sent again

    def explains(self, run: int, inputs: frozenset[int]) -> bool:
        """Return whether a wrong result may come from the same flipped bit as the previous one."""
        shared = self.common & inputs
        if run > self.excused_runs or not shared:
            return False
        self.common = shared
        return True

    def begin(self, inputs: frozenset[int], last_run: int) -> None:
        """Record a wrong result that counts; `last_run` is the last run sent to the device."""
        self.common, self.excused_runs = inputs, last_run
