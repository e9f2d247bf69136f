"""Checks blocks without recomputing them: Freivalds' test with a tolerance for rounding.

For a block C = A B that a device returned and a secret vector r, C r must be A (B r): three
products with a vector instead of one with a matrix (Freivalds 1977). Each GEMM and column gets two
independent vectors (four for 16-bit operands), drawn fresh and used for nothing else
(`cleave.verify.products`). A block wider than `products.GROUP` columns gets several such tests by
groups of columns. All sums are in double precision.

Honest results are rounded. A row is *in doubt* if its residual exceeds `ROW_LIMIT` standard
deviations of the rounding error (`cleave.verify.rounding.variance`). All rows are in doubt if the
mean square of their residuals exceeds `SPREAD_LIMIT`, which finds noise spread over many rows. The
deviations are a model, so doubt proves nothing. Rows in doubt are recomputed in double precision. A
device is blamed only for elements that no order of summation in fp32 can explain. Other rows in
doubt are replaced by the server's own, without blame.

Rounding of 16-bit results hides errors of its size, even consistent ones. So a few random elements
of each such block are computed exactly. An element that no order of summation explains is a fault.
An element that is merely misrounded is counted, and `Reputation` judges the count.
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
GROSS: Final = 0.1
"""A block with half of its rows wrong is wrong as a whole from this error relative to its norm."""

LONE: Final = 2 * ROW_LIMIT
"""A single error of this many standard deviations in a row is always found: the smallest entry of a
secret vector reduces it by a quarter, and honest rounding may hide some more."""

SPOTS: Final = 4
"""Number of rows, and of columns, whose common elements in a 16-bit block are computed exactly."""

_FEW_ROWS: Final = 20.0  # slack in the sum of squared residuals, for groups with few rows
_AGAIN_DEPTH: Final = 4096


@dataclass(frozen=True, slots=True)
class Fault:
    """An error in a block.

    Attributes:
        reason: a readable description.
        gross: whether the whole block is wrong, which one flipped bit cannot explain: a flipped bit
            in a result spoils an element, one in a device's copy of A a row, and one in its copy of
            B a column.
    """

    reason: str
    gross: bool = False


@dataclass(frozen=True, slots=True)
class Judgement:
    """The result of checking a block.

    Attributes:
        fault: the error in the block; None if rounding can explain every difference.
        mended: the block with the rows in doubt replaced by the server's own; None if no row was in
            doubt, or with a fault.
        recomputed: number of rows that were recomputed.
        spots: number of elements that were computed exactly.
        misrounded: number of those elements that are not correctly rounded.
    """

    fault: Fault | None = None
    mended: Buffer | None = None
    recomputed: int = 0
    spots: int = 0
    misrounded: int = 0


@dataclass(slots=True)
class _CountedPass:
    """Counts the passes of one GEMM's check.

    It is a separate object without matrices: a reference cycle through the check would keep its
    matrices in memory until Python's garbage collector runs.
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
    """The check of all blocks of one GEMM.

    Args:
        a, b: the operands as they enter the product, shapes (M, K) and (K, N).
        blocks: the blocks of the plan, which tell which columns and depths occur together.
        rng: draws the secret vectors; seed it from the system's randomness.
        project: multiplies with secret vectors.

    Attributes:
        read_bytes: bytes of A, B and results read from memory so far.
        flops: operations so far, two for a multiply-add. Like `read_bytes`, it counts the actual
            work, not the minimum.
        largest: the largest residual of undoubted rows so far, in units of the tolerance.
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
        """Return the bytes of A, B and results read from memory so far."""
        return self._project.read_bytes

    @property
    def flops(self) -> int:
        """Return the operations so far, two for a multiply-add."""
        return self._project.flops

    def judge(self, block: Block, result: Buffer) -> Judgement:
        """Check a block.

        Args:
            block: the block's place in the GEMM.
            result: the block as received, shape (m, n). Non-finite elements are right where the
                server's own product is not finite either. If that depends on the order of
                summation, the device is not blamed.
        """
        with np.errstate(all="ignore"):
            doubt = self._doubt(block, result)
            if doubt.any():
                return self._recompute(block, result, doubt)
            if result.dtype is not DType.FP32:
                return self._spots(block, result)
        return Judgement()

    def _doubt(self, block: Block, result: Buffer) -> npt.NDArray[np.bool_]:
        """Return which rows are off by more than rounding explains, in any group of columns."""
        expected = self._products.of(block)
        columns = self._products.columns(block.n)
        if result.dtype is DType.FP32:
            # Usually even the tolerance for small results suffices, which needs no sums of squares
            # of the results.
            found, _ = self._project(result, columns.vectors, None, columns.bounds)
            found -= expected.products
            share = np.square(found, out=found)  # relative to the variance
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
        share = np.square(found, out=found)  # relative to the variance
        share /= rounding[:, None]
        doubt = ~(share.max((0, 1)) <= ROW_LIMIT**2)  # NaN is also in doubt
        if not doubt.any():
            self.largest = max(self.largest, math.sqrt(share.max(initial=0)) / ROW_LIMIT)
        spread = share.sum((1, 2))
        certain = share.max((1, 2)) <= ROW_LIMIT**2  # groups without a row in doubt
        noisy = certain & (spread > _most_spread(share))
        return np.asarray(doubt | noisy.any())

    def _recompute(self, block: Block, result: Buffer, doubt: npt.NDArray[np.bool_]) -> Judgement:
        """Recompute rows in double precision: all rows if at least half of them are in doubt."""
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
        """Check a few random elements exactly."""
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
        """Return the product of some rows of A and some columns of B, over a part of the depth."""
        parts = []
        for start in range(k.start, max(k.stop, k.start + 1), _AGAIN_DEPTH):
            depth = slice(start, min(k.stop, start + _AGAIN_DEPTH))
            a = Buffer(self._a.array[rows, depth], self._a.dtype).float32().astype(np.float64)
            b = Buffer(self._b.array[depth, columns], self._b.dtype).float32().astype(np.float64)
            parts.append(Product.of(a, b))
        self._project.flops += 4 * len(rows) * len(columns) * k.size
        return sum(parts[1:], parts[0])


def _most_spread(share: Doubles) -> float:
    """Return the maximum sum of squared residuals for a group."""
    return SPREAD_LIMIT * float(share[0].size) + _FEW_ROWS


def _fault(
    block: Block,
    rows: npt.NDArray[np.int64],
    wrong: npt.NDArray[np.bool_],
    values: npt.NDArray[np.float32],
    own: Product,
) -> Fault:
    """Return the fault, described by its worst element."""
    off = np.where(wrong, np.abs(values - own.exact), 0)
    gross = (
        2 * int(wrong.any(1).sum()) >= max(3, block.m.size)
        and int(wrong.any(0).sum()) > 1
        and not np.linalg.norm(off) < GROSS * np.linalg.norm(own.exact)
    )
    i, j = np.unravel_index(int(np.nan_to_num(off, nan=np.inf).argmax()), off.shape)
    said, exact = float(values[i, j]), float(own.exact[i, j])
    return Fault(
        f"row {block.m.start + int(rows[i])} has {said:.6g} where the product is {exact:.6g}, "
        f"which no order of summing explains"
        f"{'; the whole block is wrong' if gross else ''}",
        gross,
    )
