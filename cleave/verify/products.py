"""Products of a GEMM's A and B with secret vectors, for checks of the devices' results.

The entries r_j of the vectors have random signs, and magnitudes uniform in [0.75, 1.25]. With signs
alone, half of all pairs of equal errors in a row would cancel out. Small entries would hide errors.

Each r_j is multiplied by a weight w_j: the inverse of the typical rounding error of column j of the
result. So a column of large elements does not hide errors in other columns. The rounding error is
estimated from B's columns and, for 16-bit results, from a few random rows of A. For fp32, the
estimate uses only a part of the depth. If this part turns out not to be representative, for example
after ReLU, the estimate is repeated over the full depth.

All blocks with the same columns share B r, and all blocks with the same rows share one read of A.
If the blocks' ranges overlap only in part, A and B are divided at the boundaries of all blocks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise, starmap
from typing import Final, NamedTuple

import numpy as np

from cleave.arrays import Buffer, Doubles, DType
from cleave.gemm import Block, Span
from cleave.verify.projection import Bounds, Pass
from cleave.verify.rounding import variance

# Number of secret vectors, by dtype of the operands. Two cancelling errors in a row stay undetected
# if each vector has two equal entries, up to rounding, at their columns. With 16-bit rounding, two
# vectors miss a few hundredths of a percent of error pairs five times as large as the elements'
# root mean square. Four vectors miss the square of that fraction.
VECTORS: Final = {DType.FP32: 2, DType.BF16: 4, DType.FP16: 4}

# Maximum columns tested together. Rounding errors of more columns would hide larger errors.
GROUP: Final = 512
_LEAST_ENTRY: Final = 0.75
_ENTRY_RANGE: Final = 0.5  # difference between the largest and the smallest magnitude
_SAMPLED_ROWS: Final = 16  # number of rows of A from which the norms of C's columns are estimated
_SKETCHES: Final = 4  # number of random sums of these rows
_SAMPLED_DEPTH: Final = 64  # minimum rows of B from which the norms of its columns are estimated
_UNEVEN: Final = 4.0  # ratio of actual to estimated squares above which the estimate is repeated
_SHARED_PASSES: Final = 1.5  # mean reads of each element above which all blocks share reads


class Columns(NamedTuple):
    """The secret vectors and weights for the columns of a block."""

    vectors: Doubles  # weighted entries r_j w_j, shape (vectors, columns)
    weights: Doubles  # squared weights w_j^2, shape (columns,)
    bounds: Bounds  # boundaries of the groups of columns, from 0, shape (groups + 1,)
    totals: Doubles  # sum of w_j^2 over each group, shape (groups,)


class Expected(NamedTuple):
    """The expected product of a correct block and the secret vectors, for each group of columns."""

    products: Doubles  # A (B r), shape (groups, vectors, rows)
    a_squares: Doubles  # |a_i|^2 for each row a_i of A, shape (rows,)
    b_squares: Doubles  # sum of w_j^2 |b_j|^2 over the columns b_j of B in a group, shape (groups,)
    # inverse of the minimum variance of the rounding error of fp32 results, shape (groups, 1, rows)
    precision: Doubles


class _BPart(NamedTuple):
    """Products B r, shape (groups, vectors, depth), and sums of w_j^2 |b_j|^2, shape (groups,)."""

    products: Doubles
    squares: Doubles


class _APart(NamedTuple):
    """Part of an `Expected` for a range of rows and depths. `squares` contains |a_i|^2."""

    products: Doubles
    squares: Doubles
    precision: Doubles


def group_bounds(n: Span) -> Bounds:
    """Divide columns into groups of at most `GROUP`; return the boundaries of the groups."""
    groups = max(1, -(-n.size // GROUP))
    return n.start + n.size * np.arange(groups + 1) // groups


class SecretProducts:
    """Computes and caches products of one GEMM's matrices A and B with secret vectors.

    Args:
        a, b: the operands after any transposition, shapes (M, K) and (K, N).
        blocks: the GEMM's blocks, which determine the parts of A and B that are read together.
        project: multiplies matrices by the secret vectors.
    """

    def __init__(
        self, a: Buffer, b: Buffer, blocks: Sequence[Block], rng: np.random.Generator, project: Pass
    ) -> None:
        self._a = a
        self._b = b
        self._project = project
        self._count = VECTORS[a.dtype]
        self._rng = rng
        drawn = rng.uniform(-_ENTRY_RANGE, _ENTRY_RANGE, (self._count, b.shape[1]))
        self._entries: Doubles = drawn + np.copysign(_LEAST_ENTRY, drawn)
        self._weights = np.zeros(b.shape[1])  # w_j; 0 if not estimated yet
        self._columns: dict[Span, Columns] = {}
        self._some: Doubles | None = None  # random sums of rows of A
        depth = b.shape[0]
        self._sampled = depth
        if a.dtype is DType.FP32:
            self._sampled = min(depth, max(_SAMPLED_DEPTH, depth // 16))
        self._uneven = False  # whether the sample was not representative
        self._cuts = _cuts(a.shape, b.shape, blocks)
        self._meets: dict[tuple[Span, Span], dict[Span, None]] = defaultdict(dict)
        self._at_depth: dict[Span, set[Span]] = defaultdict(set)
        for block in blocks:
            parts = self._parts(block.n)
            for k in _split(block.k, self._cuts.k):
                for m in _split(block.m, self._cuts.m):
                    self._meets[m, k][block.n] = None
                self._at_depth[k].update(parts)
        self._rows_of: dict[tuple[Span, tuple[Span, ...]], list[Span]] = defaultdict(list)
        for (m, k), columns in self._meets.items():
            self._rows_of[k, tuple(columns)].append(m)
        self._b_parts: dict[tuple[Span, Span], _BPart] = {}
        self._a_parts: dict[tuple[Span, Span], dict[Span, _APart]] = {}

    def columns(self, n: Span) -> Columns:
        """Return the secret vectors and weights for the columns of a block."""
        columns = self._columns.get(n)
        if columns is None:
            vectors, weights = self._weighted(n)
            bounds = group_bounds(n) - n.start
            totals = np.add.reduceat(weights, bounds[:-1])
            columns = self._columns[n] = Columns(vectors, weights, bounds, totals)
        return columns

    def of(self, block: Block) -> Expected:
        """Return the expected product of a correct block and the secret vectors.

        If the sampled part of the depth was not representative, discard the cache, estimate the
        weights from the full depth, and compute the product again.
        """
        expected = self._of(block)
        if self._uneven:
            self._uneven, self._sampled = False, self._b.shape[0]
            self._weights[:] = 0
            for known in (self._columns, self._b_parts, self._a_parts):
                known.clear()
            expected = self._of(block)
        return expected

    def _of(self, block: Block) -> Expected:
        depths = _split(block.k, self._cuts.k)
        b_squares = sum((self._b_of(k, block.n).squares for k in depths), np.zeros(()))
        rows = _split(block.m, self._cuts.m)
        if len(rows) == len(depths) == 1:  # the usual case: nothing to concatenate
            part = self._a_part(block.m, block.k, block.n)
            return Expected(part.products, part.squares, b_squares, part.precision)
        all_products, all_squares = [], []
        for m in rows:
            parts = [self._a_part(m, k, block.n) for k in depths]
            all_products.append(sum((part.products for part in parts[1:]), parts[0].products))
            all_squares.append(sum((part.squares for part in parts[1:]), parts[0].squares))
        products, squares = np.concatenate(all_products, axis=2), np.concatenate(all_squares)
        precision = self._precision(squares, b_squares, block.k, block.n)
        return Expected(products, squares, b_squares, precision)

    def _precision(self, a_squares: Doubles, b_squares: Doubles, k: Span, n: Span) -> Doubles:
        totals = self.columns(n).totals[:, None]
        least = variance(a_squares, b_squares[:, None], np.zeros(()), totals, k.size, DType.FP32)
        return 1 / least[:, None]

    def _weighted(self, n: Span) -> tuple[Doubles, Doubles]:
        """Return the weighted secret entries r_j w_j and the squares w_j^2 for columns `n`."""
        weights = self._weights[n.start : n.stop]
        if not weights.all():
            # With fp32, estimate all columns at once from a part of the depth. With 16 bits, read
            # only the columns `n` at full depth; the next read finds them in the cache.
            n_at_once = Span(0, self._b.shape[1]) if self._a.dtype is DType.FP32 else n
            found = self._weights[n_at_once.start : n_at_once.stop]
            unknown = found == 0
            found[unknown] = 1 / self._typical(n_at_once)[unknown]
        return self._entries[:, n.start : n.stop] * weights, np.square(weights)

    def _typical(self, n: Span) -> Doubles:
        """Return the typical rounding error in each column of the result, up to a common factor.

        For 16-bit results, the error depends on the size of the elements, which is estimated from
        random sums of a few rows of A. For fp32 results, the error depends on the norms of B's
        columns, which are estimated from a part of the depth.
        """
        dtype, depth = self._a.dtype, self._b.shape[0]
        with np.errstate(all="ignore"):
            if dtype is DType.FP32:
                size = self._sampled
                start = int(self._rng.integers(depth - size + 1))
                part, none = self._b.region(Span(start, start + size), n).T, np.zeros((0, size))
                _, [squares] = self._project(part, none, np.ones(size), None)
                typical = np.sqrt(squares / size)
                if not typical.all() and (known := typical[typical > 0]).size:
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
        """Return random sums of a few rows of A, with random signs, shape (sketches, K)."""
        rows = self._rng.integers(0, self._a.shape[0], _SAMPLED_ROWS)
        some = Buffer(self._a.array[rows], self._a.dtype).float32().astype(np.float64)
        signs = np.where(self._rng.random((_SKETCHES, _SAMPLED_ROWS)) < 0.5, -1.0, 1.0)
        return np.asarray((signs @ some) / np.sqrt(_SAMPLED_ROWS), np.float64)

    def _a_part(self, m: Span, k: Span, n: Span) -> _APart:
        """Return A (B r), with secret vectors r, for rows `m`, depth range `k` and columns `n`.

        Results are cached. The first call also reads adjacent rows of blocks with equal columns.
        """
        parts = self._a_parts.get((m, k), {})
        if n not in parts:
            planned = self._meets.get((m, k), {})
            beside = not parts and n in planned  # False for a block that is not in the plan
            columns = dict.fromkeys((*(() if parts else planned), n))
            self._read_a(self._rows_beside(m, k) if beside else [m], k, list(columns))
            parts = self._a_parts[m, k]
        return parts[n]

    def _read_a(self, rows: Sequence[Span], k: Span, columns: Sequence[Span]) -> None:
        """Multiply adjacent row ranges of A by B r, for each of `columns`; cache the results."""
        whole = Span(rows[0].start, rows[-1].stop)
        b_parts = [self._b_of(k, n) for n in columns]
        vectors = np.concatenate([b.products.reshape(-1, k.size) for b in b_parts])
        [products], [squares] = self._project(
            self._a.region(whole, k), vectors, np.ones(k.size), None
        )
        first = 0
        for n, b in zip(columns, b_parts, strict=True):
            groups = len(b.squares)
            last = first + groups * self._count
            of_columns = products[first:last].reshape(groups, self._count, whole.size)
            precision = self._precision(squares, b.squares, k, n)
            first = last
            for m in rows:
                inside = slice(m.start - whole.start, m.stop - whole.start)
                self._a_parts.setdefault((m, k), {})[n] = _APart(
                    of_columns[..., inside], squares[inside], precision[..., inside]
                )

    def _rows_beside(self, m: Span, k: Span) -> Sequence[Span]:
        """Return `m` and the adjacent unread row ranges whose blocks have the same columns."""
        rows = self._rows_of[k, tuple(self._meets[m, k])]
        return _side_by_side((span for span in rows if (span, k) not in self._a_parts), m)

    def _parts(self, n: Span) -> list[Span]:
        """Split the columns of a block into ranges that are read from B separately."""
        if self._cuts.n is None:
            return [n]
        groups = starmap(Span, pairwise(group_bounds(n).tolist()))
        return [part for group in groups for part in _split(group, self._cuts.n)]

    def _b_of(self, k: Span, n: Span) -> _BPart:
        """Return B r, with secret vectors r, for the columns `n` of a block and depth range `k`."""
        if self._cuts.n is None:
            return self._b_part(k, n)
        products, squares = [], []
        for group in starmap(Span, pairwise(group_bounds(n).tolist())):
            parts = [self._b_part(k, part) for part in _split(group, self._cuts.n)]
            products.append(sum((part.products[0] for part in parts[1:]), parts[0].products[0]))
            squares.append(sum(float(part.squares[0]) for part in parts))
        return _BPart(np.array(products), np.array(squares))

    def _b_part(self, k: Span, n: Span) -> _BPart:
        """Return B r (cached), with secret vectors r, for depth range `k` and columns `n`."""
        part = self._b_parts.get((k, n))
        if part is None:
            together = self._beside(k, n)
            whole = Span(together[0].start, together[-1].stop)
            of_each = [group_bounds(span) for span in together]
            bounds = np.concatenate([of_each[0][:1], *(some[1:] for some in of_each)])
            vectors, weights = self._weighted(whole)
            products, squares = self._project(
                self._b.region(k, whole), vectors, weights, bounds - whole.start
            )
            sums = squares.sum(1)
            if self._sampled < self._b.shape[0]:
                self._uneven |= not (sums <= _UNEVEN * k.size * np.diff(bounds)).all()
            at = 0
            for span, some in zip(together, of_each, strict=True):
                end = at + len(some) - 1
                self._b_parts[k, span] = _BPart(products[at:end], sums[at:end])
                at = end
            part = self._b_parts[k, n]
        return part

    def _beside(self, k: Span, n: Span) -> Sequence[Span]:
        """Return `n` and the adjacent unread column ranges, which are read together with `n`."""
        if self._a.dtype is not DType.FP32:  # in the cache, because the estimate just read it
            return [n]
        unread = (span for span in self._at_depth[k] if (k, span) not in self._b_parts)
        return _side_by_side(unread, n)


def _side_by_side(spans: Iterable[Span], span: Span) -> Sequence[Span]:
    """Return the contiguous run of `spans` around `span`; only `span` if it is not in `spans`."""
    ordered = sorted(spans)
    if span not in ordered:
        return [span]
    first = last = ordered.index(span)
    while first > 0 and ordered[first - 1].stop == ordered[first].start:
        first -= 1
    while last + 1 < len(ordered) and ordered[last].stop == ordered[last + 1].start:
        last += 1
    return ordered[first : last + 1]


class _Cuts(NamedTuple):
    """Sorted positions at which M, N and K are cut into separately read parts; None if uncut."""

    m: list[int] | None = None
    n: list[int] | None = None
    k: list[int] | None = None


def _split(span: Span, cuts: list[int] | None) -> list[Span]:
    if cuts is None:
        return [span]
    inside = cuts[bisect_right(cuts, span.start) : bisect_left(cuts, span.stop)]
    return [Span(*pair) for pair in pairwise((span.start, *inside, span.stop))]


def _cuts(a: tuple[int, int], b: tuple[int, int], blocks: Sequence[Block]) -> _Cuts:
    """Return the positions at which to cut A and B, whose shapes are `a` and `b`.

    The matrices are cut only if block-by-block reads would read each element too many times.
    """
    read_a = sum(m.size * k.size for m, k in {(x.m, x.k) for x in blocks})
    read_b = sum(n.size * k.size for n, k in {(x.n, x.k) for x in blocks})
    if read_a + read_b <= _SHARED_PASSES * (a[0] * a[1] + b[0] * b[1]):
        return _Cuts()
    n_bounds = {bound for n in {x.n for x in blocks} for bound in group_bounds(n).tolist()}
    m_bounds, k_bounds = ({bound for x in blocks for bound in getattr(x, side)} for side in "mk")
    return _Cuts(sorted(m_bounds), sorted(n_bounds), sorted(k_bounds))
