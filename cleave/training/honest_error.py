"""How far what an honest device returned may be from the same, computed again here.

Devices round differently: they add in other orders, and some fuse a multiplication with an
addition. A layer makes little of that, some 1e-6 of its largest element, with one exception, its
*kinks*: the derivative of ReLU is 0 or 1, and an expert takes a token or does not. Where a number
is so close to a kink that rounding decides on which side it is, gradients differ by a hundredth of
their largest element, and nobody is wrong.

So where more is found than rounding alone explains, the work is repeated with its inputs moved by
as much as rounding does, at random, as stochastic arithmetic does it (Vignes, "A stochastic
arithmetic for reliable scientific computation", 1993). What was returned is right if it is not much
further off than these are from one another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from cleave.arrays import Array, DType

MOST_OFF: Final = {DType.FP32: 1e-4, DType.BF16: 2e-2, DType.FP16: 4e-3}
"""By how much rounding alone may be off, relative to the largest element of what is compared. In
fp32 it is off by some 1e-6; 16-bit numbers are off by what rounding to them costs."""

MOST_REPEATS: Final = 16
"""So often is work repeated with moved inputs before it is called wrong.

A number at a kink is on either side in half of them; that one which decides is on the same side in
all has a chance of 2**-16.
"""

_ROUNDING: Final = 2.0**-19
"""By how much inputs are moved, relative to each: about what rounding adds up to in sums of a
thousand terms, one after another."""

_TIMES_MOVED: Final = 2.0


@dataclass(frozen=True, slots=True)
class Difference:
    """Says how far two arrays are from one another.

    Attributes:
        largest: of their elements' differences; NaN where one alone is no number.
        rms: the root of the mean of their squares.
    """

    largest: float = 0.0
    rms: float = 0.0

    @classmethod
    def between(cls, found: Array, wanted: Array) -> Difference:
        """Compare arrays of equal shape. Where both are the same infinity or NaN they are equal."""
        with np.errstate(invalid="ignore", over="ignore"):
            same = (found == wanted) | (np.isnan(found) & np.isnan(wanted))  # a run that diverges
            off = np.where(same, np.float32(0), np.abs(found - wanted))
            largest = float(off.max(initial=0.0))
            if not 0.0 < largest < np.inf:
                return cls(largest, largest)
            return cls(largest, largest * float(np.sqrt(np.mean(np.square(off / largest)))))

    def or_more(self, other: Difference) -> Difference:
        """Return the larger one of both, for each way to measure it."""
        return Difference(max(self.largest, other.largest), max(self.rms, other.rms))

    def is_honest(self, limit: float, moved: Difference) -> bool:
        """Say whether an honest device may be that far off.

        Both measures count: a kink moves few elements, so that a lie in many is seen although each
        is smaller than what a kink does.

        Args:
            limit: what rounding alone explains.
            moved: how far repetitions with moved inputs were off.
        """
        return (
            self.largest <= limit + _TIMES_MOVED * moved.largest
            and self.rms <= limit + _TIMES_MOVED * moved.rms
        )


def moved(values: Array, random: np.random.Generator | None) -> Array:
    """Return fp32 numbers that differ by rounding, up or down at random; as they are for None."""
    if random is None:
        return values
    up = random.random(values.shape, np.float32) < 0.5
    return values * np.where(up, np.float32(1 + _ROUNDING), np.float32(1 - _ROUNDING))
