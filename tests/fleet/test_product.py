"""Results put in place: whatever the cuts, C is what the blocks add up to."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave import arrays
from cleave.arrays import Array, Buffer, DType
from cleave.fleet.product import Output
from cleave.gemm import Block, Span
from cleave.scheduler.tiles.tasks import GemmTask

dtypes = st.sampled_from(DType)


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


@given(st.data(), dtypes, st.integers(1, 9), st.integers(1, 9), st.booleans())
def test_finished_blocks_in_any_order(
    data: st.DataObject, dtype: DType, m: int, n: int, as_bytes: bool
) -> None:
    a, b = _operands(m, n, 4)
    product = arrays.narrow(a @ b, dtype)
    out = arrays.empty(m, n, dtype)
    output = Output(out)
    blocks = [(r, c) for r in data.draw(cuts(m)) for c in data.draw(cuts(n))]
    for rows, columns in data.draw(st.permutations(blocks)):
        block = Buffer(product, dtype).region(rows, columns)
        task = _unit(rows, columns, Span(0, 4), dtype.value, partial=False)
        output.place(task, block.pack() if as_bytes else block)
    output.finish()
    assert np.array_equal(out.array, product)


@given(st.data(), dtypes, st.integers(1, 6), st.integers(1, 6), st.integers(1, 8))
def test_partial_sums_of_differently_cut_slabs(
    data: st.DataObject, dtype: DType, m: int, n: int, k: int
) -> None:
    a, b = _operands(m, n, k)
    out = arrays.empty(m, n, dtype)
    out.array[...] = 1  # whatever was there before must not show
    output = Output(out)
    for depth in data.draw(cuts(k)):
        slab = a[:, depth.start : depth.stop] @ b[depth.start : depth.stop]
        blocks = [(r, c) for r in data.draw(cuts(m)) for c in data.draw(cuts(n))]
        for rows, columns in data.draw(st.permutations(blocks)):
            part = Buffer(slab, DType.FP32).region(rows, columns)
            output.place(_unit(rows, columns, depth, dtype.value, partial=True), part.pack())
    output.finish()
    assert np.array_equal(out.array, arrays.narrow(a @ b, dtype))


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


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("finished_first", [True, False])
def test_finished_blocks_beside_partial_sums(
    dtype: DType, finished_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows 0:2 in one piece, rows 2:4 in two slabs: a plan may mix both."""
    empty = arrays.empty

    def poisoned(rows: int, columns: int, of: DType) -> Buffer:  # new memory holds anything
        buffer = empty(rows, columns, of)
        buffer.array.view(np.uint8)[...] = 0x7F
        return buffer

    monkeypatch.setattr(arrays, "empty", poisoned)
    a, b = _operands(4, 3, 6)
    out = arrays.empty(4, 3, dtype)
    out.array[...] = 0
    output = Output(out)
    n, whole = Span(0, 3), Span(0, 6)

    def finished() -> None:
        payload = Buffer(arrays.narrow(a[:2] @ b, dtype), dtype)
        output.place(_unit(Span(0, 2), n, whole, dtype.value, partial=False), payload)

    def partial() -> None:
        for k in (Span(0, 2), Span(2, 6)):
            payload = Buffer(a[2:, k.start : k.stop] @ b[k.start : k.stop], DType.FP32)
            output.place(_unit(Span(2, 4), n, k, dtype.value, partial=True), payload)

    for act in (finished, partial) if finished_first else (partial, finished):
        act()
    output.finish()
    assert np.array_equal(out.array, arrays.narrow(a @ b, dtype))
