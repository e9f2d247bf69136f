"""The loops of `projection.compiled_pass`, compiled by numba.

Each loop reads a matrix line by line in memory order. Lines are the matrix's rows (`along`) or its
columns (`across`). Both loops take these arguments:

    flat: the matrix's memory as a 1-D array; bf16 elements are stored as uint16
    stride: number of elements from the start of one line to the start of the next line
    vectors: the vectors to multiply by, shape (vectors, columns)
    weights: a weight for each column, shape (columns,)
    bounds: the boundaries of the groups of columns, shape (groups + 1,)
    out: accumulates the matrix-vector products, shape (groups, vectors, rows)
    squares: accumulates weighted sums of squared elements, shape (groups, rows), or is empty

A loop reads four lines and two vectors at a time, because their sums fill the registers. The loop
also prefetches the same part of the next four lines. Processors do not predict this access pattern.
Without prefetching, waiting for memory would double the loop's time.

Elements are upcast to double precision as they are read. The order of summation is arbitrary, as in
BLAS. Infinities and NaNs propagate.
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
from numba.extending import intrinsic, overload, register_jitable
from numba.np.arrayobj import make_array

from cleave.arrays import Doubles, DType

Bounds = npt.NDArray[np.int64]

_WIDE: Final = 4096  # elements of a line read at a time: four lines of them fit in the L2 cache
_PART: Final = 128  # elements between two prefetches
_LINE: Final = 16  # fp32 elements in a cache line
_OPTIONS: Final[dict[str, Any]] = {
    "fastmath": {"reassoc", "contract", "nsz"},
    "error_model": "numpy",
    "nogil": True,
    "cache": True,
}


@intrinsic  # type: ignore[untyped-decorator]
def _upper_half(typing_context: Any, bits: Any) -> Any:
    """Return the fp32 number with `bits` as its upper 16 bits and zeros as its lower 16 bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wide = builder.zext(arguments[0], context.get_value_type(types.uint32))
        high = builder.shl(wide, context.get_constant(types.uint32, 16))
        return builder.bitcast(high, context.get_value_type(types.float32))

    return types.float32(types.uint16), generate


@intrinsic  # type: ignore[untyped-decorator]
def _fetch(typing_context: Any, array: Any, index: Any) -> Any:
    """Prefetch the cache line of the array element at `index`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.gep(
            make_array(array)(context, builder, arguments[0]).data, [arguments[1]]
        )
        byte = ir.IntType(8).as_pointer()
        small = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, small, small, small])
        fetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        how = [ir.Constant(small, value) for value in (0, 2, 1)]  # read, into L2, data cache
        builder.call(fetch, [builder.bitcast(pointer, byte), *how])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


def _number(element):  # type: ignore[no-untyped-def]  # numba compares signatures
    """Upcast an element to double precision. A uint16 element contains the bits of a bf16 number.

    Only compiled code can call this function.
    """
    raise AssertionError


@overload(_number, inline="always")
def _choose_number(element):  # type: ignore[no-untyped-def]
    if element == types.uint16:
        return lambda element: np.float64(_upper_half(element))
    return lambda element: np.float64(element)


_f64: Any = _number


@cache
def compiled() -> dict[tuple[DType, bool], Any]:
    """Compile `along` and `across` for fp32 and bf16, or load them from numba's disk cache.

    Returns:
        The compiled loops, keyed by (dtype of the matrix, True if the matrix is column-major).
    """
    loops = {}
    for dtype, element in ((DType.FP32, types.float32), (DType.BF16, types.uint16)):
        # This type also accepts writable and aligned arrays.
        flat = types.Array(element, 1, "C", readonly=True, aligned=False)
        vectors = types.Array(types.float64, 2, "C", readonly=True)
        weights = types.Array(types.float64, 1, "C", readonly=True)
        bounds = types.Array(types.int64, 1, "C")
        out, squares = (types.Array(types.float64, sides, "C") for sides in (3, 2))
        signature = types.void(flat, types.intp, vectors, weights, bounds, out, squares)
        for lies_across, loop in ((False, along), (True, across)):
            loops[dtype, lies_across] = numba.njit(signature, **_OPTIONS)(loop)
    return loops


@register_jitable  # type: ignore[untyped-decorator]
def _fetch_part(flat: Any, stride: int, lines: Any, at: int, n: int) -> None:
    """Prefetch `n` elements, starting at index `at`, of each line in `lines`."""
    for line in lines:
        for i in range(line * stride + at, line * stride + at + n, _LINE):
            _fetch(flat, i)


@register_jitable  # type: ignore[untyped-decorator]
def _sum(flat: Any, stride: int, four: Any, after: Any, span: Any, x: Any, y: Any, z: Any) -> Any:
    """Return the sums of b x, b y and b^2 z over the elements b in a part of each of four lines.

    numba compiles a loop without the sums of b x and b y if x and y are None, and one without the
    sums of b^2 z if z is None.

    Args:
        four: indices of the four lines.
        after: indices of the lines to prefetch.
        span: first index (inclusive) and last index (exclusive) of the part in each line.
        x, y, z: a factor for each element of a line, or None.
    """
    i0, i1, i2, i3 = four
    s0 = s1 = s2 = s3 = t0 = t1 = t2 = t3 = q0 = q1 = q2 = q3 = 0.0
    for at in range(span[0], span[1], _PART):
        n = min(_PART, span[1] - at)
        _fetch_part(flat, stride, after, at, n)
        a0 = flat[i0 * stride + at : i0 * stride + at + n]
        a1 = flat[i1 * stride + at : i1 * stride + at + n]
        a2 = flat[i2 * stride + at : i2 * stride + at + n]
        a3 = flat[i3 * stride + at : i3 * stride + at + n]
        if x is not None:
            u, v = x[at : at + n], y[at : at + n]
        if z is not None:
            w = z[at : at + n]
        for j in range(n):
            b0, b1, b2, b3 = _f64(a0[j]), _f64(a1[j]), _f64(a2[j]), _f64(a3[j])
            if x is not None:
                s0 += b0 * u[j]
                t0 += b0 * v[j]
                s1 += b1 * u[j]
                t1 += b1 * v[j]
                s2 += b2 * u[j]
                t2 += b2 * v[j]
                s3 += b3 * u[j]
                t3 += b3 * v[j]
            if z is not None:
                q0 += b0 * (b0 * w[j])
                q1 += b1 * (b1 * w[j])
                q2 += b2 * (b2 * w[j])
                q3 += b3 * (b3 * w[j])
    return (s0, s1, s2, s3), (t0, t1, t2, t3), (q0, q1, q2, q3)


def along(
    flat: Any,
    stride: int,
    vectors: Doubles,
    weights: Doubles,
    bounds: Bounds,
    out: Doubles,
    squares: Doubles,
) -> None:
    """Multiply a matrix stored by rows. The module docstring describes the arguments."""
    count = len(vectors)
    groups, _, rows = out.shape
    columns = bounds[groups]
    first = 0
    begin = bounds[0]
    while begin < columns:
        # Choose a range of columns that fits in the cache: several groups, or a part of a group.
        last = first
        end = min(bounds[first + 1], begin + _WIDE)
        while last + 1 < groups and end == bounds[last + 1] and bounds[last + 2] - begin <= _WIDE:
            last += 1
            end = bounds[last + 1]
        for i0 in range(0, rows, 4):
            # Repeat the last row if fewer than four rows are left. Its extra sums are not written.
            four = i0, min(i0 + 1, rows - 1), min(i0 + 2, rows - 1), min(i0 + 3, rows - 1)
            lines = min(4, rows - i0)
            after = range(min(i0 + 4, rows), min(i0 + 8, rows))
            none = range(0)
            for group in range(first, last + 1):
                span = max(begin, bounds[group]), min(end, bounds[group + 1])
                v = 0
                if squares.size and count > 1:
                    v = 2
                    x, y = vectors[0], vectors[1]
                    s, t, q = _sum(flat, stride, four, after, span, x, y, weights)
                    for line in range(lines):
                        out[group, 0, i0 + line] += s[line]
                        out[group, 1, i0 + line] += t[line]
                        squares[group, i0 + line] += q[line]
                elif squares.size:
                    _, _, q = _sum(flat, stride, four, after, span, None, None, weights)
                    for line in range(lines):
                        squares[group, i0 + line] += q[line]
                while v < count:
                    w = min(v + 1, count - 1)
                    read = v > 0 or squares.size > 0
                    x, y = vectors[v], vectors[w]
                    s, t, _ = _sum(flat, stride, four, none if read else after, span, x, y, None)
                    for line in range(lines):
                        out[group, v, i0 + line] += s[line]
                        if w > v:
                            out[group, w, i0 + line] += t[line]
                    v += 2
        first = last + 1 if end == bounds[last + 1] else last
        begin = end


@register_jitable  # type: ignore[untyped-decorator]
def _add(
    flat: Any, stride: int, four: Any, after: Any, span: Any, x: Any, y: Any, z: Any,
    xs: Any, ys: Any, squares: Any,
) -> None:  # fmt: skip
    """Add b x to `xs`, b y to `ys` and b^2 z to `squares`, for elements b in parts of four lines.

    The arguments are those of `_sum`, except that x, y and z contain one factor per line. `xs`,
    `ys` and `squares` contain one sum for each element of a line.
    """
    i0, i1, i2, i3 = four
    if x is not None:
        x0, x1, x2, x3 = x
        y0, y1, y2, y3 = y
    if z is not None:
        z0, z1, z2, z3 = z
    for at in range(span[0], span[1], _PART):
        n = min(_PART, span[1] - at)
        _fetch_part(flat, stride, after, at, n)
        a0 = flat[i0 * stride + at : i0 * stride + at + n]
        a1 = flat[i1 * stride + at : i1 * stride + at + n]
        a2 = flat[i2 * stride + at : i2 * stride + at + n]
        a3 = flat[i3 * stride + at : i3 * stride + at + n]
        if x is not None:
            s, t = xs[at : at + n], ys[at : at + n]
        if z is not None:
            q = squares[at : at + n]
        for i in range(n):
            b0, b1, b2, b3 = _f64(a0[i]), _f64(a1[i]), _f64(a2[i]), _f64(a3[i])
            if x is not None:
                s[i] += (b0 * x0 + b1 * x1) + (b2 * x2 + b3 * x3)
                t[i] += (b0 * y0 + b1 * y1) + (b2 * y2 + b3 * y3)
            if z is not None:
                q[i] += (b0 * (b0 * z0) + b1 * (b1 * z1)) + (b2 * (b2 * z2) + b3 * (b3 * z3))


def across(
    flat: Any,
    stride: int,
    vectors: Doubles,
    weights: Doubles,
    bounds: Bounds,
    out: Doubles,
    squares: Doubles,
) -> None:
    """Multiply a matrix stored by columns. The module docstring describes the arguments."""
    count = len(vectors)
    groups, _, rows = out.shape
    for group in range(groups):
        end = bounds[group + 1] - 1
        for start in range(0, rows, _WIDE):
            span = start, min(start + _WIDE, rows)
            for j0 in range(bounds[group], end + 1, 4):
                # Repeat the last column, with a factor of 0, if fewer than four columns are left.
                j1, j2, j3 = min(j0 + 1, end), min(j0 + 2, end), min(j0 + 3, end)
                k1, k2, k3 = np.float64(j1 > j0), np.float64(j2 > j1), np.float64(j3 > j2)
                four = j0, j1, j2, j3
                after = range(min(j0 + 4, end + 1), min(j0 + 8, end + 1))
                none = range(0)
                v = 0
                if squares.size:
                    z = weights[j0], k1 * weights[j1], k2 * weights[j2], k3 * weights[j3]
                    q = squares[group]
                    if count > 1:
                        v = 2
                        x, y = vectors[0], vectors[1]
                        x4 = x[j0], k1 * x[j1], k2 * x[j2], k3 * x[j3]
                        y4 = y[j0], k1 * y[j1], k2 * y[j2], k3 * y[j3]
                        s, t = out[group, 0], out[group, 1]
                        _add(flat, stride, four, after, span, x4, y4, z, s, t, q)
                    else:
                        _add(flat, stride, four, after, span, None, None, z, None, None, q)
                while v < count:
                    w = min(v + 1, count - 1)
                    x, y = vectors[v], vectors[w]
                    x4 = x[j0], k1 * x[j1], k2 * x[j2], k3 * x[j3]
                    k0 = np.float64(w > v)  # 0 if only one vector is left
                    y4 = k0 * y[j0], k0 * k1 * y[j1], k0 * k2 * y[j2], k0 * k3 * y[j3]
                    read = v > 0 or squares.size > 0
                    _add(
                        flat, stride, four, none if read else after, span,
                        x4, y4, None, out[group, v], out[group, w], None,
                    )  # fmt: skip
                    v += 2
