"""The loops of `projection.compiled_pass`, compiled by numba.

All take a matrix as lines that follow one another in memory: `flat`, 1-D, and `stride`, the
elements from one line to the next. They add products to `out`, shape (groups, vectors, rows), and,
unless it is empty, the squares of the elements, weighted by column, to `squares`, shape (groups,
rows). Groups of columns begin and end at `bounds`. Four lines and two vectors are read at a time,
which makes as many sums as there are registers.

Elements are widened to double precision as they are read, bf16 from its bits; sums are taken in any
order, as by BLAS; infinities and NaNs stay what they are.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload
from numba.np.arrayobj import make_array

from cleave.arrays import Doubles, DType

Bounds = npt.NDArray[np.int64]

_WIDE: Final = 1024  # elements of a line at a time: four such parts stay in the innermost cache
_LINE: Final = 16  # elements of fp32 that come from memory together
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


@intrinsic  # type: ignore[untyped-decorator]
def _fetch(typing_context: Any, array: Any, index: Any) -> Any:
    """Ask the processor for the memory about an element that will be read soon."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.gep(
            make_array(array)(context, builder, arguments[0]).data, [arguments[1]]
        )
        byte = ir.IntType(8).as_pointer()
        small = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, small, small, small])
        fetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        how = [ir.Constant(small, value) for value in (0, 2, 1)]  # to read, into L2, data
        builder.call(fetch, [builder.bitcast(pointer, byte), *how])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


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
    """Return `along` and `across` as machine code, by dtype and whether the lines are columns.

    They are loaded from disk if they were compiled before.
    """
    loops = {}
    for dtype, element in ((DType.FP32, types.float32), (DType.BF16, types.uint16)):
        # What fits every array: one that may be written and is aligned goes as this, too.
        flat = types.Array(element, 1, "C", readonly=True, aligned=False)
        vectors = types.Array(types.float64, 2, "C", readonly=True)
        weights = types.Array(types.float64, 1, "C", readonly=True)
        bounds = types.Array(types.int64, 1, "C")
        out, squares = (types.Array(types.float64, sides, "C") for sides in (3, 2))
        signature = types.void(flat, types.intp, vectors, weights, bounds, out, squares)
        for lies_across, loop in ((False, along), (True, across)):
            loops[dtype, lies_across] = numba.njit(signature, **_OPTIONS)(loop)
    return loops


def along(
    flat: Any,
    stride: int,
    vectors: Doubles,
    weights: Doubles,
    bounds: Bounds,
    out: Doubles,
    squares: Doubles,
) -> None:
    """Add the products and squares of a matrix whose lines are rows; see the module's text."""
    count = len(vectors)
    groups, _, rows = out.shape
    columns = bounds[groups]
    first = 0
    begin = bounds[0]
    while begin < columns:
        # As much of a line at a time as stays in the cache: some groups, or a part of one.
        last = first
        end = min(bounds[first + 1], begin + _WIDE)
        while last + 1 < groups and end == bounds[last + 1] and bounds[last + 2] - begin <= _WIDE:
            last += 1
            end = bounds[last + 1]
        for i0 in range(0, rows, 4):
            # Beyond the last row there is the last again, whose sums are not written.
            i1, i2, i3 = min(i0 + 1, rows - 1), min(i0 + 2, rows - 1), min(i0 + 3, rows - 1)
            lines = min(4, rows - i0)
            if end - begin < _WIDE:  # short parts of lines, which no processor foresees
                for i in range(i0 + 4, min(i0 + 8, rows)):
                    for j in range(i * stride + begin, i * stride + end, _LINE):
                        _fetch(flat, j)
            for group in range(first, last + 1):
                start = max(begin, bounds[group])
                n = min(end, bounds[group + 1]) - start
                a0 = flat[i0 * stride + start : i0 * stride + start + n]
                a1 = flat[i1 * stride + start : i1 * stride + start + n]
                a2 = flat[i2 * stride + start : i2 * stride + start + n]
                a3 = flat[i3 * stride + start : i3 * stride + start + n]
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
                        out[group, 0, i0 + line] += (s0, s1, s2, s3)[line]
                        out[group, 1, i0 + line] += (t0, t1, t2, t3)[line]
                        squares[group, i0 + line] += (q0, q1, q2, q3)[line]
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
                        squares[group, i0 + line] += (q0, q1, q2, q3)[line]
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
                        out[group, v, i0 + line] += (s0, s1, s2, s3)[line]
                        if w > v:
                            out[group, w, i0 + line] += (t0, t1, t2, t3)[line]
        first = last + 1 if end == bounds[last + 1] else last
        begin = end


def across(
    flat: Any,
    stride: int,
    vectors: Doubles,
    weights: Doubles,
    bounds: Bounds,
    out: Doubles,
    squares: Doubles,
) -> None:
    """Add the products and squares of a matrix whose lines are columns; see the module's text."""
    count = len(vectors)
    groups, _, rows = out.shape
    for group in range(groups):
        end = bounds[group + 1] - 1
        for start in range(0, rows, _WIDE):
            n = min(_WIDE, rows - start)
            for j0 in range(bounds[group], end + 1, 4):
                # Beyond the last column there is the last again, times nothing.
                j1, j2, j3 = min(j0 + 1, end), min(j0 + 2, end), min(j0 + 3, end)
                k1, k2, k3 = np.float64(j1 > j0), np.float64(j2 > j1), np.float64(j3 > j2)
                if n < _WIDE:
                    for j in range(j0 + 4, min(j0 + 8, end + 1)):
                        for i in range(j * stride + start, j * stride + start + n, _LINE):
                            _fetch(flat, i)
                a0 = flat[j0 * stride + start : j0 * stride + start + n]
                a1 = flat[j1 * stride + start : j1 * stride + start + n]
                a2 = flat[j2 * stride + start : j2 * stride + start + n]
                a3 = flat[j3 * stride + start : j3 * stride + start + n]
                for v in range(0, count, 2):
                    x0, x1 = vectors[v, j0], k1 * vectors[v, j1]
                    x2, x3 = k2 * vectors[v, j2], k3 * vectors[v, j3]
                    s = out[group, v, start : start + n]
                    if v + 1 < count:
                        w = v + 1
                        y0, y1 = vectors[w, j0], k1 * vectors[w, j1]
                        y2, y3 = k2 * vectors[w, j2], k3 * vectors[w, j3]
                        t = out[group, w, start : start + n]
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
                    q = squares[group, start : start + n]
                    z0, z1 = weights[j0], k1 * weights[j1]
                    z2, z3 = k2 * weights[j2], k3 * weights[j3]
                    for i in range(n):
                        b0, b1 = _f64(a0[i]), _f64(a1[i])
                        b2, b3 = _f64(a2[i]), _f64(a3[i])
                        q[i] += (b0 * b0 * z0 + b1 * b1 * z1) + (b2 * b2 * z2 + b3 * b3 * z3)
