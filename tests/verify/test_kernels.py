"""The compiled loops as the Python that they are written in: every branch, on small matrices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cleave.arrays import Buffer, DType
from cleave.verify.projection import numpy_pass

kernels: Any = pytest.importorskip("cleave.verify.kernels")


@pytest.fixture(autouse=True)
def as_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """What only the compiler knows, for fp32; and lines so short that some are cut."""
    monkeypatch.setattr(kernels, "_f64", float)
    monkeypatch.setattr(kernels, "_fetch", lambda array, index: array[index])
    monkeypatch.setattr(kernels, "_WIDE", 8)


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("count", [0, 1, 2, 3])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("sizes", [(5,), (3, 4), (2, 11, 1), (8, 8)])
def test_it_is_the_pass_of_numpy(
    across: bool, count: int, weighted: bool, sizes: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(len(sizes))
    rows, bounds = 9, np.cumsum([0, *sizes])
    columns = int(bounds[-1])
    matrix = rng.standard_normal((rows, columns)).astype(np.float32)
    vectors, weights = rng.standard_normal((count, columns)), rng.random(columns)
    expected = numpy_pass(
        Buffer(matrix, DType.FP32), vectors, weights if weighted else None, bounds
    )
    out = np.zeros((len(sizes), count, rows))
    squares = np.zeros((len(sizes), rows if weighted else 0))
    given = weights if weighted else np.zeros(0)
    flat = np.ascontiguousarray(matrix.T if across else matrix).reshape(-1)
    loop = kernels.across if across else kernels.along
    loop(flat, rows if across else columns, vectors, given, bounds, out, squares)
    np.testing.assert_allclose(out, expected[0], atol=1e-12)
    np.testing.assert_allclose(squares, expected[1], rtol=1e-12)
