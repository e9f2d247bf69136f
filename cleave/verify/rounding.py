"""Limits on the rounding error of a matrix multiplication that sums in fp32 in any order.

`variance` models honest devices and decides which rows of a block are recomputed. `Product.may_be`
uses a bound that no order of summation exceeds, and decides which devices are blamed. The bound of
`Product.likely` lies between the two. A few elements outside this bound prove nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cleave import arrays
from cleave.arrays import Buffer, Doubles, DType

Floats = npt.NDArray[np.float32]
Truth = npt.NDArray[np.bool_]

UNIT: Final = 2.0**-24  # unit roundoff of fp32

# Unit roundoff of each result dtype; 0 for fp32, since fp32 sums are returned unrounded.
OUT_UNIT: Final = {DType.FP32: 0.0, DType.BF16: 2.0**-8, DType.FP16: 2.0**-11}

# Maximum absolute rounding error near zero. Devices may flush fp32 and bf16 numbers below the
# smallest normal number to zero. For fp16 it is half of the spacing of subnormal numbers.
LEAST: Final = {DType.FP32: 2.0**-126, DType.BF16: 2.0**-126, DType.FP16: 2.0**-25}
LARGEST_FP32: Final = 2.0**128 * (1 - 2.0**-24)
_FLUSHED: Final = {DType.FP32: 2.0**-126, DType.BF16: 2.0**-126, DType.FP16: 2.0**-14}
_TRUNCATED_UNIT: Final = 2 * UNIT  # some GPUs' adders truncate instead of rounding
_PROBABLE: Final = 6.0  # maximum plausible sum of rounding errors, in standard deviations


def variance(
    a_square: Doubles,
    b_square: Doubles,
    length: Doubles,
    total: Doubles | float,
    depth: int,
    dtype: DType,
) -> Doubles:
    """Return the variance of the weighted sum of an honest device's rounding errors in a row.

    For a row a of A, columns b_j of B with weights w_j, depth K, and results c_j, the variance is

            4 u^2 |a|^2 sum w_j^2 |b_j|^2 + (K u^2 / 9 + u_out^2 / 3) sum w_j^2 c_j^2
            + f^2 sum w_j^2 + K g^2 (|a|^2 sum w_j^2 + sum w_j^2 |b_j|^2)

    with the unit roundoffs u of fp32 and u_out of the results. The first term covers partial sums
    that drift further from zero than a random walk, as in training. For a random walk, a twentieth
    of this term would suffice. The second term covers sums of terms with equal signs, and the
    rounding of results. The other terms cover numbers near zero, with an absolute error of at most
    f in results and g in operands (`LEAST`).

    Args:
        a_square: |a|^2, any shape.
        b_square: sum of w_j^2 |b_j|^2, same shape as `a_square`.
        length: sum of w_j^2 c_j^2, same shape as `a_square`. Values above 1.02 * a_square *
            b_square do not raise the variance further, because no honest result reaches them.
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
    """Elements of a matrix product A B in double precision, with bounds on fp32 rounding errors.

    Attributes:
        inputs: sum over k of |a_ik| + |b_kj|, shape (rows, columns). This is the maximum effect of
            flushing operands to zero, in units of the smallest normal number.
    """

    exact: Doubles  # the elements, shape (rows, columns)
    # sum over k of |a_ik b_kj|, the maximum magnitude of any partial sum, same shape
    reach: Doubles
    inputs: Doubles
    depth: int  # number of terms in each sum

    @classmethod
    def of(cls, a: Doubles, b: Doubles) -> Product:
        """Multiply two matrices, shapes (rows, depth) and (depth, columns), in double precision."""
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
        """Return the elements rounded to `dtype`, in the storage format of `cleave.arrays`."""
        return arrays.narrow(self.exact.astype(np.float32), dtype)

    def may_be(self, values: Floats, dtype: DType) -> Truth:
        """Return a mask of the values that summation in fp32 can produce in some order.

        The error of a sum of K products is at most K u times the sum of the products' magnitudes
        (Higham, Accuracy and Stability of Numerical Algorithms, 3.1), and twice that with
        truncation. Rounding is monotonic, so values between the rounded ends of this interval count
        as possible. Where a partial sum may overflow, or the exact sum is not finite, non-finite
        values also count as possible.
        """
        off = (self.depth + 2) * _TRUNCATED_UNIT * self.reach
        within = self._between(values, off, dtype)
        lost = ~np.isfinite(self.exact) | (self.reach + off > LARGEST_FP32)
        right: Truth = within | (lost & ~np.isfinite(values))
        return right

    def likely(self, values: Floats, dtype: DType) -> Truth:
        """Return a mask of the values that are plausible if rounding errors are independent.

        The error of a sum of K products is then at most about sqrt(K) u times the sum of the
        products' magnitudes, in any order (Higham and Mary 2019).
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
    """Round fp32 values to a dtype and convert the rounded values back to fp32."""
    return Buffer(arrays.narrow(values, dtype), dtype).float32()
