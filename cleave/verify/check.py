"""Freivalds checks of result blocks, with a tolerance for rounding errors.

For a block C = A B that a device returned and a secret random vector r, C r must equal A (B r).
This test needs three matrix-vector products instead of a matrix product (Freivalds 1977). Each GEMM
is tested with two independent vectors (four for 16-bit operands) that are never used again
(`cleave.verify.products`). A block wider than `products.GROUP` columns is tested in groups of
columns.

A row is *in doubt* if its residual (the difference of C r and A (B r)) exceeds `ROW_LIMIT` standard
deviations of the rounding error (`cleave.verify.rounding.variance`). To detect noise spread over
many rows, all rows are in doubt if the mean square of their residuals exceeds `SPREAD_LIMIT`
variances. The standard deviation comes from a model, so a row in doubt is not proof of a fault.
Rows in doubt are recomputed in double precision. A device is blamed only for elements that no order
of summation in fp32 can explain. Other rows in doubt are replaced by the recomputed rows, without
blame.

The rounding of 16-bit results hides errors of similar size, even systematic errors. So a few random
elements of each 16-bit block are recomputed. An element that no order of summation explains is a
fault. Misrounded elements are counted, and `Reputation` judges the count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from cleave import arrays
from cleave.arrays import Buffer, Doubles, DType
from cleave.gemm import Block, Span
from cleave.verify.products import SecretProducts
from cleave.verify.projection import Bounds, Pass, numpy_pass
from cleave.verify.rounding import Product, variance

ROW_LIMIT: Final = 6.0
SPREAD_LIMIT: Final = 1.5
# Minimum norm of the errors, relative to the exact elements, of a block that is wrong as a whole.
# At least half of its rows must be wrong, too.
GROSS: Final = 0.1

# Standard deviations above which a single wrong element in a row is always detected. A secret
# vector's smallest entry reduces the error by a quarter, and rounding errors may partly cancel it.
LONE: Final = 2 * ROW_LIMIT

# number of random rows, and of random columns, whose common elements are recomputed (16-bit blocks)
SPOTS: Final = 4
_FEW_ROWS: Final = 20.0  # slack in the sum of squared residuals, for blocks with few rows
_AGAIN_DEPTH: Final = 4096


@dataclass(frozen=True, slots=True)
class Fault:
    """A proven error in a block that a device returned.

    Attributes:
        gross: whether the whole block is wrong. A single flipped bit changes only one element of
            the block, or one row (for a bit of A), or one column (for a bit of B).
    """

    reason: str
    gross: bool = False


@dataclass(frozen=True, slots=True)
class Judgement:
    """The result of checking one block.

    Attributes:
        mended: the block with recomputed rows in place of the rows in doubt; None if no row is in
            doubt, or if the block contains a fault.
    """

    # the error in the block; None if rounding can explain every difference
    fault: Fault | None = None
    mended: Buffer | None = None
    recomputed: int = 0  # number of recomputed rows
    spots: int = 0  # number of randomly sampled elements that were recomputed
    misrounded: int = 0  # number of sampled elements that the device did not round correctly


@dataclass(slots=True)
class _CountedPass:
    """A `Pass` that counts the bytes read and the operations of one GEMM's check.

    A `_CountedPass` must not reference its `GemmCheck`. A reference cycle would keep the matrices
    in memory until Python's garbage collector runs.
    """

    project: Pass
    read_bytes: int = 0
    flops: int = 0

    def __call__(
        self,
        matrix: Buffer,
        vectors: Doubles,
        weights: Doubles | None,
        bounds: Bounds | None = None,
    ) -> tuple[Doubles, Doubles]:
        self.read_bytes += matrix.nbytes
        self.flops += 2 * (len(vectors) + (weights is not None)) * matrix.array.size
        return self.project(matrix, vectors, weights, bounds)


class GemmCheck:
    """Checks all result blocks of one GEMM.

    Args:
        a, b: the operands after any transposition, shapes (M, K) and (K, N).
        blocks: the GEMM's blocks, which determine the parts of A and B that are read together.
        rng: draws the secret vectors and samples. Seed it from the operating system's randomness,
            so that devices cannot predict the vectors.
        project: multiplies matrices by the secret vectors.

    Attributes:
        largest: the largest residual so far in blocks without a row in doubt, relative to the
            tolerance.
    """

    def __init__(
        self,
        a: Buffer,
        b: Buffer,
        blocks: Iterable[Block],
        rng: np.random.Generator,
        project: Pass = numpy_pass,
    ) -> None:
        self.largest = 0.0
        self._a = a
        self._b = b
        self._rng = rng
        self._project = _CountedPass(project)
        self._products = SecretProducts(a, b, list(blocks), rng, self._project)

    @property
    def read_bytes(self) -> int:
        """Return the number of bytes of A, B and results read so far, including repeated reads."""
        return self._project.read_bytes

    @property
    def flops(self) -> int:
        """Return the number of floating-point operations so far, two for a multiply-add."""
        return self._project.flops

    def judge(self, block: Block, result: Buffer) -> Judgement:
        """Check one block that a device returned, shape (m, n).

        A non-finite element is accepted if the exact element is not finite, or if a partial sum may
        overflow in some order of summation.
        """
        with np.errstate(all="ignore"):
            doubt = self._doubt(block, result)
            if doubt.any():
                return self._recompute(block, result, doubt)
            if result.dtype is not DType.FP32:
                return self._spots(block, result)
        return Judgement()

    def _doubt(self, block: Block, result: Buffer) -> npt.NDArray[np.bool_]:
        """Return a mask of the rows in doubt (see the module docstring), shape (m,)."""
        expected = self._products.of(block)
        columns = self._products.columns(block.n)
        if result.dtype is DType.FP32:
            # First try the smallest possible tolerance, which honest results usually meet. It does
            # not require the sums of squares of the results.
            found, _ = self._project(result, columns.vectors, None, columns.bounds)
            found -= expected.products
            share = np.square(found, out=found)  # squared residuals, relative to the variance
            share *= expected.precision
            largest = float(share.max(initial=0))
            if largest <= ROW_LIMIT**2 and (share.sum((1, 2)) <= _most_spread(share)).all():
                self.largest = max(self.largest, math.sqrt(largest) / ROW_LIMIT)
                return np.zeros(block.m.size, np.bool_)
        found, lengths = self._project(result, columns.vectors, columns.weights, columns.bounds)
        rounding = variance(
            expected.a_squares, expected.b_squares[:, None], lengths, columns.totals[:, None],
            block.k.size, result.dtype,
        )  # fmt: skip
        found -= expected.products
        share = np.square(found, out=found)  # squared residuals, relative to the variance
        share /= rounding[:, None]
        doubt = ~(share.max((0, 1)) <= ROW_LIMIT**2)  # NaN is also in doubt
        if not doubt.any():
            self.largest = max(self.largest, math.sqrt(share.max(initial=0)) / ROW_LIMIT)
        spread = share.sum((1, 2))
        certain = share.max((1, 2)) <= ROW_LIMIT**2  # groups without a row in doubt
        noisy = certain & (spread > _most_spread(share))
        return np.asarray(doubt | noisy.any())

    def _recompute(self, block: Block, result: Buffer, doubt: npt.NDArray[np.bool_]) -> Judgement:
        """Recompute the rows in doubt (or, if at least half are, all rows) in double precision."""
        if 2 * doubt.sum() >= doubt.size:
            doubt = np.ones_like(doubt)
        rows = np.flatnonzero(doubt)
        own = self._product(block.m.start + rows, np.arange(block.n.start, block.n.stop), block.k)
        values = Buffer(result.array[rows], result.dtype).float32()
        wrong = ~own.may_be(values, result.dtype)
        recomputed = len(rows)
        if wrong.any():
            return Judgement(_fault(block, rows, wrong, values, own), recomputed=recomputed)
        finite = np.isfinite(own.exact).all(1) & np.isfinite(values).all(1)
        mended = arrays.empty(block.m.size, block.n.size, result.dtype)
        mended.array[...] = result.array
        mended.array[rows[finite]] = own.rounded(result.dtype)[finite]
        return Judgement(mended=mended, recomputed=recomputed)

    def _spots(self, block: Block, result: Buffer) -> Judgement:
        """Compare a few random elements of a 16-bit block with recomputed elements."""
        rows = self._rng.integers(0, block.m.size, min(SPOTS, block.m.size))
        columns = self._rng.integers(0, block.n.size, min(SPOTS, block.n.size))
        own = self._product(block.m.start + rows, block.n.start + columns, block.k)
        values = Buffer(result.array[np.ix_(rows, columns)], result.dtype).float32()
        wrong = ~own.may_be(values, result.dtype)
        misrounded = int((~own.likely(values, result.dtype)).sum())
        fault = _fault(block, rows, wrong, values, own) if wrong.any() else None
        return Judgement(fault, spots=values.size, misrounded=misrounded)

    def _product(
        self, rows: npt.NDArray[np.int64], columns: npt.NDArray[np.int64], k: Span
    ) -> Product:
        """Multiply rows of A by columns of B in double precision, over the depth range `k`."""
        parts = []
        for start in range(k.start, max(k.stop, k.start + 1), _AGAIN_DEPTH):
            depth = slice(start, min(k.stop, start + _AGAIN_DEPTH))
            a = Buffer(self._a.array[rows, depth], self._a.dtype).float32().astype(np.float64)
            b = Buffer(self._b.array[depth, columns], self._b.dtype).float32().astype(np.float64)
            parts.append(Product.of(a, b))
        self._project.flops += 4 * len(rows) * len(columns) * k.size
        return sum(parts[1:], parts[0])


def _most_spread(share: Doubles) -> float:
    """Return the sum of squared residuals above which a whole group of columns is in doubt."""
    return SPREAD_LIMIT * float(share[0].size) + _FEW_ROWS


def _fault(
    block: Block,
    rows: npt.NDArray[np.int64],
    wrong: npt.NDArray[np.bool_],
    values: npt.NDArray[np.float32],
    own: Product,
) -> Fault:
    """Return a fault whose reason describes the wrong element with the largest error."""
    off = np.where(wrong, np.abs(values - own.exact), 0)
    gross = (
        2 * int(wrong.any(1).sum()) >= max(3, block.m.size)
        and int(wrong.any(0).sum()) > 1
        and not np.linalg.norm(off) < GROSS * np.linalg.norm(own.exact)
    )
    i, j = np.unravel_index(int(np.nan_to_num(off, nan=np.inf).argmax()), off.shape)
    said, exact = float(values[i, j]), float(own.exact[i, j])
    return Fault(
        f"row {block.m.start + int(rows[i])} has an element of {said:.6g}, but the product is "
        f"{exact:.6g}, and no order of summation explains the difference"
        f"{'; the whole block is wrong' if gross else ''}",
        gross,
    )
