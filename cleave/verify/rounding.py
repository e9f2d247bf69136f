"""The errors that rounding can cause in a product summed in fp32, in any order.

Two limits have two purposes. `variance` models honest devices, and decides which rows of a block
are recomputed. `Product.may_be` is a bound that no order of summation exceeds, and decides who is
blamed. `Product.likely` lies between them: sums with independent roundings stay within it. An
element outside is counted, and only many of them are significant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cleave import arrays
from cleave.arrays import Buffer, DType

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Truth = npt.NDArray[np.bool_]

UNIT: Final = 2.0**-24
"""The unit roundoff of fp32."""

OUT_UNIT: Final = {DType.FP32: 0.0, DType.BF16: 2.0**-8, DType.FP16: 2.0**-11}
"""The unit roundoff of a result's dtype; 0 if the sum is returned unrounded."""

LEAST: Final = {DType.FP32: 2.0**-126, DType.BF16: 2.0**-126, DType.FP16: 2.0**-25}
"""Absolute error of the smallest numbers: the smallest normal number, for devices that flush to
zero; for fp16 half of its spacing, since honest devices keep its subnormal numbers."""

LARGEST_FP32: Final = 2.0**128 * (1 - 2.0**-24)

_FLUSHED: Final = {DType.FP32: 2.0**-126, DType.BF16: 2.0**-126, DType.FP16: 2.0**-14}
_TRUNCATED_UNIT: Final = 2 * UNIT  # for adders that truncate instead of rounding, as in some GPUs
_PROBABLE: Final = 6.0  # standard deviations of a sum of roundings (Higham and Mary 2019)


def variance(
    a_square: Doubles,
    b_square: Doubles,
    length: Doubles,
    total: Doubles | float,
    depth: int,
    dtype: DType,
) -> Doubles:
    """Return the variance of a weighted sum of an honest device's rounding errors.

    For a row a of A, columns b_j of weights w_j, depth K, and the results c_j,

        4 u^2 |a|^2 sum w_j^2 |b_j|^2 + (K u^2 / 9 + u_out^2 / 3) sum w_j^2 c_j^2
        + f^2 sum w_j^2 + K g^2 (|a|^2 sum w_j^2 + sum w_j^2 |b_j|^2)

    The first term is for sums whose partial sums drift around zero further than by chance, as in
    training. Chance alone, with sequential summation, gives a twentieth of it. The second is for
    sums of one sign, and for rounding the result to its dtype (u_out). The others are for numbers
    so small that their spacing is absolute: f in results, g in operands.

    Args:
        a_square: |a|^2, any shape.
        b_square: sum of w_j^2 |b_j|^2, same shape.
        length: sum of w_j^2 c_j^2, same shape. No honest result exceeds a_square * b_square;
            larger values do not raise the variance.
        total: sum of w_j^2.
        depth: K.
        dtype: dtype of the results.
    """
    scale = a_square * b_square
    sums = depth * UNIT**2 / 9 + OUT_UNIT[dtype] ** 2 / 3
    operands = depth * LEAST[DType.FP32] ** 2 * (a_square * total + b_square)
    found = 4 * UNIT**2 * scale + sums * np.minimum(length, 1.02 * scale)
    return np.asarray(found + LEAST[dtype] ** 2 * total + operands, np.float64)


@dataclass(frozen=True, slots=True)
class Product:
    """Some elements of a product, in double precision.

    Attributes:
        exact: the elements, shape (rows, columns).
        reach: sum over k of |a_ik b_kj|, the maximum magnitude of any partial sum.
        inputs: sum of |a_ik| and |b_kj| over k: the maximum effect of flushing operands to zero, in
            units of the smallest normal number.
        depth: K.
    """

    exact: Doubles
    reach: Doubles
    inputs: Doubles
    depth: int

    @classmethod
    def of(cls, a: Doubles, b: Doubles) -> Product:
        """Multiply two matrices in double precision.

        Args:
            a, b: shapes (rows, depth) and (depth, columns).
        """
        larger_a, larger_b = np.abs(a), np.abs(b)
        inputs = larger_a.sum(1)[:, None] + larger_b.sum(0)
        return cls(a @ b, larger_a @ larger_b, inputs, a.shape[1])

    def __add__(self, more: Product) -> Product:
        return Product(
            self.exact + more.exact,
            self.reach + more.reach,
            self.inputs + more.inputs,
            self.depth + more.depth,
        )

    def rounded(self, dtype: DType) -> Any:
        """Return the elements in a result's dtype, as stored."""
        return arrays.narrow(self.exact.astype(np.float32), dtype)

    def may_be(self, values: Floats, dtype: DType) -> Truth:
        """Return which values can result from summation in fp32, in any order.

        A sum of K products is off by at most K u times the sum of their magnitudes (Higham,
        Accuracy and Stability of Numerical Algorithms, 3.1), and by twice that with truncation
        instead of rounding. Rounding to the result's dtype keeps order, so every value between the
        roundings of both ends is right. Where a partial sum may overflow, or the exact sum is not
        finite, every non-finite value is right.
        """
        off = (self.depth + 2) * _TRUNCATED_UNIT * self.reach
        within = self._between(values, off, dtype)
        lost = ~np.isfinite(self.exact) | (self.reach + off > LARGEST_FP32)
        right: Truth = within | (lost & ~np.isfinite(values))
        return right

    def likely(self, values: Floats, dtype: DType) -> Truth:
        """Return which values are the right rounding of a sum with independent rounding errors.

        Such a sum is off by at most about sqrt(K) u times the sum of the products' magnitudes, in
        any order (Higham and Mary 2019).
        """
        off = _PROBABLE * np.sqrt(self.depth + 1) * UNIT * self.reach
        lost = ~np.isfinite(self.exact) | (self.reach + off > LARGEST_FP32)
        right: Truth = self._between(values, off, dtype) | lost
        return right

    def _between(self, values: Floats, off: Doubles, dtype: DType) -> Truth:
        with np.errstate(all="ignore"):
            off = off + LEAST[DType.FP32] * (self.depth + self.inputs)
            low, high = (
                _through(np.nextafter(end.astype(np.float32), np.float32(side)), dtype)
                for end, side in ((self.exact - off, -np.inf), (self.exact + off, np.inf))
            )
            flushed = (values == 0) & (np.abs(self.exact) <= _FLUSHED[dtype] + off)
            right: Truth = (low <= values) & (values <= high) | flushed
        return right


def _through(values: Floats, dtype: DType) -> Floats:
    """Round to a dtype and back."""
    return Buffer(arrays.narrow(values, dtype), dtype).float32()
