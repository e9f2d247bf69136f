"""Products that a kernel of another client is given, each way in which matrices may lie."""

from __future__ import annotations

from itertools import product

import numpy as np

from benchmarks.client_kernels import Multiply
from cleave import arrays
from cleave.arrays import Buffer, DType
from cleave.verify.rounding import Product


def assert_multiplies(multiply: Multiply) -> None:
    """Let it multiply all dtypes, either operand transposed or a part of a larger matrix."""
    rng = np.random.default_rng(0)
    for dtype, out, turn_a, turn_b in product(DType, DType, (False, True), (False, True)):
        if out not in (dtype, DType.FP32):
            continue
        a, b = _matrix(rng, 33, 70, dtype, turn_a), _matrix(rng, 70, 51, dtype, turn_b)
        result = arrays.empty(33, 51, out)
        multiply(a, b, result)
        exact = Product.of(a.float32().astype(np.float64), b.float32().astype(np.float64))
        assert exact.likely(result.float32(), out).all(), (dtype, out, turn_a, turn_b)


def _matrix(
    rng: np.random.Generator, rows: int, columns: int, dtype: DType, turned: bool
) -> Buffer:
    shape = (columns, rows + 3) if turned else (rows, columns + 3)
    values = rng.standard_normal(shape).astype(np.float32)
    whole = Buffer(arrays.narrow(values, dtype), dtype)
    part = Buffer(whole.array[:, 3:], dtype)
    return part.T if turned else part
