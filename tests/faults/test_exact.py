"""The invariant backend: bits that do not depend on cuts, and products as good as fp32's."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cleave.arrays import Buffer, DType, empty
from cleave.gemm import Span
from tests.faults.exact import InvariantBackend


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    out = empty(a.shape[0], b.shape[1], DType.FP32)
    InvariantBackend().matmul(Buffer(a, DType.FP32), Buffer(b, DType.FP32), out)
    return out.array


@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(1, 40), st.integers(1, 300))
def test_cuts_in_rows_and_columns_change_no_bit(seed: int, m: int, n: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    # Magnitudes far apart: where orders of summation differ most.
    a, b = (
        (rng.standard_normal(shape) * 10.0 ** rng.integers(-12, 12, shape)).astype(np.float32)
        for shape in ((m, k), (k, n))
    )
    whole = product(a, b)
    rows, columns = (
        Span(*sorted(rng.integers(0, m + 1, 2))),
        Span(*sorted(rng.integers(0, n + 1, 2))),
    )
    part = product(a[rows.start : rows.stop], np.asfortranarray(b[:, columns.start : columns.stop]))
    expected = whole[rows.start : rows.stop, columns.start : columns.stop]
    assert part.tobytes() == np.ascontiguousarray(expected).tobytes()


def test_sums_in_parts_are_sums() -> None:
    one = Buffer(np.ones((1, 1), np.float32), DType.FP32)
    out = Buffer(np.full((1, 1), 2, np.float32), DType.FP32)
    InvariantBackend().matmul(one, one, out, accumulate=True)
    assert out.array[0, 0] == 3
