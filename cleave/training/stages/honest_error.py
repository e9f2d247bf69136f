"""Bounds on the difference between an honest device's result and the same result computed locally.

Devices round differently: they sum in other orders, and some fuse multiplication and addition. The
effect depends on the layer, its values and the parameter. So an error is compared with the size of
the elements that have it, and with the effect of rounding on these elements.

*Size of the elements.* An optimizer such as AdamW updates every element by about the same amount,
even if its gradient is small. So small elements need the same relative accuracy as large ones.
Errors are measured separately for each parameter and each size of elements.

*Effect of rounding.* It is measured by repeating the work with operations that round more coarsely
than a device may (`cleave.graphs.noise`). If terms cancel, an honest result may consist of rounding
alone: the gradient of a key projection's bias is 0 in exact arithmetic. Layers may also have
*kinks*. The derivative of ReLU is 0 or 1; if rounding decides which, gradients of two honest
devices may differ by a hundredth of their largest element.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from cleave.arrays import Array, Doubles, DType
from cleave.machine.graph_self_test import LARGEST_ERROR

NEGLIGIBLE: Final = 1e-3
"""Relative errors up to this do not affect training."""

ROUNDING: Final = LARGEST_ERROR
"""Largest relative error of an operation, which devices check in a self-test."""

MOST_REPEATS: Final = 32
"""Maximum number of repetitions, after which rounding does not explain an error.

A value at a kink falls on each side in half of the repetitions. The probability that it falls on
the same side in all of them is 2**-32.
"""

_LEAST_SHARE: Final = 0.01
"""The smallest elements are grouped until the group has this fraction of all elements."""

_UNDERFLOW: Final = 2.0**-100
"""Errors below this may come from intermediate values that some processors flush to 0."""

_HALF_STEP: Final = {DType.BF16: (8, -126), DType.FP16: (11, -14)}
"""Number of significant bits and smallest exponent, by dtype."""

_PROOF_BITS: Final = 2.0
_FORGIVEN_BITS: Final = 0.1
_TINY: Final = float(np.finfo(np.float64).tiny)
_EXPONENTS: Final = 256  # of fp32
_EXPONENT: Final = np.uint32(0x7F800000)
_PART: Final = 2**18


class Magnitudes:
    """Measures the errors of an array separately for elements of different sizes.

    Each measure has the unit of an element. The first measures are the root mean square error of
    each group of elements. The next are the same for the component of the errors along the
    elements, which shows a common factor but hardly any random errors. The last is the largest
    error.

    Args:
        wanted: the right values.

    Attributes:
        sizes: size of the elements that each measure covers.
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
        """Return all measures of the given errors.

        Returns:
            The measures; all infinity if an error is infinite.
        """
        error = error.reshape(-1)
        largest = float(np.abs(error).max(initial=0.0))
        if not 0.0 < largest < math.inf:
            return np.full(self.sizes.shape, largest)
        _, squares, products = (self._merged(each) for each in self._sums(error))
        along = np.abs(products) / np.maximum(self._norms, _TINY)
        roots = np.sqrt(self._counts)
        return np.array([*np.sqrt(squares) / roots, *along / roots, largest])

    def _sums(self, error: Array) -> Doubles:
        """Sum errors in groups of elements with similar exponents, two exponents per group.

        Returns:
            By group, the number of elements, the sum of squared errors, and the sum of the errors
            times the elements; shape (3, groups).
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
        """Merge the groups of the smallest elements."""
        return np.array([sums[: self._least + 1].sum(), *sums[self._least + 1 :]])


@dataclass(slots=True)
class Comparison:
    """Compares a device's result with the local result.

    Attributes:
        magnitudes: measures errors against the local result.
        wanted: the local result.
        found: errors of the device's result, by measure.
        rounding: largest errors of the repetitions, by measure.
    """

    magnitudes: Magnitudes
    wanted: Array
    found: Doubles
    rounding: Doubles = field(init=False)

    def __post_init__(self) -> None:
        self.rounding = np.zeros_like(self.found)

    @classmethod
    def of(cls, found: Array, wanted: Array, dtype: DType) -> Comparison:
        """Compare arrays of equal size; see `error_of`."""
        wanted = wanted.reshape(found.shape)
        magnitudes = Magnitudes(wanted)
        return cls(magnitudes, wanted, magnitudes.measures(error_of(found, wanted, dtype)))

    def repeated(self, again: Array) -> None:
        """Record the result of a repetition with coarser rounding."""
        error = error_of(again.reshape(self.wanted.shape), self.wanted)
        self.rounding = np.maximum(self.rounding, self.magnitudes.measures(error))

    @property
    def excess(self) -> float:
        """Return the largest ratio, over all measures, of the error to the explained error."""
        return float(self._excesses.max(initial=0.0))

    @property
    def worst(self) -> tuple[float, float, float]:
        """Return the error with the largest excess, its explained part, and the elements' size."""
        at = int(self._excesses.argmax())
        return float(self.found[at]), float(self._explained[at]), float(self.magnitudes.sizes[at])

    @property
    def _explained(self) -> Doubles:
        return np.maximum(NEGLIGIBLE * self.magnitudes.sizes, self.rounding) + _UNDERFLOW

    @property
    def _excesses(self) -> Doubles:
        with np.errstate(invalid="ignore"):
            return np.nan_to_num(self.found / self._explained, posinf=math.inf)


@dataclass(slots=True)
class Evidence:
    """Accumulates the evidence of audits against one device; honest devices stay near 0.

    An error of n times the explained error adds log2(n) bits, up to `_PROOF_BITS`. An explained
    error subtracts `_FORGIVEN_BITS`.

    Attributes:
        bits: current evidence in bits, at least 0.
    """

    bits: float = 0.0

    def add(self, excess: float) -> bool:
        """Add an audit; return True, and reset the evidence, once it proves the device wrong.

        Args:
            excess: ratio of the largest error to the explained error.
        """
        found = min(math.log2(excess), _PROOF_BITS) if excess > 1 else -_FORGIVEN_BITS
        self.bits = max(0.0, self.bits + found)
        if self.bits < _PROOF_BITS:
            return False
        self.bits = 0.0
        return True


def error_of(found: Array, wanted: Array, dtype: DType = DType.FP32) -> Array:
    """Return the errors of values that a device rounded for sending.

    The error that rounding to nearest explains, half a step of the dtype, is subtracted. So 16-bit
    values are judged as strictly as fp32 values.

    Args:
        found: received values in fp32.
        wanted: right values before rounding, of the same shape.
        dtype: dtype to which `found` was rounded.

    Returns:
        Signed errors; 0 for the same infinity or two NaNs; infinity for other non-finite pairs.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        off = found - wanted
        if dtype in _HALF_STEP:
            digits, least = _HALF_STEP[dtype]
            powers = (np.ascontiguousarray(found).view(np.uint32) & _EXPONENT).view(np.float32)
            half = np.maximum(powers, np.float32(2.0**least)) * np.float32(2.0**-digits)
            off = np.sign(off) * np.maximum(np.abs(off) - half, 0)
        same = (found == wanted) | (np.isnan(found) & np.isnan(wanted))  # the run may diverge
    off = np.where(same, np.float32(0), off)
    return np.where(np.isfinite(off), off, np.float32(np.inf))


def moved(values: Array, random: np.random.Generator | None) -> Array:
    """Return fp32 values moved up or down at random by `ROUNDING`; unchanged without `random`."""
    if random is None:
        return values
    up = random.random(values.shape, np.float32) < 0.5
    return values * np.where(up, np.float32(1 + ROUNDING), np.float32(1 - ROUNDING))
