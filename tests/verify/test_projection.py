"""A pass over a matrix, by numpy and compiled: the same numbers, however the matrix lies."""

from __future__ import annotations

import threading
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave import arrays
from cleave.arrays import Array, Buffer, DType
from cleave.verify.projection import Pass, Projector, compiled_pass, numpy_pass
from tests.examples import examples


@pytest.fixture(scope="module", params=["numpy", "compiled"])
def project(request: pytest.FixtureRequest) -> Pass:
    if request.param == "numpy":
        return numpy_pass
    pytest.importorskip("numba")
    return compiled_pass()


HOW = [
    "along", "across", "in a larger one", "across in a larger one", "every other", "backwards",
    "as it came",
]  # fmt: skip


def lying(values: Array, how: str, dtype: DType) -> Buffer:
    """A matrix of these values somewhere in memory."""
    values = arrays.narrow(values.astype(np.float32), dtype)
    match how:
        case "across":
            return Buffer(np.asfortranarray(values), dtype)
        case "in a larger one":
            room = np.zeros((values.shape[0] + 2, values.shape[1] + 5), values.dtype)
            room[1:-1, 2:-3] = values
            return Buffer(room[1:-1, 2:-3], dtype)
        case "across in a larger one":
            room = np.zeros((values.shape[1] + 2, values.shape[0] + 5), values.dtype)
            room[1:-1, 2:-3] = values.T
            return Buffer(room[1:-1, 2:-3].T, dtype)
        case "every other":
            room = np.zeros((2 * values.shape[0], 2 * values.shape[1]), values.dtype)
            room[::2, ::2] = values
            return Buffer(room[::2, ::2], dtype)
        case "backwards":
            return Buffer(values[::-1, ::-1].copy()[::-1, ::-1], dtype)
        case "as it came":  # bytes of a message: not to be written, at an odd place
            raw = b"x" + values.tobytes()
            return Buffer(np.frombuffer(raw, values.dtype, offset=1).reshape(values.shape), dtype)
    return Buffer(values, dtype)


@pytest.mark.slow
@settings(max_examples=examples(150), deadline=None)
@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 70)),
    count=st.integers(0, 13),
    how=st.sampled_from(HOW),
    dtype=st.sampled_from(list(DType)),
    seed=st.integers(0, 2**32),
    weighted=st.booleans(),
)
def test_products_and_norms(
    project: Pass,
    shape: tuple[int, int],
    count: int,
    how: str,
    dtype: DType,
    seed: int,
    weighted: bool,
) -> None:
    rng = np.random.default_rng(seed)
    matrix = lying(rng.standard_normal(shape) * 10.0 ** rng.integers(-15, 4), how, dtype)
    vectors, weights = rng.standard_normal((count, shape[1])), rng.random(shape[1])
    [found], [squares] = project(matrix, vectors, weights if weighted else None, None)
    exact = matrix.float32().astype(np.float64)
    assert found.shape == (count, shape[0])
    assert found.dtype == squares.dtype == np.float64
    # In double precision: far closer than the sums of fp32 that a check judges.
    reach = np.abs(vectors) @ np.abs(exact.T)
    assert (np.abs(found - vectors @ exact.T) <= 1e-14 * reach).all()
    if weighted:
        np.testing.assert_allclose(squares, np.square(exact) @ weights, rtol=1e-13)
    else:
        assert squares.size == 0


@settings(max_examples=examples(60), deadline=None)
@given(
    rows=st.integers(1, 9),
    sizes=st.lists(st.sampled_from([1, 3, 84, 400, 1024, 1500]), min_size=1, max_size=5),
    count=st.sampled_from([0, 1, 2, 4]),
    how=st.sampled_from(HOW),
    dtype=st.sampled_from(list(DType)),
    seed=st.integers(0, 2**32),
)
def test_groups_of_columns_are_as_matrices_of_their_own(
    project: Pass, rows: int, sizes: list[int], count: int, how: str, dtype: DType, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    bounds = np.cumsum([0, *sizes])
    matrix = lying(rng.standard_normal((rows, bounds[-1])), how, dtype)
    vectors, weights = rng.standard_normal((count, bounds[-1])), rng.random(bounds[-1])
    found, squares = project(matrix, vectors, weights, bounds)
    assert found.shape == (len(sizes), count, rows)
    for group, (start, stop) in enumerate(pairwise(bounds)):
        some = Buffer(matrix.array[:, start:stop], dtype)
        [own], [own_squares] = numpy_pass(some, vectors[:, start:stop], weights[start:stop], None)
        np.testing.assert_allclose(found[group], own, atol=1e-11)
        np.testing.assert_allclose(squares[group], own_squares, rtol=1e-12)


@pytest.mark.parametrize("shape", [(3, 5000), (5000, 3), (700, 1300)])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("count", [2, 14])
def test_large_ones(project: Pass, shape: tuple[int, int], order: str, count: int) -> None:
    rng = np.random.default_rng(1)
    values = np.asarray(rng.standard_normal(shape, np.float32), order="C" if order == "C" else "F")
    vectors, weights = rng.standard_normal((count, shape[1])), rng.random(shape[1])
    [found], [squares] = project(Buffer(values, DType.FP32), vectors, weights, None)
    exact = values.astype(np.float64)
    np.testing.assert_allclose(found, vectors @ exact.T, atol=1e-11)
    np.testing.assert_allclose(squares, np.square(exact) @ weights, rtol=1e-13)


@pytest.mark.parametrize("order", ["C", "F"])
def test_what_is_not_finite_stays_so(project: Pass, order: str) -> None:
    values = np.ones((9, 7), np.float32, order="C" if order == "C" else "F")
    values[1, 6], values[4, 2], values[8, 0] = np.inf, np.nan, -np.inf
    with np.errstate(all="ignore"):
        [found], [squares] = project(Buffer(values, DType.FP32), np.ones((3, 7)), np.ones(7), None)
    strange = [1, 4, 8]
    assert not np.isfinite(found[:, strange]).any()
    assert not np.isfinite(squares[strange]).any()
    right = [0, 2, 3, 5, 6, 7]
    assert (found[:, right] == 7).all()
    assert (squares[right] == 7).all()


def test_norms_that_fp32_cannot_hold(project: Pass) -> None:
    values = np.full((2, 4), 1e-30, np.float32)
    values[1] = 1e30
    _, [squares] = project(Buffer(values, DType.FP32), np.zeros((0, 4)), np.ones(4), None)
    np.testing.assert_allclose(squares, [4e-60, 4e60], rtol=1e-6)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_empty_ones(project: Pass, shape: tuple[int, int]) -> None:
    matrix = Buffer(np.zeros(shape, np.float32), DType.FP32)
    [found], [squares] = project(matrix, np.ones((2, shape[1])), np.ones(shape[1]), None)
    assert found.shape == (2, shape[0])
    assert squares.shape == (shape[0],)
    assert not found.any()
    assert not squares.any()


def test_a_long_run_is_compiled() -> None:
    pytest.importorskip("numba")
    project = Projector(worth_compiling_bytes=1000)
    matrix, vectors = Buffer(np.ones((8, 16), np.float32), DType.FP32), np.ones((2, 16))
    before = set(threading.enumerate())
    for _ in range(3):  # of 512 bytes each
        assert (project(matrix, vectors, None)[0] == 16).all()
    for thread in set(threading.enumerate()) - before:
        thread.join()
    assert project.compiled
    assert (project(matrix, vectors, None)[0] == 16).all()
