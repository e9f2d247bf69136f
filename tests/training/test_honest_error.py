"""What tells rounding, and the kinks that it decides, from a lie."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays as array_of

from cleave.arrays import Array
from cleave.training.honest_error import Difference, moved

NUMBERS = array_of(np.float32, (4, 3), elements=st.floats(-1e6, 1e6, width=32))


@given(NUMBERS, NUMBERS)
def test_both_ways_to_compare_are_of_the_differences(one: Array, other: Array) -> None:
    found = Difference.between(one, other)
    off = np.abs(one.astype(np.float64) - other)
    assert found == Difference.between(other, one)
    assert found.largest == pytest.approx(off.max(), rel=1e-6, abs=1e-30)
    assert found.rms == pytest.approx(math.sqrt(np.mean(off**2)), rel=1e-5, abs=1e-30)
    assert found.rms <= found.largest * (1 + 1e-6)
    assert found.or_more(Difference()) == found


@pytest.mark.parametrize("same", [math.inf, -math.inf, math.nan])
def test_what_is_no_number_in_both_is_equal(same: float) -> None:
    values = np.array([1, same], np.float32)
    assert Difference.between(values, values) == Difference()


@pytest.mark.parametrize("found", [math.inf, -math.inf, math.nan])
def test_what_is_no_number_in_one_is_wrong_whatever_moves_it(found: float) -> None:
    off = Difference.between(np.array([1, found], np.float32), np.array([1, 1], np.float32))
    assert not off.is_honest(1e30, Difference(1e30, 1e30))
    assert not Difference(2.0, 2.0).is_honest(1.0, off) or math.isinf(off.largest)


@given(NUMBERS, st.floats(0, 1))
def test_what_rounding_alone_explains_is_honest(one: Array, share: float) -> None:
    limit = 1e-4 * float(np.abs(one).max())
    off = Difference.between(one, one * np.float32(1 + 1e-4 * share))
    assert off.is_honest(limit * 1.001 + 1e-30, Difference()) or share > 0.99


def test_kinks_are_few_elements_and_a_lie_in_all_is_seen() -> None:
    wanted = np.ones((100, 100), np.float32)
    kink, other_kink, lie = wanted.copy(), wanted.copy(), wanted * np.float32(1.005)
    kink[7], other_kink[50] = 1.01, 0.99
    off_by_kinks = Difference.between(kink, wanted)
    assert not off_by_kinks.is_honest(1e-4, Difference())
    assert off_by_kinks.is_honest(1e-4, Difference.between(other_kink, wanted))
    assert not Difference.between(lie, wanted).is_honest(1e-4, off_by_kinks)


@given(NUMBERS, st.integers(0, 2**32))
def test_moved_numbers_differ_by_rounding(values: Array, seed: int) -> None:
    assert moved(values, None) is values
    found = moved(values, np.random.default_rng(seed))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, values, rtol=2.1e-6, atol=1e-44)


def test_numbers_are_moved_either_way() -> None:
    values = np.ones((100, 100), np.float32)
    found = moved(values, np.random.default_rng(1))
    assert 0.4 < float(np.mean(found > values)) < 0.6
    assert float(np.mean(found < values)) == pytest.approx(1 - float(np.mean(found > values)))
