"""The loops of `projection.compiled_pass`, compiled by numba.

Both take a matrix as lines that follow one another in memory: `flat`, 1-D, and the elements from
one line to the next. They add to `out`, shape (vectors, rows), and, unless it is empty, to
`squares`, shape (rows,). Four lines are read at a time, and two vectors, as many sums as registers.

Sums are taken in any order, as by BLAS; infinities and NaNs stay what they are.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numba
import numpy as np

from cleave.verify.projection import Floats

_WIDE: Final = 2048  # elements of a line at a time: four such parts stay in the innermost cache
_OPTIONS: Final[dict[str, Any]] = {
    "fastmath": {"reassoc", "contract", "nsz"},
    "error_model": "numpy",
    "nogil": True,
    "cache": True,
}


@cache
def compiled() -> tuple[Any, Any]:
    """`along` and `across` in machine code; from disk where they have been compiled before."""
    values = numba.types.float32
    # What fits every array: one that may be written and is aligned goes as this, too.
    flat = numba.types.Array(values, 1, "C", readonly=True, aligned=False)
    vectors = numba.types.Array(values, 2, "C", readonly=True)
    out, squares = (numba.types.Array(values, sides, "C") for sides in (2, 1))
    signature = numba.types.void(flat, numba.types.intp, vectors, out, squares)
    compile_ = numba.njit(signature, **_OPTIONS)
    return compile_(along), compile_(across)


def along(flat: Floats, stride: int, vectors: Floats, out: Floats, squares: Floats) -> None:
    """The lines are rows."""
    count, columns = vectors.shape
    rows = out.shape[1]
    zero = np.float32(0)
    for start in range(0, columns, _WIDE):
        n = min(_WIDE, columns - start)
        for i0 in range(0, rows, 4):
            # Beyond the last row there is the last again, whose sums are not written.
            i1, i2, i3 = min(i0 + 1, rows - 1), min(i0 + 2, rows - 1), min(i0 + 3, rows - 1)
            a0 = flat[i0 * stride + start : i0 * stride + start + n]
            a1 = flat[i1 * stride + start : i1 * stride + start + n]
            a2 = flat[i2 * stride + start : i2 * stride + start + n]
            a3 = flat[i3 * stride + start : i3 * stride + start + n]
            for v in range(0, count, 2):
                w = min(v + 1, count - 1)
                x, y = vectors[v, start : start + n], vectors[w, start : start + n]
                s0 = s1 = s2 = s3 = t0 = t1 = t2 = t3 = zero
                for j in range(n):
                    s0 += a0[j] * x[j]
                    t0 += a0[j] * y[j]
                    s1 += a1[j] * x[j]
                    t1 += a1[j] * y[j]
                    s2 += a2[j] * x[j]
                    t2 += a2[j] * y[j]
                    s3 += a3[j] * x[j]
                    t3 += a3[j] * y[j]
                for line in range(min(4, rows - i0)):
                    out[v, i0 + line] += (s0, s1, s2, s3)[line]
                    if w > v:
                        out[w, i0 + line] += (t0, t1, t2, t3)[line]
            if squares.size:
                q0 = q1 = q2 = q3 = zero
                for j in range(n):
                    q0 += a0[j] * a0[j]
                    q1 += a1[j] * a1[j]
                    q2 += a2[j] * a2[j]
                    q3 += a3[j] * a3[j]
                for line in range(min(4, rows - i0)):
                    squares[i0 + line] += (q0, q1, q2, q3)[line]


def across(flat: Floats, stride: int, vectors: Floats, out: Floats, squares: Floats) -> None:
    """The lines are columns."""
    count, columns = vectors.shape
    rows = out.shape[1]
    for start in range(0, rows, _WIDE):
        n = min(_WIDE, rows - start)
        for j0 in range(0, columns, 4):
            # Beyond the last column there is the last again, times nothing.
            j1, j2, j3 = (
                min(j0 + 1, columns - 1), min(j0 + 2, columns - 1), min(j0 + 3, columns - 1),
            )  # fmt: skip
            k1, k2, k3 = np.float32(j1 > j0), np.float32(j2 > j1), np.float32(j3 > j2)
            a0 = flat[j0 * stride + start : j0 * stride + start + n]
            a1 = flat[j1 * stride + start : j1 * stride + start + n]
            a2 = flat[j2 * stride + start : j2 * stride + start + n]
            a3 = flat[j3 * stride + start : j3 * stride + start + n]
            for v in range(0, count, 2):
                x0, x1 = vectors[v, j0], k1 * vectors[v, j1]
                x2, x3 = k2 * vectors[v, j2], k3 * vectors[v, j3]
                s = out[v, start : start + n]
                if v + 1 < count:
                    w = v + 1
                    y0, y1 = vectors[w, j0], k1 * vectors[w, j1]
                    y2, y3 = k2 * vectors[w, j2], k3 * vectors[w, j3]
                    t = out[w, start : start + n]
                    for i in range(n):
                        s[i] += (a0[i] * x0 + a1[i] * x1) + (a2[i] * x2 + a3[i] * x3)
                        t[i] += (a0[i] * y0 + a1[i] * y1) + (a2[i] * y2 + a3[i] * y3)
                else:
                    for i in range(n):
                        s[i] += (a0[i] * x0 + a1[i] * x1) + (a2[i] * x2 + a3[i] * x3)
            if squares.size:
                q = squares[start : start + n]
                for i in range(n):
                    q[i] += (a0[i] * a0[i] + k1 * (a1[i] * a1[i])) + (
                        k2 * (a2[i] * a2[i]) + k3 * (a3[i] * a3[i])
                    )
