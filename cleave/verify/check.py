"""Checking blocks without computing them again: Freivalds' test with a tolerance for rounding.

For a block C = A B that a device returned and a secret vector r, C r must be A (B r): three
products with a vector instead of one with a matrix (Freivalds 1977). Two independent vectors (four
for operands of 16 bits) for each GEMM and column, drawn fresh and used for nothing else; their
entries have random signs and magnitudes uniform in [0.5, 1], so that no two wrong elements of a row
cancel by construction (plain signs let a cancelling pair through half of the time) and none is
hidden by a small entry.
B r is shared by all tiles of a column, A (B r) by all columns of a row of blocks; where tiles are
cut differently, by the parts that all cuts together leave, so that A and B are read once each.

Honest results are rounded. For row i of a block of n columns and depth K, with u = 2^-24,

    sigma_i^2 = u^2 ((|a_i| |B|_F)^2 + (K + n)/3 |c_i|^2) + (u_out |c_i|)^2 / 3 + n f^2

the first term for sums whose partial sums wander about zero, the second for sums of one sign, those
over columns of the check itself included (errors of independent roundings add like their squares:
Higham and Mary 2019), the third for the rounding of the result to its dtype (u_out = 2^-8 for bf16,
2^-11 for fp16, 0 for fp32), the last for numbers so small that their spacing is absolute (f is
2^-25 for fp16, else the smallest normal number, for devices that flush to zero). The model is that
of sums taken one after another in fp32; blocked sums err less. A row is wrong when its residual is
above `ROW_LIMIT` sigma (honest ones stay below 4); a block is also wrong when the mean square of
its residuals over sigma is above `SPREAD_LIMIT` (honest ones stay below 1, few rows apart): noise
that is spread over all rows, a chi-square over them.

What is right by a smaller sigma is right by the larger: a block of fp32 is first held against the
first term alone, and the norms of C are taken only where that does not settle it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cleave.arrays import Buffer, DType
from cleave.gemm import Block, Span
from cleave.verify.projection import Doubles, Floats, Pass, numpy_pass

VECTORS: Final = {DType.FP32: 2, DType.BF16: 4, DType.FP16: 4}
"""Secret vectors by the operands' dtype. A pair of errors that cancel in a row hides where two
entries of every vector are alike to within the rounding: with that of 16 bits two vectors let some
hundredths of a percent of such errors of five root mean squares through, four the square of it."""

ROW_LIMIT: Final = 8.0
SPREAD_LIMIT: Final = 3.0
GROSS: Final = 0.1
"""A block whose errors are this large against its numbers, in most rows, is wrong as a whole."""

_FEW_ROWS: Final = 40.0  # what the mean square of few residuals may be above it, times their number
_UNIT: Final = 2.0**-24
_OUT_UNIT: Final = {DType.FP32: 0.0, DType.BF16: 2.0**-8, DType.FP16: 2.0**-11}
_LEAST: Final = {DType.FP32: 2.0**-126, DType.BF16: 2.0**-126, DType.FP16: 2.0**-25}
_LARGEST: Final = {
    DType.FP32: 2.0**128 * (1 - 2.0**-24),
    DType.BF16: 2.0**128 * (1 - 2.0**-8),
    DType.FP16: 65504.0,
}
LONE: Final = 24.0
"""A lone error in a row of so many sigma is surely caught: the smallest entry of a secret vector
halves it, and honest rounding may hide `ROW_LIMIT` / 2 more."""

_SHARED_PASSES: Final = 1.5  # above it differently cut tiles share what is read of A and B
_AGAIN_DEPTH: Final = 4096


def row_sigma(scale: Doubles, lengths: Doubles, depth: int, columns: int, dtype: DType) -> Doubles:
    """What rounding may do to the rows of a block under a secret vector; see the module's text.

    Args:
        scale: |a_i| |B|_F of each row.
        lengths: |c_i|. No row of an honest C is longer than its scale; a longer one does not widen
            its tolerance.
        depth, columns: K and n.
        dtype: of the block.
    """
    length = np.minimum(lengths, 1.01 * scale)
    sums = _UNIT**2 * (depth + columns) / 3
    variance = np.square(_UNIT * scale) + columns * _LEAST[dtype] ** 2
    return np.asarray(
        np.sqrt(variance + (sums + _OUT_UNIT[dtype] ** 2 / 3) * np.square(length)), np.float64
    )


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with a block.

    Attributes:
        reason: for people.
        gross: it is wrong as a whole, which no flipped bit explains: one in a result spoils an
            element, one in a device's copy of A a row, one in its copy of B a column.
    """

    reason: str
    gross: bool = False


class GemmCheck:
    """The check of all blocks of one GEMM.

    Args:
        a, b: the operands as they enter the product, shapes (M, K) and (K, N).
        blocks: those of its plan: which columns and depths will be asked for together.
        rng: draws the secret vectors; seed it from the system's randomness.
        project: multiplies with them.

    Attributes:
        read_bytes: what was read of A, B and results from memory so far.
        flops: operations so far, two for a multiply-add; both count what is done, not what it
            would take at best.
    """

    def __init__(
        self,
        a: Buffer,
        b: Buffer,
        blocks: Iterable[Block],
        rng: np.random.Generator,
        project: Pass = numpy_pass,
    ) -> None:
        self.read_bytes = 0
        self.flops = 0
        self._a = a
        self._b = b
        self._pass = project
        self._vectors = VECTORS[a.dtype]
        drawn = rng.random((self._vectors, b.shape[1]), np.float32) - np.float32(0.5)
        self._secret: Floats = drawn + np.copysign(np.float32(0.5), drawn)
        self._cuts = _cuts(a.shape, b.shape, blocks := list(dict.fromkeys(blocks)))
        self._meets: dict[tuple[Span, Span], dict[Span, None]] = defaultdict(dict)
        for block in blocks:
            for m in self._cuts.rows(block.m):
                for k in self._cuts.depths(block.k):
                    self._meets[m, k][block.n] = None
        self._b_parts: dict[tuple[Span, Span], Floats] = {}  # B r
        self._b_squares: dict[tuple[Span, Span], float] = {}
        self._a_parts: dict[tuple[Span, Span], tuple[Doubles, dict[Span, Floats]]] = {}

    def fault(self, block: Block, result: Buffer) -> Fault | None:
        """What is wrong with a block, or None.

        Args:
            block: which one.
            result: shape (m, n), as it came.

        Returns:
            None when it is right to within rounding. A block that is not finite is right where the
            server's own product is not finite either; where that depends on the order of summing,
            nobody is blamed.
        """
        with np.errstate(all="ignore"):
            secret = self._secret[:, block.n.start : block.n.stop]
            found = self._project(result, secret)
            a_norms, expected = self._row(block)
            off = found - expected
            if result.dtype is DType.FP32:
                share = off / (_UNIT * np.sqrt(self._b_square(block.k, block.n)) * a_norms)
                spread = float(np.square(share).mean())
                if spread <= SPREAD_LIMIT and np.abs(share).max() <= ROW_LIMIT:
                    return None  # what needs no closer look, as nearly all do
            if not np.isfinite(off).all():
                return self._fault_by_product(block, result)
            sigma = self._sigma(block, result, a_norms)
            share = np.abs(off) / sigma
            wrong = share.max(0) > ROW_LIMIT
            spread = float(np.square(share).mean())
            if not wrong.any() and spread <= SPREAD_LIMIT + _FEW_ROWS / share.size:
                return None
            if not np.isfinite(share).all():
                return self._fault_by_product(block, result)
            gross = _is_gross(off, expected, sigma, wrong)
            if gross:  # it has consequences, and the check's own memory may be at fault
                again = self._fault_by_product(block, result)
                if again is None:
                    return None
                gross = again.gross
        if wrong.any():
            row = block.m.start + int(share.max(0).argmax())
            return Fault(
                f"row {row} is off by {share.max():.3g} times what rounding explains"
                f"{', and so is the whole block' if gross else ''}",
                gross,
            )
        return Fault(f"all rows together are off by {spread:.3g} times what rounding explains")

    def _sigma(self, block: Block, result: Buffer, a_norms: Doubles) -> Doubles:
        """The tolerances of the rows, their own lengths included."""
        scale = a_norms * np.sqrt(self._b_square(block.k, block.n))
        squares = np.zeros(block.m.size)
        self._project(result, self._secret[:0, block.n.start : block.n.stop], squares)
        lengths = np.sqrt(squares)
        return row_sigma(scale, lengths, block.k.size, block.n.size, result.dtype)

    def _fault_by_product(self, block: Block, result: Buffer) -> Fault | None:
        """Do it again, in double precision: the run's own overflow, or the device's?"""
        values = result.float32().astype(np.float64)
        own = np.zeros_like(values)
        reach = np.zeros_like(values)  # the sum of magnitudes: no partial sum is beyond it
        for start in range(block.k.start, block.k.stop, _AGAIN_DEPTH):
            k = Span(start, min(block.k.stop, start + _AGAIN_DEPTH))
            a = self._a.region(block.m, k).float32().astype(np.float64)
            b = self._b.region(k, block.n).float32().astype(np.float64)
            own += a @ b
            reach += np.abs(a) @ np.abs(b)
        self.flops += 2 * block.flops
        rounding = ROW_LIMIT * _UNIT * np.sqrt(block.k.size) * reach
        rounding += _OUT_UNIT[result.dtype] * np.abs(own) + _LEAST[result.dtype] * block.k.size
        may_overflow = (np.abs(own) + rounding > _LARGEST[result.dtype]) | (
            reach > _LARGEST[DType.FP32]
        )
        there = np.isfinite(values)
        wrong = np.where(
            np.isfinite(own),
            np.where(there, np.abs(values - own) > rounding, ~may_overflow),
            there,
        )
        if not wrong.any():
            return None
        several = wrong.any(1).sum() > 1 and wrong.any(0).sum() > 1
        if not there[wrong].all():
            return Fault("it is not finite where the server's own product is", bool(several))
        return Fault("it differs from the server's own product", bool(several))

    # --- the parts of A and B ---

    def _row(self, block: Block) -> tuple[Doubles, Floats]:
        """The norms of A's rows, shape (m,), and A (B r), shape (vectors, m)."""
        if self._cuts.m is None:  # one part, the usual case: nothing to put together
            part = self._a_part(block.m, block.k, block.n)
            return np.sqrt(part[0]), part[1][block.n]
        squares, expected = [], []
        for m in self._cuts.rows(block.m):
            square: Any = 0.0
            products: Any = np.float32(0)
            for k in self._cuts.depths(block.k):
                part = self._a_part(m, k, block.n)
                square = square + part[0]
                products = products + part[1][block.n]
            squares.append(square)
            expected.append(products)
        return np.sqrt(np.concatenate(squares)), np.concatenate(expected, axis=1)

    def _a_part(self, m: Span, k: Span, wanted: Span) -> tuple[Doubles, dict[Span, Floats]]:
        """Squared norms of some rows of A over some depth, and its products with B r by columns."""
        part = self._a_parts.get((m, k))
        if part is None or wanted not in part[1]:  # it is there, and not: a block of no plan
            columns = list(self._meets.get((m, k), ()) if part is None else ())
            if wanted not in columns:
                columns.append(wanted)
            vectors = np.concatenate([self._b_part(k, n) for n in columns])
            squares = np.zeros(m.size)
            products = self._project(self._a.region(m, k), vectors, squares)
            split = {
                n: products[self._vectors * i :][: self._vectors] for i, n in enumerate(columns)
            }
            part = self._a_parts[m, k] = (squares, split | (part[1] if part else {}))
        return part

    def _b_part(self, k: Span, n: Span) -> Floats:
        """B r over some depth, for the columns of a block; shape (vectors, k)."""
        parts = []
        for depth in self._cuts.depths(k):
            sums: Any = np.float32(0)
            for columns in self._cuts.columns(n):
                part = self._b_parts.get((depth, columns))
                if part is None:
                    part = self._b_parts[depth, columns] = self._read_b(depth, columns)
                sums = sums + part
            parts.append(sums)
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def _read_b(self, k: Span, n: Span) -> Floats:
        """B r over some depth and columns, whose squares are added up on the way."""
        squares = np.zeros(k.size)
        secret = self._secret[:, n.start : n.stop]
        product = self._project(self._b.region(k, n), secret, squares)
        self._b_squares[k, n] = float(squares.sum())
        return product

    def _b_square(self, k: Span, n: Span) -> float:
        """The sum of the squares of B over some depth and columns, whose B r is there."""
        return sum(
            self._b_squares[depth, columns]
            for depth in self._cuts.depths(k)
            for columns in self._cuts.columns(n)
        )

    def _project(self, matrix: Buffer, vectors: Floats, squares: Doubles | None = None) -> Floats:
        """The products with some vectors, counted; see `Pass`."""
        self._count_pass(matrix, len(vectors) + (squares is not None))
        return self._pass(matrix, vectors, squares)

    def _count_pass(self, matrix: Buffer, vectors: int) -> None:
        self.read_bytes += matrix.nbytes
        self.flops += 2 * vectors * matrix.array.size


def _is_gross(off: Floats, expected: Floats, sigma: Doubles, wrong: npt.NDArray[np.bool_]) -> bool:
    """Whether a block is wrong as a whole: in most rows, by much, and in more than one column.

    With one wrong column j, the residuals of every row are its error times the same (r_j, r'_j).
    """
    if wrong.sum() < max(2, wrong.size / 2):
        return False
    if np.linalg.norm(off) < GROSS * np.linalg.norm(expected):
        return False
    first, second = off[:2].astype(np.float64)
    lengths = np.hypot(first, second)
    top = int(lengths.argmax())
    across = np.abs(first * second[top] - second * first[top]) / lengths[top]
    return bool((across > 2 * ROW_LIMIT * sigma + 1e-3 * lengths).sum() > 1)


@dataclass(frozen=True, slots=True)
class _Cuts:
    """Where the parts of A and B that are read at once begin; None: those of the blocks."""

    m: list[int] | None = None
    n: list[int] | None = None
    k: list[int] | None = None

    def rows(self, m: Span) -> list[Span]:
        return _split(m, self.m)

    def columns(self, n: Span) -> list[Span]:
        return _split(n, self.n)

    def depths(self, k: Span) -> list[Span]:
        return _split(k, self.k)


def _split(span: Span, cuts: list[int] | None) -> list[Span]:
    if cuts is None:
        return [span]
    inside = cuts[bisect_right(cuts, span.start) : bisect_left(cuts, span.stop)]
    return [Span(*pair) for pair in pairwise((span.start, *inside, span.stop))]


def _cuts(a: tuple[int, int], b: tuple[int, int], blocks: list[Block]) -> _Cuts:
    """The blocks' own cuts, or where tiles are cut so differently that this reads A and B several
    times, all cuts together."""
    read_a = sum(m.size * k.size for m, k in {(x.m, x.k) for x in blocks})
    read_b = sum(n.size * k.size for n, k in {(x.n, x.k) for x in blocks})
    if read_a + read_b <= _SHARED_PASSES * (a[0] * a[1] + b[0] * b[1]):
        return _Cuts()
    bounds = ({bound for x in blocks for bound in getattr(x, side)} for side in "mnk")
    return _Cuts(*(sorted(side) for side in bounds))
