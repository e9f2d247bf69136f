"""The secret side of a check: A and B of a GEMM multiplied by secret vectors.

A and B are read as few times as the blocks allow.

The entries of the vectors have random signs and magnitudes uniform in [0.75, 1.25], so that no two
wrong elements of a row cancel by construction (plain signs let a cancelling pair through half of
the time) and none is hidden by a small entry. Before that each column is divided by the typical
rounding error of its elements, as estimated from B's columns (and, of results of 16 bits, a few
random rows of A). So every column is judged by its own size, and a large column hides nothing in
the others. In fp32 a part of the depth is read for the estimate; all of it where that turns out to
say too little, as of columns behind ReLU.

B r is shared by all tiles of a column, A (B r) by all columns of a row of blocks. Where tiles are
cut differently, products are shared by the parts between all cuts, so that A and B are each read
once.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np

from cleave.arrays import Buffer, Doubles, DType
from cleave.gemm import Block, Span
from cleave.verify.projection import Pass
from cleave.verify.rounding import variance

VECTORS: Final = {DType.FP32: 2, DType.BF16: 4, DType.FP16: 4}
"""Secret vectors by the operands' dtype. A pair of errors that cancel in a row hides where two
entries of every vector are alike to within the rounding: with that of 16 bits two vectors let some
hundredths of a percent of such errors of five root mean squares through, four the square of it."""

_LEAST_ENTRY: Final = 0.75  # magnitudes go up to as much above 1
_SAMPLED_ROWS: Final = 16  # of A, to estimate how large the columns of C are
_SKETCHES: Final = 4  # random sums of these rows
_SAMPLED_DEPTH: Final = 128  # of B's columns, at least, to estimate how large they are
_UNEVEN: Final = 4.0  # times as large as estimated: then the estimate is made anew
_SHARED_PASSES: Final = 1.5  # above it differently cut tiles share what is read of A and B


class Columns(NamedTuple):
    """The secret vectors and weights of some columns.

    Attributes:
        vectors: r_j w_j, shape (vectors, columns).
        weights: w_j^2, shape (columns,).
        total: the sum of the weights.
    """

    vectors: Doubles
    weights: Doubles
    total: float


class Expected(NamedTuple):
    """What the server expects of a block, or of several blocks with the same rows and depth.

    Attributes:
        products: A (B r), shape (blocks, vectors, rows).
        a_squares: |a_i|^2, shape (rows,).
        b_squares: sum of w_j^2 |b_j|^2, shape (blocks,).
    """

    products: Doubles
    a_squares: Doubles
    b_squares: Doubles


class SecretProducts:
    """A and B of one GEMM times secret vectors.

    Args:
        a, b: the operands as they enter the product, shapes (M, K) and (K, N).
        blocks: the blocks, which say which columns and depths occur together.
        rng: draws the vectors.
        project: multiplies with them.
    """

    def __init__(
        self, a: Buffer, b: Buffer, blocks: Sequence[Block], rng: np.random.Generator, project: Pass
    ) -> None:
        self._a = a
        self._b = b
        self._project = project
        self._count = VECTORS[a.dtype]
        self._rng = rng
        drawn = rng.uniform(_LEAST_ENTRY, 2 - _LEAST_ENTRY, (self._count, b.shape[1]))
        self._entries: Doubles = np.where(rng.random(drawn.shape) < 0.5, -drawn, drawn)
        self._weights = np.zeros(b.shape[1])  # w_j; 0 where they are not known yet
        self._columns: dict[Span, Columns] = {}
        self._some: Doubles | None = None  # random sums of rows of A
        depth = b.shape[0]
        self._sampled = depth
        if a.dtype is DType.FP32:
            self._sampled = min(depth, max(_SAMPLED_DEPTH, depth // 8))
        self._uneven = False  # the sample said too little
        self._cuts = _cuts(a.shape, b.shape, blocks)
        self._meets: dict[tuple[Span, Span], dict[Span, None]] = defaultdict(dict)
        self._at_depth: dict[Span, set[Span]] = defaultdict(set)
        for block in blocks:
            for k in self._cuts.depths(block.k):
                for m in self._cuts.rows(block.m):
                    self._meets[m, k][block.n] = None
                self._at_depth[k].update(self._cuts.columns(block.n))
        self._b_parts: dict[tuple[Span, Span], tuple[Doubles, float]] = {}
        self._a_parts: dict[tuple[Span, Span], tuple[Doubles, dict[Span, Doubles]]] = {}

    def columns(self, n: Span) -> Columns:
        """Return the secret vectors of some columns."""
        columns = self._columns.get(n)
        if columns is None:
            weights = self._weights[n.start : n.stop]
            unknown = weights == 0
            if unknown.any():
                # Of fp32 a part of the depth is read, for all columns at once; of 16 bits all, just
                # before it is read again.
                n_at_once = Span(0, self._b.shape[1]) if self._a.dtype is DType.FP32 else n
                found = self._weights[n_at_once.start : n_at_once.stop]
                unknown = found == 0
                found[unknown] = 1 / self._typical(n_at_once)[unknown]
            vectors, weights = self._entries[:, n.start : n.stop] * weights, np.square(weights)
            columns = self._columns[n] = Columns(vectors, weights, float(weights.sum()))
        return columns

    def of(self, blocks: Sequence[Block]) -> Expected:
        """Return what is expected of the rows of some blocks with the same rows and depth."""
        expected = self._of(blocks)
        if self._uneven:
            self._uneven, self._sampled = False, self._b.shape[0]
            self._weights[:] = 0
            for known in (self._columns, self._b_parts, self._a_parts):
                known.clear()
            expected = self._of(blocks)
        return expected

    def _of(self, blocks: Sequence[Block]) -> Expected:
        m, k = blocks[0].m, blocks[0].k
        b_squares = [
            sum(
                self._b_part(depth, columns)[1]
                for depth in self._cuts.depths(k)
                for columns in self._cuts.columns(block.n)
            )
            for block in blocks
        ]
        all_squares, all_products = [], []
        for rows in self._cuts.rows(m):
            squares: Any = 0.0
            products: Any = 0.0
            for depth in self._cuts.depths(k):
                parts = [self._a_part(rows, depth, block.n) for block in blocks]
                squares = squares + parts[0][0]
                products = products + np.array(
                    [part[1][block.n] for part, block in zip(parts, blocks, strict=True)]
                )
            all_squares.append(squares)
            all_products.append(products)
        if len(all_squares) == 1:  # the usual case: nothing to put together
            return Expected(all_products[0], all_squares[0], np.array(b_squares))
        return Expected(
            np.concatenate(all_products, axis=2), np.concatenate(all_squares), np.array(b_squares)
        )

    def _typical(self, n: Span) -> Doubles:
        """What rounding typically does to the elements of each of some columns.

        Of results of 16 bits that depends on how large the elements are, which random sums of a few
        rows of A tell; else on how large B's columns are, for which a part of the depth will do,
        and only what they are to one another matters.
        """
        dtype, depth = self._a.dtype, self._b.shape[0]
        with np.errstate(all="ignore"):
            if dtype is DType.FP32:
                size = self._sampled
                start = int(self._rng.integers(depth - size + 1))
                part, none = self._b.region(Span(start, start + size), n).T, np.zeros((0, size))
                _, [squares] = self._project(part, none, np.ones(size), None)
                typical = np.sqrt(squares / size)
                if (known := typical[typical > 0]).size:
                    typical[typical == 0] = np.median(known)
            else:
                if self._some is None:
                    self._some = self._random_sums()
                [products], [squares] = self._project(
                    self._b.region(Span(0, depth), n).T, self._some, np.ones(depth), None
                )
                a_square = np.square(self._some).sum() / len(self._some)
                length = np.square(products).mean(0)
                typical = np.sqrt(variance(a_square, squares, length, 1.0, depth, dtype))
        return np.where(np.isfinite(typical) & (typical > 0), typical, 1.0)

    def _random_sums(self) -> Doubles:
        """Sums of a few random rows of A, with random signs; shape (sketches, K)."""
        rows = self._rng.integers(0, self._a.shape[0], _SAMPLED_ROWS)
        some = Buffer(self._a.array[rows], self._a.dtype).float32().astype(np.float64)
        signs = np.where(self._rng.random((_SKETCHES, _SAMPLED_ROWS)) < 0.5, -1.0, 1.0)
        return np.asarray((signs @ some) / np.sqrt(_SAMPLED_ROWS), np.float64)

    def _a_part(self, m: Span, k: Span, wanted: Span) -> tuple[Doubles, dict[Span, Doubles]]:
        """Squared norms of some rows of A over some depth, and its products with B r by columns."""
        part = self._a_parts.get((m, k))
        if part is None or wanted not in part[1]:  # it is there, and not: a block of no plan
            columns = list(self._meets.get((m, k), ()) if part is None else ())
            if wanted not in columns:
                columns.append(wanted)
            vectors = np.concatenate([self._b_vectors(k, n) for n in columns])
            [products], [squares] = self._project(
                self._a.region(m, k), vectors, np.ones(k.size), None
            )
            split = {n: products[self._count * i :][: self._count] for i, n in enumerate(columns)}
            part = self._a_parts[m, k] = (squares, split | (part[1] if part else {}))
        return part

    def _b_vectors(self, k: Span, n: Span) -> Doubles:
        """B r over some depth, for the columns of a block; shape (vectors, k)."""
        parts = []
        for depth in self._cuts.depths(k):
            sums: Any = 0.0
            for columns in self._cuts.columns(n):
                sums = sums + self._b_part(depth, columns)[0]
            parts.append(sums)
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def _b_part(self, k: Span, n: Span) -> tuple[Doubles, float]:
        """B r over some depth and columns, and the sum of the squares of its weighted elements."""
        part = self._b_parts.get((k, n))
        if part is None:
            together = self._beside(k, n)
            whole = Span(together[0].start, together[-1].stop)
            columns = self.columns(whole)
            bounds = np.array([whole.start, *(span.stop for span in together)]) - whole.start
            products, squares = self._project(
                self._b.region(k, whole), columns.vectors, columns.weights, bounds
            )
            for span, some, square in zip(together, products, squares.sum(1), strict=True):
                self._b_parts[k, span] = (some, float(square))
                if self._sampled < self._b.shape[0]:
                    self._uneven |= not square <= _UNEVEN * span.size * k.size
            part = self._b_parts[k, n]
        return part

    def _beside(self, k: Span, n: Span) -> list[Span]:
        """Columns that are read together with some: of fp32 those of the blocks of that depth, as
        far as they lie side by side, so that rows of B are read whole."""
        if self._a.dtype is not DType.FP32:  # read just before for their size, and at hand still
            return [n]
        unread = sorted(span for span in self._at_depth[k] if (k, span) not in self._b_parts)
        if n not in unread:
            return [n]
        first = last = unread.index(n)
        while first > 0 and unread[first - 1].stop == unread[first].start:
            first -= 1
        while last + 1 < len(unread) and unread[last].stop == unread[last + 1].start:
            last += 1
        return unread[first : last + 1]


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


def _cuts(a: tuple[int, int], b: tuple[int, int], blocks: Sequence[Block]) -> _Cuts:
    """The blocks' own cuts, or where tiles are cut so differently that this reads A and B several
    times, all cuts together."""
    read_a = sum(m.size * k.size for m, k in {(x.m, x.k) for x in blocks})
    read_b = sum(n.size * k.size for n, k in {(x.n, x.k) for x in blocks})
    if read_a + read_b <= _SHARED_PASSES * (a[0] * a[1] + b[0] * b[1]):
        return _Cuts()
    bounds = ({bound for x in blocks for bound in getattr(x, side)} for side in "mnk")
    return _Cuts(*(sorted(side) for side in bounds))
