"""The invariant backend: bits that do not depend on cuts, and products as good as fp32's."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cleave.arrays import Buffer, DType, empty
from cleave.gemm import Gemm, Span
from cleave.machine.backends import NumpyBackend, self_check
from cleave.planner.plan import DeviceRates, ElementBytes, Residency
from tests.faults.exact import FullDepthPlanner, InvariantBackend


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    out = empty(a.shape[0], b.shape[1], DType.FP32)
    InvariantBackend().matmul(Buffer(a, DType.FP32), Buffer(b, DType.FP32), out)
    return out.array


def test_it_passes_the_check_of_every_backend() -> None:
    class Accumulating(InvariantBackend):
        """Sums in several parts, which are part of that check, as fp32 adds them."""

        def matmul(self, a: Buffer, b: Buffer, out: Buffer, *, accumulate: bool = False) -> None:
            part = empty(*out.shape, out.dtype)
            super().matmul(a, b, part)
            out.array[...] = out.array + part.array if accumulate else part.array

    assert self_check(Accumulating()) is None


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


def test_it_is_no_worse_than_fp32() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape, np.float32) for shape in ((64, 2048), (2048, 64)))
    exact = a.astype(np.float64) @ b.astype(np.float64)
    plain = empty(64, 64, DType.FP32)
    NumpyBackend().matmul(Buffer(a, DType.FP32), Buffer(b, DType.FP32), plain)
    assert np.abs(product(a, b) - exact).max() <= np.abs(plain.array - exact).max()


def test_sums_in_parts_are_sums() -> None:
    one = Buffer(np.ones((1, 1), np.float32), DType.FP32)
    out = Buffer(np.full((1, 1), 2, np.float32), DType.FP32)
    InvariantBackend().matmul(one, one, out, accumulate=True)
    assert out.array[0, 0] == 3


def test_plans_are_of_full_depth() -> None:
    gemm = Gemm(64, 64, 65536)  # a deep one, that is otherwise cut in depth
    devices = [DeviceRates(i, 1e9, 1e8, 1e10) for i in range(1, 9)]
    plan = FullDepthPlanner().plan(gemm, ElementBytes(4, 4), devices, [Residency()])
    assert {planned.tile.k for planned in plan.tiles} == {Span(0, gemm.k)}
    assert sum(planned.tile.volume for planned in plan.tiles) == gemm.volume
