from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.gemm import Gemm, Span, Tile, boxes_of, cut_tile, even_cuts, wavefront

spans = st.builds(lambda a, size: Span(a, a + size), st.integers(0, 1000), st.integers(0, 500))
filled = st.builds(lambda a, size: Span(a, a + size), st.integers(0, 1000), st.integers(1, 500))


tiles = st.builds(Tile, filled, filled, filled)


@given(spans, st.integers(1, 600), st.integers(1, 64))
def test_even_cuts_cover_a_span_with_even_aligned_pieces(
    span: Span, pieces: int, align: int
) -> None:
    cuts = even_cuts(span, pieces, align)
    assert cuts[0].start == span.start
    assert cuts[-1].stop == span.stop
    assert all(x.stop == y.start for x, y in pairwise(cuts))
    # As many pieces as requested, unless alignment allows only fewer.
    assert len(cuts) == max(1, min(pieces, -(-span.size // align)))
    assert all((cut.start - span.start) % align == 0 for cut in cuts)
    if span.size:
        assert all(cut.size > 0 for cut in cuts)
    inner = [cut.size for cut in cuts[:-1]]
    assert not inner or max(inner) - min(inner) <= align


@given(tiles, st.integers(1, 20), st.integers(1, 20))
def test_wavefront_takes_strips_alternately_and_yields_every_pair_once(
    tile: Tile, rows: int, columns: int
) -> None:
    cut = cut_tile(tile, rows, columns)
    blocks = list(wavefront(cut))
    assert len(blocks) == len(cut.m_cuts) * len(cut.n_cuts)
    assert {(b.m, b.n) for b in blocks} == {(m, n) for m in cut.m_cuts for n in cut.n_cuts}
    assert all(b.pieces == (tile.k,) for b in blocks)
    assert sum(b.flops for b in blocks) == 2 * tile.volume
    assert sum(b.elements for b in blocks) == tile.m.size * tile.n.size
    needed = dict.fromkeys(s for b in blocks for s in (("a", b.m), ("b", b.n)))
    alternately = []
    for i in range(max(len(cut.m_cuts), len(cut.n_cuts))):
        alternately += [("a", m) for m in cut.m_cuts[i : i + 1]]
        alternately += [("b", n) for n in cut.n_cuts[i : i + 1]]
    assert list(needed) == alternately


@given(spans, spans)
def test_overlap_is_having_an_index_in_common(x: Span, y: Span) -> None:
    common = set(range(x.start, x.stop)) & set(range(y.start, y.stop))
    assert x.overlaps(y) == y.overlaps(x)
    if x.size and y.size:
        assert x.overlaps(y) == bool(common)


@pytest.mark.parametrize("sides", [(-1, 2, 2), (2, -1, 2), (2, 2, -1)])
def test_a_gemm_has_no_negative_side(sides: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="0 or more"):
        Gemm(*sides)


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 5), st.randoms(use_true_random=False))
def test_boxes_cover_what_blocks_cover(m: int, n: int, strips: int, random: Random) -> None:
    tile = Tile(Span(3, 3 + 4 * m), Span(5, 5 + 4 * n), Span(2, 9))
    blocks = list(wavefront(cut_tile(tile, strips, strips)))
    some = random.sample(blocks, random.randint(1, len(blocks)))
    boxes = boxes_of(some)
    assert boxes_of(blocks) == [tile]
    assert len(boxes) <= len(some)
    covered = [(i, j) for box in boxes for i in range(*box.m) for j in range(*box.n)]
    assert sorted(covered) == sorted(
        (i, j) for block in some for i in range(*block.m) for j in range(*block.n)
    )
    assert all(box.k == tile.k for box in boxes)
