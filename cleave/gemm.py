"""Index arithmetic of matrix multiplication: GEMMs, tiles, strips and blocks.

A GEMM is ``C[M, N] = A[M, K] @ B[K, N]``. A *tile* is a box ``m x n x k`` of the GEMM's index space
that is assigned to one device. A tile's rows are *cut* into A-strips, and its columns into
B-strips. One A-strip times one B-strip gives a *block*. Devices return results block by block, and
lost results are recomputed block by block. If the tile's depth is cut as well, each strip consists
of several pieces, and a block is the sum of the products of matching A-pieces and B-pieces.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple


class Span(NamedTuple):
    """A half-open range of indices, ``start:stop``."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def overlaps(self, other: "Span") -> bool:
        return self.start < other.stop and other.start < self.stop


@dataclass(frozen=True, slots=True)
class Gemm:
    """The matrix product ``C[m, n] = A[m, k] @ B[k, n]``. Any dimension may be zero."""

    m: int
    n: int
    k: int

    def __post_init__(self) -> None:
        for name in ("m", "n", "k"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; a GEMM's sides must be 0 or more"
                )

    @property
    def volume(self) -> int:
        return self.m * self.n * self.k

    @property
    def flops(self) -> int:
        """Return the number of floating-point operations, two per multiply-add."""
        return 2 * self.volume


def gemm_of(a: tuple[int, int], b: tuple[int, int]) -> Gemm:
    """Return the GEMM that multiplies two matrices of shapes (m, k) and (k, n).

    Raises:
        ValueError: if the columns of the left matrix differ from the rows of the right matrix.
    """
    if a[1] != b[0]:
        raise ValueError(f"cannot multiply a {a[0]}x{a[1]} matrix by a {b[0]}x{b[1]} matrix")
    return Gemm(a[0], b[1], a[1])


@dataclass(frozen=True, slots=True)
class Tile:
    """A box in a GEMM's index space: ranges of C's rows (m), C's columns (n) and the depth (k)."""

    m: Span
    n: Span
    k: Span

    @property
    def volume(self) -> int:
        return self.m.size * self.n.size * self.k.size

    def is_partial(self, gemm: Gemm) -> bool:
        """Return True if the tile covers only part of the depth, so its blocks are partial sums."""
        return self.k.size < gemm.k

    def overlaps(self, other: "Tile") -> bool:
        return self.m.overlaps(other.m) and self.n.overlaps(other.n) and self.k.overlaps(other.k)


@dataclass(frozen=True, slots=True)
class TileCut:
    """A tile, and the cuts that divide the tile into strips.

    Attributes:
        m_cuts: rows of each A-strip; consecutive spans that cover `tile.m`.
        n_cuts: columns of each B-strip; consecutive spans that cover `tile.n`.
        k_cuts: depth range of each piece of a strip; consecutive spans that cover `tile.k`.
    """

    tile: Tile
    m_cuts: tuple[Span, ...]
    n_cuts: tuple[Span, ...]
    k_cuts: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """The product of two strips of a tile. `pieces` are the depth ranges in summation order."""

    m: Span
    n: Span
    pieces: tuple[Span, ...]

    @property
    def k(self) -> Span:
        return Span(self.pieces[0].start, self.pieces[-1].stop)

    @property
    def elements(self) -> int:
        return self.m.size * self.n.size

    @property
    def flops(self) -> int:
        return 2 * self.m.size * self.n.size * self.k.size


def even_cuts(span: Span, pieces: int, align: int = 1) -> tuple[Span, ...]:
    """Cut `span` into at most `pieces` non-empty spans of nearly equal size.

    The distance from the start of `span` to each inner boundary is a multiple of `align`. A short
    `span` yields fewer than `pieces` spans. An empty `span` yields one empty span.
    """
    if span.size == 0 or pieces <= 1:
        return (span,)
    units = -(-span.size // align)
    pieces = max(1, min(pieces, units))
    bounds = [min(span.stop, span.start + units * i // pieces * align) for i in range(pieces + 1)]
    return tuple(Span(a, b) for a, b in pairwise(bounds) if b > a)


def cut_tile(tile: Tile, rows: int, columns: int, *, align: int = 1) -> TileCut:
    """Cut a tile into at most `rows` A-strips and `columns` B-strips of the tile's full depth."""
    return TileCut(
        tile, even_cuts(tile.m, rows, align), even_cuts(tile.n, columns, align), (tile.k,)
    )


def wavefront(cut: TileCut) -> Iterator[Block]:
    """Yield a tile's blocks in the order in which a device computes them.

    Strips are sent in the order A0 B0 A1 B1 .... When an A-strip arrives, the device multiplies
    this strip by every B-strip that has arrived, and vice versa. So once a share f of the download
    has arrived, a share f^2 of the blocks can be computed.
    """
    have_a = have_b = 0
    while have_a < len(cut.m_cuts) or have_b < len(cut.n_cuts):
        if have_a < len(cut.m_cuts):
            for n in cut.n_cuts[:have_b]:
                yield Block(cut.m_cuts[have_a], n, cut.k_cuts)
            have_a += 1
        if have_b < len(cut.n_cuts):
            for m in cut.m_cuts[:have_a]:
                yield Block(m, cut.n_cuts[have_b], cut.k_cuts)
            have_b += 1


def boxes_of(blocks: Iterable[Block]) -> list[Tile]:
    """Return boxes that cover the blocks' index space, with neighbouring blocks joined."""
    rows_first = sorted((b.k, b.m, b.n) for b in blocks)
    joined = [
        _joined(_joined(rows_first, 2), 1),
        _joined(_joined(rows_first, 1), 2),
    ]
    return [Tile(m, n, k) for k, m, n in min(joined, key=len)]


_Box = tuple[Span, Span, Span]


def _joined(boxes: Iterable[_Box], side: int) -> list[_Box]:
    """Join boxes that are adjacent along axis `side` and have equal spans on the other two axes."""
    others = [i for i in range(3) if i != side]
    joined: list[_Box] = []
    for box in sorted(boxes, key=lambda b: (*(b[i] for i in others), b[side])):
        last = joined[-1] if joined else None
        if (
            last is not None
            and all(last[i] == box[i] for i in others)
            and last[side].stop == box[side].start
        ):
            sides = list(last)
            sides[side] = Span(last[side].start, box[side].stop)
            joined[-1] = (sides[0], sides[1], sides[2])
        else:
            joined.append(box)
    return joined
