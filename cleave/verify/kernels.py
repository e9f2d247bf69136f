"""The loops of `projection.compiled_pass`, compiled by numba.

All take a matrix as lines that follow one another in memory: `flat`, 1-D, and the elements from
one line to the next. They add to `out`, shape (vectors, rows), and, unless it is empty, to
`squares`, shape (rows,): the squares of the elements, weighted by their columns. Four lines are
read at a time, and two vectors, as many sums as registers.

Elements are widened to double precision as they are read, bf16 from its bits; sums are taken in any
order, as by BLAS; infinities and NaNs stay what they are.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic, overload

from cleave.arrays import DType
from cleave.verify.projection import Doubles

_WIDE: Final = 1024  # elements of a line at a time: four such parts stay in the innermost cache
_OPTIONS: Final[dict[str, Any]] = {
    "fastmath": {"reassoc", "contract", "nsz"},
    "error_model": "numpy",
    "nogil": True,
    "cache": True,
}


@intrinsic  # type: ignore[untyped-decorator]
def _upper_half(typing_context: Any, bits: Any) -> Any:
    """The fp32 number whose upper half these bits are."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wide = builder.zext(arguments[0], context.get_value_type(types.uint32))
        high = builder.shl(wide, context.get_constant(types.uint32, 16))
        return builder.bitcast(high, context.get_value_type(types.float32))

    return types.float32(types.uint16), generate


def _number(element):  # type: ignore[no-untyped-def]  # numba compares signatures
    """An element in double precision; bf16 is given as its bits. For compiled code only."""
    raise AssertionError


@overload(_number, inline="always")
def _choose_number(element):  # type: ignore[no-untyped-def]
    if element == types.uint16:
        return lambda element: np.float64(_upper_half(element))
    return lambda element: np.float64(element)


_f64: Any = _number


@cache
def compiled() -> dict[tuple[DType, bool], Any]:
    """`along` and `across` in machine code, by the matrix's dtype and whether it lies across.

    From disk where they have been compiled before.
    """
    loops = {}
    for dtype, element in ((DType.FP32, types.float32), (DType.BF16, types.uint16)):
        # What fits every array: one that may be written and is aligned goes as this, too.
        flat = types.Array(element, 1, "C", readonly=True, aligned=False)
        vectors = types.Array(types.float64, 2, "C", readonly=True)
        weights = types.Array(types.float64, 1, "C", readonly=True)
        out, squares = (types.Array(types.float64, sides, "C") for sides in (2, 1))
        signature = types.void(flat, types.intp, vectors, weights, out, squares)
        for lies_across, loop in ((False, along), (True, across)):
            loops[dtype, lies_across] = numba.njit(signature, **_OPTIONS)(loop)
    return loops


def along(
    flat: Any, stride: int, vectors: Doubles, weights: Doubles, out: Doubles, squares: Doubles
) -> None:
    """The lines are rows."""
    count, columns = vectors.shape
    rows = out.shape[1]
    for start in range(0, columns, _WIDE):
        n = min(_WIDE, columns - start)
        for i0 in range(0, rows, 4):
            # Beyond the last row there is the last again, whose sums are not written.
            i1, i2, i3 = min(i0 + 1, rows - 1), min(i0 + 2, rows - 1), min(i0 + 3, rows - 1)
            a0 = flat[i0 * stride + start : i0 * stride + start + n]
            a1 = flat[i1 * stride + start : i1 * stride + start + n]
            a2 = flat[i2 * stride + start : i2 * stride + start + n]
            a3 = flat[i3 * stride + start : i3 * stride + start + n]
            lines = min(4, rows - i0)
            if squares.size and count == 2:  # the usual case, with each element read once
                x, y, z = (
                    vectors[0, start : start + n], vectors[1, start : start + n],
                    weights[start : start + n],
                )  # fmt: skip
                s0 = s1 = s2 = s3 = t0 = t1 = t2 = t3 = q0 = q1 = q2 = q3 = 0.0
                for j in range(n):
                    b0, b1 = _f64(a0[j]), _f64(a1[j])
                    b2, b3 = _f64(a2[j]), _f64(a3[j])
                    s0 += b0 * x[j]
                    t0 += b0 * y[j]
                    q0 += b0 * (b0 * z[j])
                    s1 += b1 * x[j]
                    t1 += b1 * y[j]
                    q1 += b1 * (b1 * z[j])
                    s2 += b2 * x[j]
                    t2 += b2 * y[j]
                    q2 += b2 * (b2 * z[j])
                    s3 += b3 * x[j]
                    t3 += b3 * y[j]
                    q3 += b3 * (b3 * z[j])
                for line in range(lines):
                    out[0, i0 + line] += (s0, s1, s2, s3)[line]
                    out[1, i0 + line] += (t0, t1, t2, t3)[line]
                    squares[i0 + line] += (q0, q1, q2, q3)[line]
                continue
            if squares.size:
                z = weights[start : start + n]
                q0 = q1 = q2 = q3 = 0.0
                for j in range(n):
                    b0, b1 = _f64(a0[j]), _f64(a1[j])
                    b2, b3 = _f64(a2[j]), _f64(a3[j])
                    q0 += b0 * (b0 * z[j])
                    q1 += b1 * (b1 * z[j])
                    q2 += b2 * (b2 * z[j])
                    q3 += b3 * (b3 * z[j])
                for line in range(lines):
                    squares[i0 + line] += (q0, q1, q2, q3)[line]
            for v in range(0, count, 2):
                w = min(v + 1, count - 1)
                x, y = vectors[v, start : start + n], vectors[w, start : start + n]
                s0 = s1 = s2 = s3 = t0 = t1 = t2 = t3 = 0.0
                for j in range(n):
                    b0, b1 = _f64(a0[j]), _f64(a1[j])
                    b2, b3 = _f64(a2[j]), _f64(a3[j])
                    s0 += b0 * x[j]
                    t0 += b0 * y[j]
                    s1 += b1 * x[j]
                    t1 += b1 * y[j]
                    s2 += b2 * x[j]
                    t2 += b2 * y[j]
                    s3 += b3 * x[j]
                    t3 += b3 * y[j]
                for line in range(lines):
                    out[v, i0 + line] += (s0, s1, s2, s3)[line]
                    if w > v:
                        out[w, i0 + line] += (t0, t1, t2, t3)[line]


def across(
    flat: Any, stride: int, vectors: Doubles, weights: Doubles, out: Doubles, squares: Doubles
) -> None:
    """The lines are columns."""
    count, columns = vectors.shape
    if squares.size:
        columns = weights.size
    rows = out.shape[1]
    for start in range(0, rows, _WIDE):
        n = min(_WIDE, rows - start)
        for j0 in range(0, columns, 4):
            # Beyond the last column there is the last again, times nothing.
            j1, j2, j3 = (
                min(j0 + 1, columns - 1), min(j0 + 2, columns - 1), min(j0 + 3, columns - 1),
            )  # fmt: skip
            k1, k2, k3 = np.float64(j1 > j0), np.float64(j2 > j1), np.float64(j3 > j2)
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
                        b0, b1 = _f64(a0[i]), _f64(a1[i])
                        b2, b3 = _f64(a2[i]), _f64(a3[i])
                        s[i] += (b0 * x0 + b1 * x1) + (b2 * x2 + b3 * x3)
                        t[i] += (b0 * y0 + b1 * y1) + (b2 * y2 + b3 * y3)
                else:
                    for i in range(n):
                        b0, b1 = _f64(a0[i]), _f64(a1[i])
                        b2, b3 = _f64(a2[i]), _f64(a3[i])
                        s[i] += (b0 * x0 + b1 * x1) + (b2 * x2 + b3 * x3)
            if squares.size:
                q = squares[start : start + n]
                z0, z1 = weights[j0], k1 * weights[j1]
                z2, z3 = k2 * weights[j2], k3 * weights[j3]
                for i in range(n):
                    b0, b1 = _f64(a0[i]), _f64(a1[i])
                    b2, b3 = _f64(a2[i]), _f64(a3[i])
                    q[i] += (b0 * b0 * z0 + b1 * b1 * z1) + (b2 * b2 * z2 + b3 * b3 * z3)
