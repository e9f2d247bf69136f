"""Honest blocks pass, in every dtype and whatever their numbers; wrong ones do not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave import arrays
from cleave.arrays import Array, Buffer, DType
from cleave.gemm import Block, Span, Tile, TileCut, even_cuts, wavefront
from cleave.machine.backends import NumpyBackend
from cleave.verify import Fault, GemmCheck, Judgement
from tests.examples import examples

DTYPES = [
    (DType.FP32, DType.FP32),
    (DType.BF16, DType.FP32),
    (DType.BF16, DType.BF16),
    (DType.FP16, DType.FP16),
]


def numbers(rng: np.random.Generator, kind: str, shape: tuple[int, int]) -> Array:
    """Matrices as they occur, and some that are hard."""
    values = rng.standard_normal(shape)
    match kind:
        case "one sign":
            values = np.abs(values) + 1
        case "heavy tails":
            values *= np.exp(rng.standard_normal(shape))
        case "outlier columns":
            values[:, :: max(1, shape[1] // 3)] *= 40
        case "tiny":
            values *= 1e-18
        case "zeros":
            values *= 0
    return values.astype(np.float32)


def buffer(values: Array, dtype: DType) -> Buffer:
    return Buffer(arrays.narrow(values.astype(np.float32), dtype), dtype)


class Case:
    """A product of one block, and its check."""

    def __init__(self, a: Buffer, b: Buffer, out: DType, seed: int = 1) -> None:
        (m, k), n = a.shape, b.shape[1]
        self.block = Block(Span(0, m), Span(0, n), (Span(0, k),))
        self.result = arrays.empty(m, n, out)
        with np.errstate(all="ignore"):
            NumpyBackend().matmul(a, b, self.result)
        self.check = GemmCheck(a, b, [self.block], np.random.default_rng(seed))

    @classmethod
    def drawn(
        cls,
        sides: tuple[int, int, int],
        dtype: DType = DType.FP32,
        out: DType = DType.FP32,
        kind: str = "normal",
        seed: int = 0,
    ) -> Case:
        m, n, k = sides
        rng = np.random.default_rng(seed)
        a, b = (buffer(numbers(rng, kind, shape), dtype) for shape in ((m, k), (k, n)))
        return cls(a, b, out, seed + 1)

    def judge(self) -> Judgement:
        return self.check.judge(self.block, self.result)

    def fault(self) -> Fault | None:
        return self.judge().fault


@pytest.mark.parametrize(("dtype", "out"), DTYPES)
@pytest.mark.parametrize(
    "kind", ["normal", "one sign", "heavy tails", "outlier columns", "tiny", "zeros"]
)
@settings(max_examples=examples(15), deadline=None)
@given(
    sides=st.tuples(st.integers(1, 80), st.integers(1, 80), st.integers(1, 400)),
    seed=st.integers(0, 2**32),
)
def test_honest_blocks_pass(
    dtype: DType, out: DType, kind: str, sides: tuple[int, int, int], seed: int
) -> None:
    if dtype is DType.FP16 and kind != "normal":
        kind = "zeros"  # the others overflow or vanish in fp16
    judgement = Case.drawn(sides, dtype, out, kind, seed).judge()
    assert judgement.fault is None
    assert judgement.mended is None
    assert not judgement.misrounded


def zeros(c: Array) -> None:
    c[...] = 0


def one_element(c: Array) -> None:
    c[3, 5] += 3 * c.std()


def scaled(c: Array) -> None:
    c *= 1.01


def exponent_bit(c: Array) -> None:
    """A flipped bit doubles an element. Of a small one in bf16 that hides among the rounding."""
    c.flat[np.abs(c).argmax()] *= 2


def swapped_rows(c: Array) -> None:
    c[[0, 1]] = c[[1, 0]]


def cancelling_pairs(c: Array) -> None:
    """Two rows and two columns whose errors cancel under any vector of plain equal signs."""
    error = 5 * c.std()
    c[0, 0] += error
    c[0, 1] -= error
    c[1, 0] -= error
    c[1, 1] += error


def spread_noise(c: Array) -> None:
    """Ten times the rounding of bf16, over all elements."""
    c += c * np.random.default_rng(5).standard_normal(c.shape).astype(np.float32) * 10 * 2.0**-9


@pytest.mark.parametrize(("dtype", "out"), DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_must_be_so_on_the_server_too(
    bad: float, dtype: DType, out: DType
) -> None:
    """Partial sums are in fp32 whatever the operands are."""
    case = Case.drawn((16, 16, 16), dtype, out)
    case.result.array[2, 3] = arrays.narrow(np.full((1, 1), bad, np.float32), out)[0, 0]
    fault = case.fault()
    assert fault is not None
    assert f"has an element of {bad:g}, but the product is" in fault.reason
    assert not fault.gross  # one element: a flipped bit


def flipped_in_a(c: Array) -> None:
    """One element of A: its row of C."""
    c[4] += np.random.default_rng(0).standard_normal(c.shape[1]) * 1e6


def flipped_in_b(c: Array) -> None:
    """One element of B: its column of C."""
    c[:, 7] += np.random.default_rng(0).standard_normal(c.shape[0]) * 1e6


def stale(c: Array) -> None:
    c[...] = np.random.default_rng(9).standard_normal(c.shape) * c.std()


def not_a_number(c: Array) -> None:
    c[...] = np.nan


@pytest.mark.parametrize(("dtype", "out"), DTYPES)
@pytest.mark.parametrize(
    ("lie", "gross"),
    [
        *((lie, True) for lie in (zeros, stale, not_a_number)),
        *((lie, False) for lie in (one_element, scaled, exponent_bit, swapped_rows, spread_noise)),
        *((lie, False) for lie in (cancelling_pairs, flipped_in_a, flipped_in_b)),
    ],
)
def test_lies_are_found_and_a_flipped_bit_is_no_gross_fault(
    dtype: DType, out: DType, lie: Callable[[Array], None], gross: bool
) -> None:
    for seed in range(20):
        case = Case.drawn((64, 48, 200), dtype, out, seed=seed)
        values = case.result.float32().copy()
        lie(values)
        case.result = buffer(values, out)
        fault = case.fault()
        assert fault is not None, f"seed {seed}"
        assert fault.gross is gross, f"seed {seed}"


@pytest.mark.parametrize("rows", [slice(0, 4), slice(0, 1)])
def test_an_overflow_of_the_run_itself_is_nobodys_fault(rows: slice) -> None:
    """What is finite beside it is checked."""
    a = Buffer(np.ones((4, 8), np.float32), DType.FP32)
    a.array[rows] = 3e38
    b = Buffer(np.ones((8, 4), np.float32), DType.FP32)
    case = Case(a, b, DType.FP32)
    assert case.fault() is None
    case.result.array[3, 2] = 9.0
    assert case.fault()


@pytest.mark.parametrize("value", [300.0, 65519.0 / 256, 65521.0 / 256])
def test_an_overflow_of_fp16_is_nobodys_fault(value: float) -> None:
    a = Buffer(np.full((4, 256), 1.0, np.float16), DType.FP16)
    b = Buffer(np.full((256, 4), value, np.float16), DType.FP16)
    case = Case(a, b, DType.FP16)
    assert case.fault() is None
    case.result.array[1, 1] = 1.0
    assert case.fault()


def test_numbers_near_the_smallest_are_rounded_absolutely() -> None:
    for dtype, size in ((DType.FP16, 3e-5), (DType.BF16, 1e-37), (DType.FP32, 1e-37)):
        rng = np.random.default_rng(1)
        a = buffer(rng.standard_normal((16, 4)), dtype)
        b = buffer(size * rng.standard_normal((4, 16)), dtype)
        assert Case(a, b, dtype).fault() is None, dtype


@settings(max_examples=examples(15), deadline=None)
@given(seed=st.integers(0, 2**32), tiles=st.integers(1, 4))
def test_tiles_that_are_cut_differently_share_what_is_read(seed: int, tiles: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = (Buffer(rng.standard_normal((60, 60), np.float32), DType.FP32) for _ in range(2))
    blocks: list[Block] = []
    for n in even_cuts(Span(0, 60), tiles):
        for k in even_cuts(Span(0, 60), int(rng.integers(1, 4))):
            for m in even_cuts(Span(0, 60), int(rng.integers(1, 5))):
                cut = TileCut(
                    Tile(m, n, k),
                    even_cuts(m, int(rng.integers(1, 4))),
                    even_cuts(n, int(rng.integers(1, 4))),
                    (k,),
                )
                blocks += wavefront(cut)
    check = GemmCheck(a, b, blocks, rng)
    results = 0
    for block in blocks:
        part = a.region(block.m, block.k).array @ b.region(block.k, block.n).array
        results += part.nbytes
        assert check.judge(block, Buffer(part, DType.FP32)).fault is None
        part[0, -1] += 1
        assert check.judge(block, Buffer(part, DType.FP32)).fault
    # Once for A and B, more where norms are needed; results twice, for each was checked twice.
    assert check.read_bytes <= 3 * (a.nbytes + b.nbytes + 2 * results)


def test_blocks_that_no_plan_named_are_checked_too() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((32, 32), np.float32) for _ in range(2))
    whole = Span(0, 32)
    check = GemmCheck(
        Buffer(a, DType.FP32),
        Buffer(b, DType.FP32),
        [Block(whole, Span(0, 16), (whole,)), Block(whole, Span(16, 32), (whole,))],
        np.random.default_rng(1),
    )
    # As they are after a device was lost: other rows, other columns of known rows, other depths.
    for m, n, k in (
        (whole, Span(0, 16), whole),
        (Span(4, 8), Span(0, 16), whole),
        (Span(4, 8), Span(3, 7), whole),
        (whole, Span(3, 7), whole),
        (whole, Span(0, 16), Span(8, 24)),
    ):
        product = a[m.start : m.stop, k.start : k.stop] @ b[k.start : k.stop, n.start : n.stop]
        block = Block(m, n, (k,))
        assert check.judge(block, Buffer(product, DType.FP32)).fault is None
        product[1, 2] += 1
        assert check.judge(block, Buffer(product, DType.FP32)).fault is not None


def test_what_an_order_of_summing_may_explain_is_mended_and_nobodys_fault() -> None:
    case = Case.drawn((64, 48, 300))
    a, b = (side.float32().astype(np.float64) for side in (case.check._a, case.check._b))
    exact, reach = a @ b, np.abs(a) @ np.abs(b)
    # Half of what the worst order could do, in one row: far more than what honest devices do.
    case.result.array[7] = (exact[7] + 300 * 2.0**-24 * reach[7] / 2).astype(np.float32)
    judgement = case.judge()
    assert judgement.fault is None
    assert judgement.recomputed == 1
    assert judgement.mended is not None
    np.testing.assert_array_equal(judgement.mended.array[7], exact[7].astype(np.float32))
    others = np.arange(64) != 7
    np.testing.assert_array_equal(judgement.mended.array[others], case.result.array[others])
    case.result.array[7] = (exact[7] + 3 * 300 * 2.0**-24 * reach[7]).astype(np.float32)
    assert case.fault() is not None


@pytest.mark.parametrize("size", [1, 30, 1000])
def test_a_large_column_hides_nothing_in_the_others(size: float) -> None:
    rng = np.random.default_rng(3)
    right = rng.standard_normal((256, 512), np.float32)
    right[:, 100] *= size
    a, b = (buffer(x, DType.BF16) for x in (rng.standard_normal((64, 256), np.float32), right))
    exact = a.float32() @ b.float32()
    ordinary = float(np.delete(exact, 100, 1).std())
    for seed in range(20):
        case, wrong = Case(a, b, DType.BF16, seed), exact.copy()
        wrong[seed, 300 + seed] += 0.8 * ordinary
        case.result = buffer(wrong, DType.BF16)
        assert case.fault()


@pytest.mark.parametrize(("dtype", "out"), DTYPES)
@pytest.mark.parametrize(("ordinary", "largest"), [(0, 1), (0, 1e4), (1, 1e4)])
def test_a_column_with_one_large_element_hides_nothing_in_the_others(
    ordinary: float, largest: float, dtype: DType, out: DType
) -> None:
    """As behind ReLU, or of a token that all attend to: a part of the depth says little."""
    m, n, k = 64, 48, 2048
    for seed in range(10):
        rng = np.random.default_rng(seed)
        right = rng.standard_normal((k, n))
        right[:, 7] *= ordinary
        right[rng.integers(k), 7] = largest
        case = Case(buffer(rng.standard_normal((m, k)), dtype), buffer(right, dtype), out, seed)
        assert case.judge() == Judgement() or out is not DType.FP32
        values = case.result.float32()
        values[3, 5] += 0.1 * k**0.5 if out is DType.FP32 else 4 * k**0.5
        case.result = buffer(values, out)
        assert case.fault() is not None
