"""Honest blocks pass, in every dtype and whatever their numbers; wrong ones do not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave import arrays
from cleave.arrays import Array, Buffer, DType
from cleave.device.executors import NumpyExecutor
from cleave.gemm import Block, Span
from cleave.verify import Fault, GemmCheck

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


class Case:
    """A product of one block, and its check."""

    def __init__(
        self,
        sides: tuple[int, int, int],
        dtype: DType = DType.FP32,
        out: DType = DType.FP32,
        kind: str = "normal",
        seed: int = 0,
    ) -> None:
        m, n, k = sides
        rng = np.random.default_rng(seed)
        a, b = (
            Buffer(arrays.narrow(numbers(rng, kind, shape), dtype), dtype)
            for shape in ((m, k), (k, n))
        )
        self.block = Block(Span(0, m), Span(0, n), (Span(0, k),))
        self.result = arrays.empty(m, n, out)
        NumpyExecutor().matmul(a, b, self.result)
        self.check = GemmCheck(a, b, [self.block], np.random.default_rng(seed + 1))

    def fault(self) -> Fault | None:
        return self.check.fault(self.block, self.result)


@pytest.mark.parametrize(("dtype", "out"), DTYPES)
@pytest.mark.parametrize(
    "kind", ["normal", "one sign", "heavy tails", "outlier columns", "tiny", "zeros"]
)
@settings(max_examples=15, deadline=None)
@given(
    sides=st.tuples(st.integers(1, 80), st.integers(1, 80), st.integers(1, 400)),
    seed=st.integers(0, 2**32),
)
def test_honest_blocks_pass(
    dtype: DType, out: DType, kind: str, sides: tuple[int, int, int], seed: int
) -> None:
    if dtype is DType.FP16 and kind != "normal":
        kind = "zeros"  # the others overflow or vanish in fp16
    assert Case(sides, dtype, out, kind, seed).fault() is None


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
@pytest.mark.parametrize(
    "lie",
    [zeros, one_element, scaled, exponent_bit, swapped_rows, cancelling_pairs, spread_noise],
)
def test_lies_are_found(dtype: DType, out: DType, lie: Callable[[Array], None]) -> None:
    for seed in range(20):
        case = Case((64, 48, 200), dtype, out, seed=seed)
        values = case.result.float32().copy()
        lie(values)
        case.result = Buffer(arrays.narrow(values, out), out)
        assert case.fault(), f"seed {seed}"


def test_half_the_depth_is_found() -> None:
    case = Case((32, 32, 256))
    short = Case((32, 32, 256))
    a, b = (side.float32() for side in (short.check._a, short.check._b))
    case.result.array[...] = a[:, :128] @ b[:128]
    assert case.fault()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_must_be_so_on_the_server_too(bad: float) -> None:
    case = Case((16, 16, 16))
    case.result.array[2, 3] = bad
    fault = case.fault()
    assert fault is not None
    assert "not finite" in fault.reason
    assert not fault.gross  # one element: a flipped bit


def test_an_overflow_of_the_run_itself_is_nobodys_fault() -> None:
    a = Buffer(np.full((4, 8), 1e25, np.float32), DType.FP32)
    b = Buffer(np.full((8, 4), 1e25, np.float32), DType.FP32)
    block = Block(Span(0, 4), Span(0, 4), (Span(0, 8),))
    result = arrays.empty(4, 4, DType.FP32)
    with np.errstate(all="ignore"):
        NumpyExecutor().matmul(a, b, result)
    check = GemmCheck(a, b, [block], np.random.default_rng(0))
    assert check.fault(block, result) is None
    result.array[0, 0] = 1.0
    assert check.fault(block, result)


def test_blocks_of_many_tiles_and_depths_share_their_vectors() -> None:
    rng = np.random.default_rng(0)
    a = Buffer(rng.standard_normal((60, 90), np.float32), DType.FP32)
    b = Buffer(rng.standard_normal((90, 40), np.float32), DType.FP32)
    blocks = [
        Block(Span(m, m + 20), Span(n, n + 20), (Span(k, k + 30),))
        for m in (0, 20, 40)
        for n in (0, 20)
        for k in (0, 30, 60)
    ]
    check = GemmCheck(a, b, blocks, rng)
    for block in blocks:
        part = a.region(block.m, block.k).array @ b.region(block.k, block.n).array
        assert check.fault(block, Buffer(part, DType.FP32)) is None
        part[0, 0] += 1
        assert check.fault(block, Buffer(part, DType.FP32))
