"""Results put in place: whatever the cuts, C is what the blocks add up to."""

from itertools import pairwise
from unittest import mock

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cleave import arrays
from cleave.arrays import Array, Buffer, DType
from cleave.fleet.product import Output
from cleave.gemm import Block, Span
from cleave.scheduler.tiles.tasks import GemmTask

dtypes = st.sampled_from(DType)
FP32 = DType.FP32
EMPTY = arrays.empty


def _unit(m: Span, n: Span, k: Span, out: str, *, partial: bool) -> GemmTask:
    return GemmTask(Block(m, n, (k,)), 0, False, False, partial, "fp32" if partial else out)


@st.composite
def cuts(draw: st.DrawFn, size: int) -> list[Span]:
    inner = draw(st.sets(st.integers(1, max(1, size - 1)), max_size=3))
    return [Span(a, b) for a, b in pairwise(sorted({0, size, *(i for i in inner if i < size)}))]


def _operands(m: int, n: int, k: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(m * 100 + n * 10 + k)
    a = rng.integers(-2, 3, (m, k)).astype(np.float32)
    return a, rng.integers(-2, 3, (k, n)).astype(np.float32)


def _poisoned(rows: int, columns: int, of: DType) -> Buffer:
    """New memory, which holds anything."""
    buffer = EMPTY(rows, columns, of)
    buffer.array.view(np.uint8)[...] = 0x7F
    return buffer


@given(
    st.data(), dtypes, st.integers(1, 6), st.integers(1, 6), st.integers(1, 8), st.booleans()
)  # fmt: skip
def test_c_is_put_together_of_finished_blocks_and_of_sums(
    data: st.DataObject, dtype: DType, m: int, n: int, k: int, as_bytes: bool
) -> None:
    """Some rows may come in finished blocks, and others in slabs that are cut differently."""
    a, b = _operands(m, n, k)
    product = arrays.narrow(a @ b, dtype)
    out = EMPTY(m, n, dtype)
    out.array[...] = 1  # whatever was there before must not show
    output = Output(out)
    with mock.patch.object(arrays, "empty", _poisoned):
        for band in data.draw(st.permutations(data.draw(cuts(m)))):
            finished = data.draw(st.booleans())
            for depth in [Span(0, k)] if finished else data.draw(cuts(k)):
                slab = Buffer(a[:, depth.start : depth.stop] @ b[depth.start : depth.stop], FP32)
                blocks = [(r, c) for r in data.draw(cuts(band.size)) for c in data.draw(cuts(n))]
                for within, columns in data.draw(st.permutations(blocks)):
                    rows = Span(band.start + within.start, band.start + within.stop)
                    block = (Buffer(product, dtype) if finished else slab).region(rows, columns)
                    task = _unit(rows, columns, depth, dtype.value, partial=not finished)
                    output.place(task, block.pack() if as_bytes else block)
        output.finish()
    assert np.array_equal(out.array, product)


def test_sums_are_kept_in_fp32_and_rounded_once() -> None:
    """256 + 1 + 1 is 258; rounded to bf16 after every slab it would stay 256."""
    out = arrays.empty(1, 1, DType.BF16)
    output = Output(out)
    for i, value in enumerate([256.0, 1.0, 1.0]):
        task = _unit(Span(0, 1), Span(0, 1), Span(i, i + 1), "bf16", partial=True)
        output.place(task, np.float32(value).tobytes())
    output.finish()
    assert out.float32().tolist() == [[258.0]]


def test_writes_into_strided_views() -> None:
    memory = np.zeros((4, 6), np.float32)
    output = Output(Buffer(memory[1:3, ::2].T, DType.FP32))
    block = np.arange(6, dtype=np.float32).reshape(3, 2)
    task = _unit(Span(0, 3), Span(0, 2), Span(0, 1), "fp32", partial=False)
    output.place(task, block.tobytes())
    output.finish()
    assert np.array_equal(memory[1:3, ::2].T, block)
    assert memory.sum() == block.sum()
