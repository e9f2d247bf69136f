"""Bounds on the difference between an honest device's result and the same result computed locally.

Devices round differently: summation orders differ, and some devices use fused multiply-add.
Optimizers such as AdamW change every parameter element by about the same amount, even if the
element's gradient is small. So an audit measures errors separately for each parameter and for each
magnitude of elements.

To estimate the effect of rounding, an audit recomputes results with added noise that exceeds the
rounding error of any honest device (see `cleave.graphs.noise`). If terms cancel, an honest result
may consist of rounding errors only. For example, the gradient of a key projection's bias is 0 in
exact arithmetic. At *kinks*, such as that of ReLU, rounding decides which of two derivatives
applies. The gradients of two honest devices may then differ by 1 % of the largest gradient element.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from cleave.arrays import Array, Doubles, DType
from cleave.machine.graph_trials import LARGEST_ERROR

NEGLIGIBLE: Final = 1e-3  # largest relative error that does not affect training

ROUNDING: Final = LARGEST_ERROR  # allowed relative error of a graph operation in the self-test

# In each recomputation, a value at a kink falls on either side with probability 1/2. The
# probability that no recomputation falls on the same side as the device is 2**-32.
MOST_REPEATS: Final = 32

_LEAST_SHARE: Final = 0.01  # minimum fraction of all elements in the group of smallest elements

_UNDERFLOW: Final = 2.0**-100  # error that is always allowed, as some processors flush to 0

# Number of significant bits and smallest normal exponent of a dtype.
_HALF_STEP: Final = {DType.BF16: (8, -126), DType.FP16: (11, -14)}

_PROOF_BITS: Final = 2.0
_FORGIVEN_BITS: Final = 0.1
_TINY: Final = float(np.finfo(np.float64).tiny)
_EXPONENTS: Final = 256  # number of exponents of fp32 values
_EXPONENT: Final = np.uint32(0x7F800000)
_PART: Final = 2**18


class Magnitudes:
    """Error measures of an array, computed separately for elements of different magnitudes.

    For n groups, the 2 n + 1 error measures are, in this order:

    - the root mean square (RMS) error of each group,
    - the RMS of the projection of each group's errors onto the correct values, which is large for a
      wrong common factor and small for random errors,
    - the largest absolute error of all elements.

    Attributes:
        sizes: for each error measure, the magnitude of the correct values. This is the RMS of the
            group or, for the last measure, the largest absolute value.
    """

    def __init__(self, wanted: Array) -> None:
        self._wanted = np.ascontiguousarray(wanted, np.float32).reshape(-1)
        self._least = 0
        finite = np.where(np.isfinite(self._wanted), self._wanted, np.float32(0))
        counts, squares, _ = self._sums(finite)
        least = _LEAST_SHARE * self._wanted.size
        self._least = int(np.searchsorted(np.cumsum(counts), least))
        self._counts = np.maximum(1, self._merged(counts))
        self._norms = np.sqrt(self._merged(squares))
        own = self._norms / np.sqrt(self._counts)
        self.sizes: Doubles = np.array([*own, *own, np.abs(finite).max(initial=0.0)])

    def measures(self, error: Array) -> Doubles:
        """Return all error measures of signed errors. All are infinite if any error is infinite."""
        error = error.reshape(-1)
        largest = float(np.abs(error).max(initial=0.0))
        if not 0.0 < largest < math.inf:
            return np.full(self.sizes.shape, largest)
        _, squares, products = (self._merged(each) for each in self._sums(error))
        along = np.abs(products) / np.maximum(self._norms, _TINY)
        roots = np.sqrt(self._counts)
        return np.array([*np.sqrt(squares) / roots, *along / roots, largest])

    def likely(self, error: Array) -> Doubles:
        """Return the error measures to expect of other errors with the distribution of `error`.

        The projection of n random errors has the standard deviation RMS / sqrt(n), so the
        projection of a single sample may be small by chance.
        """
        found = self.measures(error)
        groups = len(self._counts)
        deviations = found[:groups] / np.sqrt(self._counts)
        found[groups:-1] = np.maximum(found[groups:-1], deviations)
        return found

    def _sums(self, error: Array) -> Doubles:
        """Return each group's count, sum of squared errors, and sum of error times correct value.

        The shape is (3, groups). A group contains all elements with two adjacent exponents.
        """
        found = np.zeros((3, _EXPONENTS // 2))
        for first in range(0, error.size, _PART):
            wanted = self._wanted[first : first + _PART]
            wanted = np.where(np.isfinite(wanted), wanted, np.float32(0))
            groups = (wanted.view(np.uint32) >> 24 & 0x7F).astype(np.intp)
            off = error[first : first + _PART].astype(np.float64)
            for sums, each in zip(found, (None, off * off, off * wanted), strict=True):
                sums += np.bincount(groups, each, _EXPONENTS // 2)
        return found

    def _merged(self, sums: Doubles) -> Doubles:
        """Merge the groups of the smallest elements into one group.

        The merged group contains at least the fraction `_LEAST_SHARE` of all elements.
        """
        return np.array([sums[: self._least + 1].sum(), *sums[self._least + 1 :]])


@dataclass(slots=True)
class Comparison:
    """Comparison of a device's result with the local result, `wanted`.

    Attributes:
        found: error measures of the device's result.
        margin: error that rounding explains, as a multiple of `rounding`.
        rounding: for each error measure, the largest value in recomputations with coarser rounding.
    """

    magnitudes: Magnitudes
    wanted: Array
    found: Doubles
    margin: float = 1.0
    rounding: Doubles = field(init=False)

    def __post_init__(self) -> None:
        self.rounding = np.zeros_like(self.found)

    @classmethod
    def of(cls, found: Array, wanted: Array, dtype: DType, margin: float = 1.0) -> Comparison:
        """Compare a device's result, upcast from the wire dtype `dtype`, with the local result."""
        wanted = wanted.reshape(found.shape)
        magnitudes = Magnitudes(wanted)
        measured = magnitudes.measures(error_of(found, wanted, dtype))
        return cls(magnitudes, wanted, measured, margin)

    def repeated(self, again: Array) -> None:
        """Record the result of a local recomputation with coarser rounding."""
        error = error_of(again.reshape(self.wanted.shape), self.wanted)
        self.rounding = np.maximum(self.rounding, self.magnitudes.likely(error))

    @property
    def excess(self) -> float:
        """Return the largest ratio of an error measure to the value that rounding explains."""
        return float(self._excesses.max(initial=0.0))

    @property
    def worst(self) -> tuple[float, float, float]:
        """Return the error measure with the largest excess, its explained value, and its size.

        The explained value is the largest error that rounding explains. The size is from
        `Magnitudes.sizes`.
        """
        at = int(self._excesses.argmax())
        return float(self.found[at]), float(self._explained[at]), float(self.magnitudes.sizes[at])

    @property
    def _explained(self) -> Doubles:
        return (
            np.maximum(NEGLIGIBLE * self.magnitudes.sizes, self.margin * self.rounding) + _UNDERFLOW
        )

    @property
    def _excesses(self) -> Doubles:
        with np.errstate(invalid="ignore"):
            return np.nan_to_num(self.found / self._explained, posinf=math.inf)


@dataclass(slots=True)
class Evidence:
    """Evidence against one device, accumulated over its audits; near 0 for honest devices.

    If rounding does not explain an error, the ratio of the error to the explained error adds
    log2(ratio) bits, up to `_PROOF_BITS`. If rounding explains it, `_FORGIVEN_BITS` are subtracted.
    """

    bits: float = 0.0

    def add(self, excess: float) -> bool:
        """Add an audit's `Comparison.excess`. Return True if the total now proves a fault.

        A total that proves a fault is reset to 0.
        """
        found = min(math.log2(excess), _PROOF_BITS) if excess > 1 else -_FORGIVEN_BITS
        self.bits = max(0.0, self.bits + found)
        if self.bits < _PROOF_BITS:
            return False
        self.bits = 0.0
        return True


def error_of(found: Array, wanted: Array, dtype: DType = DType.FP32) -> Array:
    """Return the signed errors of values that a device rounded to a dtype before sending.

    Half the distance between adjacent values of the dtype is subtracted from each error's
    magnitude, because rounding to nearest explains that much. The error of two equal infinities
    or of two NaNs is 0. Any other pair with a non-finite value has an infinite error.
    Args:
        found: the device's values, upcast to fp32.
        wanted: correct fp32 values before rounding, in the shape of `found`.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        off = found - wanted
        if dtype in _HALF_STEP:
            digits, least = _HALF_STEP[dtype]
            powers = (np.ascontiguousarray(found).view(np.uint32) & _EXPONENT).view(np.float32)
            half = np.maximum(powers, np.float32(2.0**least)) * np.float32(2.0**-digits)
            off = np.sign(off) * np.maximum(np.abs(off) - half, 0)
        # Both values are NaN if the training run diverges.
        same = (found == wanted) | (np.isnan(found) & np.isnan(wanted))
    off = np.where(same, np.float32(0), off)
    return np.where(np.isfinite(off), off, np.float32(np.inf))


def moved(values: Array, random: np.random.Generator | None) -> Array:
    """Multiply each value by 1 + `ROUNDING` or 1 - `ROUNDING`, chosen at random.

    If `random` is None, return `values` unchanged.
    """
    if random is None:
        return values
    up = random.random(values.shape, np.float32) < 0.5
    return values * np.where(up, np.float32(1 + ROUNDING), np.float32(1 - ROUNDING))
