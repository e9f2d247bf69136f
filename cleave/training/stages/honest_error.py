"""How far what an honest device returned may be from the same, computed again here.

Devices round differently: they add in other orders, and some fuse a multiplication with an
addition. How far that moves an element depends on the layer, its numbers and the parameter. So an
error is compared with the elements that it is in, and with what rounding does to just these.

*The elements that it is in.* An optimizer such as AdamW gives every element an update of about the
same size, however small its gradient is. So small elements must be as exact as large ones. Errors
are measured apart for each parameter, and in it for each size of elements.

*What rounding does* is measured, by repeating the work with operations that round more coarsely
than those of any device may (`cleave.graphs.noise`). Where numbers cancel, an honest result may be
nothing but rounding: the gradient of the bias of a key projection is 0 in exact arithmetic. Layers
may also have *kinks*: the derivative of ReLU is 0 or 1, and where rounding decides which, gradients
of two devices that are both right differ by a hundredth of their largest element.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from cleave.arrays import Array, Doubles, DType
from cleave.machine.graph_self_test import LARGEST_ERROR

NEGLIGIBLE: Final = 1e-3
"""Errors of this share of the elements that they are in train the same model."""

ROUNDING: Final = LARGEST_ERROR
"""How far off each operation may be, relative to its result; devices test themselves for that."""

MOST_REPEATS: Final = 32
"""How often work is repeated before more is found than rounding explains.

A number at a kink is on either side in half of the repetitions; that one which decides is on the
same side in all has a chance of 2**-32.
"""

_LEAST_SHARE: Final = 0.01
"""The smallest elements of an array are taken together until they are this share of all."""

_UNDERFLOW: Final = 2.0**-100
"""Smaller errors come from numbers on the way that some processors take for 0."""

_HALF_STEP: Final = {DType.BF16: (8, -126), DType.FP16: (11, -14)}
"""By dtype, the binary digits after which numbers are cut, and the least exponent."""

_PROOF_BITS: Final = 2.0
_FORGIVEN_BITS: Final = 0.1
_TINY: Final = float(np.finfo(np.float64).tiny)
_EXPONENTS: Final = 256  # of fp32
_EXPONENT: Final = np.uint32(0x7F800000)
_PART: Final = 2**18


class Magnitudes:
    """Measures errors of an array, apart for elements of different size.

    Each measure has the unit of an element. The first ones are the root mean square of the errors
    in each group of elements. As many more are the same of only that part of the errors that is
    along the elements: a common factor shows there, and random errors hardly do. The last one is
    the largest error of all.

    Args:
        wanted: the right values.

    Attributes:
        sizes: by measure, how large the elements are whose errors it tells.
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
        """Return how large the errors of all elements are, by each measure.

        Returns:
            Infinity throughout where an error is not finite.
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
        """Sum up by exponent of elements, two exponents together, a part of the array at a time.

        Returns:
            How many elements there are; the sums of the errors' squares; the sums of the errors
            times the elements.
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
        """Put the groups of the smallest elements together."""
        return np.array([sums[: self._least + 1].sum(), *sums[self._least + 1 :]])


@dataclass(slots=True)
class Comparison:
    """Compares what a device returned with the same, computed here.

    Attributes:
        magnitudes: of what was computed here.
        wanted: what was computed here.
        found: the errors of what came, by measure.
        rounding: the largest errors of repetitions, by measure.
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
        """Take note of a repetition that rounded coarsely."""
        error = error_of(again.reshape(self.wanted.shape), self.wanted)
        self.rounding = np.maximum(self.rounding, self.magnitudes.measures(error))

    @property
    def excess(self) -> float:
        """Return the largest error, by any measure, over what rounding explains."""
        return float(self._excesses.max(initial=0.0))

    @property
    def worst(self) -> tuple[float, float, float]:
        """Return the error with the largest excess, what rounding explains, and its elements."""
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
    """Adds up what audits found of one device, as a cumulative sum: honest ones stay near 0.

    An error of n times what rounding explains adds log2(n) bits. An error that rounding explains
    takes some away.

    Attributes:
        bits: that have been added.
    """

    bits: float = 0.0

    def add(self, excess: float) -> bool:
        """Add an audit; return True once it proves, with those before, that the device is wrong.

        Args:
            excess: the largest error, over what rounding explains.
        """
        found = min(math.log2(excess), _PROOF_BITS) if excess > 1 else -_FORGIVEN_BITS
        self.bits = max(0.0, self.bits + found)
        if self.bits < _PROOF_BITS:
            return False
        self.bits = 0.0
        return True


def error_of(found: Array, wanted: Array, dtype: DType = DType.FP32) -> Array:
    """Return by how much numbers are wrong that a device rounded when it sent them.

    A number that is the right rounding of what is wanted is not wrong, and others are wrong by what
    half a step of the dtype does not explain. So 16-bit numbers are judged as finely as others.

    Args:
        found: what came, in fp32.
        wanted: the right values before they are rounded, of the same shape.
        dtype: what `found` was rounded to.

    Returns:
        0 where both are the same infinity or NaN; infinity where one alone is not finite.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        off = found - wanted
        if dtype in _HALF_STEP:
            digits, least = _HALF_STEP[dtype]
            powers = (np.ascontiguousarray(found).view(np.uint32) & _EXPONENT).view(np.float32)
            half = np.maximum(powers, np.float32(2.0**least)) * np.float32(2.0**-digits)
            off = np.sign(off) * np.maximum(np.abs(off) - half, 0)
        same = (found == wanted) | (np.isnan(found) & np.isnan(wanted))  # a run that diverges
    off = np.where(same, np.float32(0), off)
    return np.where(np.isfinite(off), off, np.float32(np.inf))


def moved(values: Array, random: np.random.Generator | None) -> Array:
    """Return fp32 numbers that differ by rounding, up or down at random; as they are for None."""
    if random is None:
        return values
    up = random.random(values.shape, np.float32) < 0.5
    return values * np.where(up, np.float32(1 + ROUNDING), np.float32(1 - ROUNDING))
