"""What tells rounding from a lie."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays as array_of

from cleave import arrays
from cleave.arrays import Array, DType
from cleave.training.stages.honest_error import (
    NEGLIGIBLE,
    ROUNDING,
    Comparison,
    Evidence,
    Magnitudes,
    error_of,
    moved,
)

NUMBERS = array_of(np.float32, (4, 3), elements=st.floats(-1e6, 1e6, width=32))
NARROW = (DType.BF16, DType.FP16)


def sent(values: Array, dtype: DType) -> Array:
    """Return numbers as they come from a device that returns them in a dtype."""
    return arrays.Buffer(arrays.narrow(values, dtype), dtype).float32()


def gradients(seed: int = 1) -> Array:
    """Return numbers of which three quarters are a thousand times smaller than the others."""
    found = np.random.default_rng(seed).standard_normal((64, 64), np.float32)
    found[16:] /= 1000
    return found


@pytest.mark.parametrize("dtype", NARROW)
@given(NUMBERS)
def test_the_right_rounding_is_no_error(dtype: DType, wanted: Array) -> None:
    wanted = np.clip(wanted, -6e4, 6e4)
    assert not error_of(sent(wanted, dtype), wanted, dtype).any()


@pytest.mark.parametrize(("dtype", "digits"), [(DType.BF16, 8), (DType.FP16, 11)])
def test_the_wrong_neighbour_is_an_error(dtype: DType, digits: int) -> None:
    wanted = np.linspace(1.01, 1.9, 1000, dtype=np.float32)[None]
    step = 2.0 ** (1 - digits)
    found = error_of(sent(wanted, dtype) + np.float32(step), wanted, dtype)
    assert found.min() >= 0
    assert float(found.mean()) == pytest.approx(step / 2, rel=0.1)


@pytest.mark.parametrize("same", [math.inf, -math.inf, math.nan])
def test_what_is_no_number_in_both_is_equal(same: float) -> None:
    values = np.array([[1, same]], np.float32)
    assert Comparison.of(values, values, DType.FP32).excess == 0
    assert Comparison.of(values, values, DType.BF16).excess == 0


@pytest.mark.parametrize("found", [math.inf, -math.inf, math.nan])
def test_what_is_no_number_in_one_is_wrong_unless_rounding_does_that_too(found: float) -> None:
    wanted, other = np.array([[1, 1]], np.float32), np.array([[1, found]], np.float32)
    compared = Comparison.of(other, wanted, DType.FP32)
    compared.repeated(wanted)
    assert compared.excess == math.inf
    compared.repeated(other)
    assert compared.excess <= 1


@given(NUMBERS, st.floats(-1, 1))
def test_negligible_errors_are_right(wanted: Array, share: float) -> None:
    found = wanted * np.float32(1 + 0.99 * NEGLIGIBLE * share)
    assert Comparison.of(found, wanted, DType.FP32).excess <= 1


@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("factor", [-1.0, 0.0, 0.5, 0.9, 1.1])
def test_small_elements_are_judged_by_their_own_size(dtype: DType, factor: float) -> None:
    wanted = gradients()
    lied = wanted.copy()
    lied[16:] *= np.float32(factor)
    compared = Comparison.of(sent(lied, dtype), wanted, dtype)
    for seed in range(3):
        compared.repeated(moved(wanted, np.random.default_rng(seed)))
    assert compared.excess > 40


def test_an_array_that_is_nothing_but_rounding_is_right() -> None:
    """Where all cancels, devices return unrelated numbers. Rounding then explains any of them."""
    rng = np.random.default_rng(1)
    wanted, found = (1e-9 * rng.standard_normal((1, 64), np.float32) for _ in range(2))
    compared = Comparison.of(found, wanted, DType.FP32)
    assert compared.excess > 100
    for _ in range(4):
        compared.repeated(wanted + 1e-7 * rng.standard_normal((1, 64), np.float32))
    assert compared.excess < 1


def test_a_kink_moves_few_elements_and_a_lie_in_all_is_seen() -> None:
    wanted = np.ones((100, 100), np.float32)
    kink, other_kink = wanted.copy(), wanted.copy()
    kink[7], other_kink[50] = 1.1, 0.9
    honest = Comparison.of(kink, wanted, DType.FP32)
    assert honest.excess > 1
    honest.repeated(other_kink)
    assert honest.excess == pytest.approx(1)
    lie = Comparison.of(wanted * np.float32(1.05), wanted, DType.FP32)
    lie.repeated(other_kink)
    assert lie.excess > 4


def test_a_common_factor_is_seen_below_random_errors() -> None:
    """Rounding moves all elements by a tenth here, up or down, and a device makes all 2 % less."""
    rng = np.random.default_rng(1)
    wanted = gradients()

    def noise() -> Array:
        return 0.1 * wanted * rng.standard_normal(wanted.shape, np.float32)

    lie = Comparison.of(0.98 * wanted, wanted, DType.FP32)
    honest = Comparison.of(wanted + noise() / 4, wanted, DType.FP32)
    for _ in range(8):
        again = wanted + noise()
        lie.repeated(again)
        honest.repeated(again)
    assert lie.excess > 2
    assert honest.excess < 1


def test_large_arrays_are_measured_a_part_at_a_time() -> None:
    wanted = np.random.default_rng(1).standard_normal(600_000, np.float32)
    error = 0.5 * wanted
    found, sizes = Magnitudes(wanted).measures(error), Magnitudes(wanted).sizes
    np.testing.assert_allclose(found, sizes / 2, rtol=1e-6)


def test_evidence_adds_up_over_audits() -> None:
    certain, often, seldom = Evidence(), Evidence(), Evidence()
    assert certain.add(math.inf)
    assert certain.bits == 0  # an operator may release the device, which then begins anew
    assert [often.add(1.5) for _ in range(4)] == [False, False, False, True]
    assert not any(seldom.add(1.5 if audit % 10 == 0 else 0.5) for audit in range(1000))


@given(NUMBERS, st.integers(0, 2**32))
def test_moved_numbers_differ_by_rounding_either_way(values: Array, seed: int) -> None:
    found = moved(values, np.random.default_rng(seed))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, values, rtol=1.01 * ROUNDING, atol=1e-44)
    ones = np.ones((100, 100), np.float32)
    up, down = (
        np.mean(sign * (moved(ones, np.random.default_rng(seed)) - ones) > 0) for sign in (1, -1)
    )
    assert 0.4 < up < 0.6
    assert up + down == pytest.approx(1)
