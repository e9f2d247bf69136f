"""What no order of summing in fp32 exceeds, and what gives away who changes a little."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave import arrays
from cleave.arrays import Array, Buffer, DType
from cleave.gemm import Block, Span
from cleave.scheduler.sessions.reputation import Rounding
from cleave.verify import GemmCheck
from cleave.verify.check import SPOTS
from cleave.verify.rounding import Product
from tests.examples import examples

OUTS = list(DType)


def in_turn(terms: Array) -> Array:
    """Sum over the last axis, one after the other, in fp32."""
    total = np.zeros(terms.shape[:-1], np.float32)
    for k in range(terms.shape[-1]):
        total += terms[..., k]
    return total


def largest_first(terms: Array) -> Array:
    return in_turn(-np.sort(-np.abs(terms), axis=-1) * np.sign(_by_size(terms)))


def _by_size(terms: Array) -> Array:
    return np.take_along_axis(terms, np.argsort(-np.abs(terms), axis=-1), -1)


def in_halves(terms: Array) -> Array:
    while terms.shape[-1] > 1:
        half = terms.shape[-1] // 2
        rest = terms[..., 2 * half :]
        terms = np.concatenate([terms[..., :half] + terms[..., half : 2 * half], rest], -1)
    return np.asarray(terms[..., 0])


def cut_off(terms: Array) -> Array:
    """As adders do that cut sums off instead of rounding them."""
    total = np.zeros(terms.shape[:-1], np.float32)
    for k in range(terms.shape[-1]):
        exact = total.astype(np.float64) + terms[..., k]
        rounded = exact.astype(np.float32)
        beyond = np.abs(rounded.astype(np.float64)) > np.abs(exact)
        total = np.where(beyond, np.nextafter(rounded, np.float32(0)), rounded)
    return total


ORDERS = [in_turn, largest_first, in_halves, cut_off]


def operands(seed: int, kind: str, depth: int) -> tuple[Array, Array]:
    """A and B of a small product, in fp32."""
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((8, depth)), rng.standard_normal((depth, 9))
    match kind:
        case "one sign":
            a, b = np.abs(a), np.abs(b)
        case "cancelling":
            a[:, 1::2] = -a[:, : 2 * (depth // 2) : 2]
            b[1::2] = b[: 2 * (depth // 2) : 2] * (1 + 1e-6)
        case "equal":
            a[...], b[...] = 0.1, 0.3
    return a.astype(np.float32), b.astype(np.float32)


@pytest.mark.parametrize("out", OUTS)
@pytest.mark.parametrize("order", ORDERS)
@settings(max_examples=examples(20), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    kind=st.sampled_from(["normal", "one sign", "cancelling", "equal"]),
    depth=st.integers(1, 600),
)
def test_no_order_of_summing_is_ever_blamed(
    out: DType, order: Callable[[Array], Array], seed: int, kind: str, depth: int
) -> None:
    a, b = operands(seed, kind, depth)
    own = Product.of(a.astype(np.float64), b.astype(np.float64))
    sums = order(a[:, None, :] * b.T[None, :, :])
    values = Buffer(arrays.narrow(sums, out), out).float32()
    assert own.may_be(values, out).all()


@pytest.mark.parametrize("out", [DType.BF16, DType.FP16])
@pytest.mark.parametrize("order", ORDERS[:3])
def test_honest_sums_are_the_right_rounding_nearly_always(
    out: DType, order: Callable[[Array], Array]
) -> None:
    missed = spots = 0
    for seed in range(40):
        a, b = operands(seed, ("normal", "one sign", "cancelling", "equal")[seed % 4], 512)
        own = Product.of(a.astype(np.float64), b.astype(np.float64))
        values = Buffer(arrays.narrow(order(a[:, None, :] * b.T), out), out).float32()
        missed += int((~own.likely(values, out)).sum())
        spots += values.size
    assert missed <= spots / 1000


@pytest.mark.parametrize("out", [DType.BF16, DType.FP16])
def test_the_next_number_but_one_is_beyond_every_order(out: DType) -> None:
    a, b = operands(0, "normal", 64)
    own = Product.of(a.astype(np.float64), b.astype(np.float64))
    right = arrays.narrow(own.exact.astype(np.float32), out)
    further = (right.view(np.uint16) + np.uint16(2)).view(out.storage)
    values = Buffer(further, out).float32()
    large = np.abs(own.exact) > 4  # of small ones the sum itself may be off by as much
    assert large.any()
    assert not own.may_be(values, out)[large].any()


def test_where_a_partial_sum_may_overflow_anything_not_finite_is_right() -> None:
    a, b = np.array([[1e30, -1e30, 1.0]]), np.array([[1e30], [1e30], [1.0]])
    own = Product.of(a, b)
    assert own.may_be(np.array([[np.inf]], np.float32), DType.FP32).all()
    assert own.may_be(np.array([[np.nan]], np.float32), DType.FP32).all()
    tame = Product.of(np.ones((1, 3)), np.ones((3, 1)))
    assert not tame.may_be(np.array([[np.inf]], np.float32), DType.FP32).any()


class Steerer:
    """A device that adds a direction of its own to all it returns, within the check's tolerance.

    Args:
        share: of the largest direction that no check of rows would notice.
    """

    def __init__(self, share: float, columns: int, rng: np.random.Generator) -> None:
        self._share = share
        self._direction = rng.choice([-1.0, 1.0], columns)

    def steered(self, exact: Array, dtype: DType) -> Buffer:
        """A block that points a little more in the direction."""
        size = self._share * 2.0**-8 * np.sqrt(np.square(exact).mean())
        return Buffer(
            arrays.narrow((exact + size * self._direction).astype(np.float32), dtype), dtype
        )


@pytest.mark.parametrize("seed", range(20))
def test_who_steers_within_the_tolerance_is_found_out(seed: int) -> None:
    """Consistent errors of the size of rounding, in every weight gradient of 512 columns."""
    rng = np.random.default_rng(seed)
    steerer, rounding = Steerer(1.5, 512, rng), Rounding()
    block = Block(Span(0, 64), Span(0, 512), (Span(0, 256),))
    caught = None
    for step in range(50):
        a, b = (
            Buffer(arrays.narrow(rng.standard_normal(shape, np.float32), DType.BF16), DType.BF16)
            for shape in ((64, 256), (256, 512))
        )
        exact = a.float32().astype(np.float64) @ b.float32()
        check = GemmCheck(a, b, [block], rng)
        judgement = check.judge(block, steerer.steered(exact, DType.BF16))
        rounding.saw(judgement.spots, judgement.misrounded)
        if judgement.fault is not None or rounding.biased:
            caught = step
            break
    assert caught is not None


def test_a_few_spots_are_looked_at_in_every_16_bit_block_and_in_no_other() -> None:
    rng = np.random.default_rng(0)
    for dtype, expected in ((DType.BF16, SPOTS**2), (DType.FP32, 0)):
        a, b = (
            Buffer(arrays.narrow(rng.standard_normal((40, 40), np.float32), dtype), dtype)
            for _ in range(2)
        )
        block = Block(Span(0, 40), Span(0, 40), (Span(0, 40),))
        result = Buffer(arrays.narrow(a.float32() @ b.float32(), dtype), dtype)
        assert GemmCheck(a, b, [block], rng).judge(block, result).spots == expected


def test_evidence_needs_many_and_honest_work_buys_no_credit() -> None:
    rounding = Rounding()
    for _ in range(100_000):  # once in ten thousand, as the worst honest ones
        rounding.saw(16, 0)
    rounding.saw(16, 1)
    assert not rounding.biased
    for _ in range(50):
        rounding.saw(16, 3)
    assert rounding.biased
