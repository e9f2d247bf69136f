"""The errors that rounding can cause in a product summed in fp32, in any order.

Two limits, for two purposes. `variance` models what honest devices do, and decides which rows
of a block are computed again. `Product.may_be` is a bound that no order of summing
exceeds, and decides who is blamed. `Product.likely` lies between them: sums whose roundings are
independent stay within it, so an element outside is counted, and only many of them mean anything.
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
"""The unit roundoff of a result's dtype; 0 where the sum is returned as it is."""

LEAST: Final = {DType.FP32: 2.0**-126, DType.BF16: 2.0**-126, DType.FP16: 2.0**-25}
"""What the smallest numbers are off by where their spacing is absolute: the smallest normal number
for devices that flush to zero, and half of the spacing of fp16, which honest devices keep."""

LARGEST_FP32: Final = 2.0**128 * (1 - 2.0**-24)

_FLUSHED: Final = {DType.FP32: 2.0**-126, DType.BF16: 2.0**-126, DType.FP16: 2.0**-14}
_TRUNCATED_UNIT: Final = 2 * UNIT  # of adders that cut instead of rounding, as some GPUs have
_PROBABLE: Final = 6.0  # standard deviations of a sum of roundings (Higham and Mary 2019)


def variance(
    a_square: Doubles,
    b_square: Doubles,
    length: Doubles,
    total: Doubles | float,
    depth: int,
    dtype: DType,
) -> Doubles:
    """Return the variance of a weighted sum of rounding errors, as honest devices make them.

    For a row a of A, columns b_j of weights w_j, depth K, and the results c_j,

        4 u^2 |a|^2 sum w_j^2 |b_j|^2 + (K u^2 / 9 + u_out^2 / 3) sum w_j^2 c_j^2
        + f^2 sum w_j^2 + K g^2 (|a|^2 sum w_j^2 + sum w_j^2 |b_j|^2)

    The first term is for sums whose partial sums wander about zero, further than chance alone takes
    them, as in training: by chance a sum taken one product after the other makes a twentieth of it.
    The second
    is for sums of one sign, and for the rounding of the result to its dtype (u_out). The others are
    for numbers so small that their spacing is absolute: f in results, g in operands.

    Args:
        a_square: |a|^2, any shape.
        b_square: sum of w_j^2 |b_j|^2, same shape.
        length: sum of w_j^2 c_j^2, same shape. No honest result exceeds a_square * b_square;
            larger values do not raise the variance.
        total: sum of w_j^2.
        depth: K.
        dtype: of the results.
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
        reach: sum over k of |a_ik b_kj|: no partial sum is larger in magnitude.
        inputs: sum of |a_ik| and |b_kj| over k: the most that flushing operands to zero can
            change, in units of the smallest normal number.
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
        """Return which values a device may return that sums in fp32, in whatever order.

        A sum of K products is off by at most K u times the sum of their magnitudes (Higham,
        Accuracy and Stability of Numerical Algorithms, 3.1), twice that where sums are cut off and
        not rounded. Rounding to the result's dtype keeps order, so every value between the
        roundings of both ends is right. Where a partial sum may overflow, every value that is not
        finite is right; the same holds where the exact sum is not finite.
        """
        off = (self.depth + 2) * _TRUNCATED_UNIT * self.reach
        within = self._between(values, off, dtype)
        lost = ~np.isfinite(self.exact) | (self.reach + off > LARGEST_FP32)
        right: Truth = within | (lost & ~np.isfinite(values))
        return right

    def likely(self, values: Floats, dtype: DType) -> Truth:
        """Return which values are the right rounding of a sum whose own roundings are independent.

        Such a sum is off by at most about the square root of K times u times the sum of the
        products' magnitudes, whatever the order (Higham and Mary 2019).
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
