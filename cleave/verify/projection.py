"""Products of a matrix with vectors, and weighted squared norms of its rows, in one pass.

All sums are in double precision, because a check must be far more exact than the checked results.
The compiled loop (`cleave.verify.kernels`) is several times as fast as numpy, because it finishes
each part of a row while that part is in the L1 cache.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import pairwise
from threading import Thread
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from cleave.arrays import Buffer, Doubles, DType

Bounds = npt.NDArray[np.int64]

# A function `project(matrix, vectors, weights, bounds)`. It multiplies a matrix, shape (rows,
# columns), by vectors, shape (count, columns), separately in each group of columns. `bounds` are
# the groups' boundaries, from 0 to the number of columns; None for a single group. It returns the
# products, shape (groups, count, rows), and the sums of weights_j x_ij^2, shape (groups, rows), or
# (groups, 0) if `weights` is None.
Pass = Callable[[Buffer, Doubles, Doubles | None, Bounds | None], tuple[Doubles, Doubles]]

# Elements per chunk of `numpy_pass`. A chunk in double precision fits in the cache.
_AT_ONCE: Final = 100_000

# Multiply-adds up to which OpenBLAS uses one thread. More threads would take cores from training.
_ONE_THREAD: Final = 250_000
_NO_WEIGHTS: Final = np.zeros(0)

# Bytes read before the loops are compiled. Compiling takes seconds, and saves 0.1 s per gigabyte.
_WORTH_COMPILING_BYTES: Final = 4e9


class Projector:
    """A `Pass` that uses numpy at first and, in long runs, switches to compiled loops.

    Compiled loops require the package extra `fast` (numba). They are compiled in a background
    thread and cached on disk for later runs.

    Args:
        worth_compiling_bytes: total size in bytes of the matrices read before compilation starts.
    """

    def __init__(self, worth_compiling_bytes: float = _WORTH_COMPILING_BYTES) -> None:
        self._pass: Pass = numpy_pass
        self._before_bytes = worth_compiling_bytes if find_spec("numba") else np.inf

    @property
    def compiled(self) -> bool:
        """Return True once compiled loops are in use."""
        return self._pass is not numpy_pass

    def __call__(
        self,
        matrix: Buffer,
        vectors: Doubles,
        weights: Doubles | None,
        bounds: Bounds | None = None,
    ) -> tuple[Doubles, Doubles]:
        if self._before_bytes > 0:
            self._before_bytes -= matrix.nbytes
            if self._before_bytes <= 0:
                Thread(target=self._compile, name="cleave-compile", daemon=True).start()
        return self._pass(matrix, vectors, weights, bounds)

    def _compile(self) -> None:
        try:
            self._pass = compiled_pass()
        except ImportError as error:  # numba does not support this numpy version
            warnings.warn(f"only numpy checks results: {error}", stacklevel=1)


def numpy_pass(
    matrix: Buffer, vectors: Doubles, weights: Doubles | None, bounds: Bounds | None = None
) -> tuple[Doubles, Doubles]:
    """Multiply a matrix by vectors with numpy. `Pass` describes the arguments and results."""
    count = len(vectors)
    bounds, out, squares = _room(matrix, count, weights, bounds)
    for group, (start, stop) in enumerate(pairwise(bounds.tolist())):
        some = Buffer(matrix.array[:, start:stop], matrix.dtype)
        for m, k in _chunks(some, min(_AT_ONCE, _ONE_THREAD // max(1, count))):
            part = Buffer(some.array[m, k], matrix.dtype).float32().astype(np.float64)
            of_all = slice(start + k.start, min(start + k.stop, stop))
            if count:
                out[group, :, m] += vectors[:, of_all] @ part.T
            if weights is not None:
                squares[group, m] += np.square(part, out=part) @ weights[of_all]
    return out, squares


def compiled_pass() -> Pass:
    """Return a `Pass` that uses compiled loops.

    Raises:
        ImportError: if numba is missing or does not support the installed numpy.
    """
    from cleave.verify import kernels

    loops = kernels.compiled()

    def project(
        matrix: Buffer, vectors: Doubles, weights: Doubles | None, bounds: Bounds | None = None
    ) -> tuple[Doubles, Doubles]:
        if matrix.array.size == 0:
            return numpy_pass(matrix, vectors, weights, bounds)
        if matrix.dtype is DType.FP16:  # the loops read only fp32 and the bits of bf16
            matrix = Buffer(matrix.float32(), DType.FP32)
        bounds, out, squares = _room(matrix, len(vectors), weights, bounds)
        given = _NO_WEIGHTS if weights is None else np.ascontiguousarray(weights, np.float64)
        lies_across = _lies_across(matrix.array)
        flat, stride = _flat(matrix.array.T if lies_across else matrix.array)
        kernel = loops[matrix.dtype, lies_across]
        kernel(flat, stride, np.ascontiguousarray(vectors), given, bounds, out, squares)
        return out, squares

    return project


def _room(
    matrix: Buffer, count: int, weights: Doubles | None, bounds: Bounds | None
) -> tuple[Bounds, Doubles, Doubles]:
    """Return the groups' boundaries, and arrays of zeros for the two results of a `Pass`."""
    rows, columns = matrix.shape
    if bounds is None:
        bounds = np.array((0, columns))
    groups = len(bounds) - 1
    out = np.zeros((groups, count, rows))
    return bounds, out, np.zeros((groups, 0 if weights is None else rows))


def _flat(lines: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], int]:
    """Return a matrix's memory as a 1-D array, and the stride of the matrix's rows in elements.

    The matrix is copied if the elements of a row are not contiguous.
    """
    step, unit = lines.strides
    size = lines.itemsize
    if (unit != size and lines.shape[1] > 1) or step % size or step < 0:
        lines = np.ascontiguousarray(lines)
        step = lines.strides[0]
    stride = step // size if len(lines) > 1 else lines.shape[1]
    if lines.flags.c_contiguous:
        return lines.reshape(-1), stride
    length = (len(lines) - 1) * stride + lines.shape[1]
    return as_strided(lines, (length,), (size,), writeable=False), stride


def _chunks(matrix: Buffer, elements: int) -> Iterator[tuple[slice, slice]]:
    """Yield pairs of a row slice and a column slice that cover a matrix, in memory order.

    A chunk has about `elements` elements, and at least 16 lines (rows or columns as stored).
    """
    lies_across = _lies_across(matrix.array)
    slow, fast = matrix.shape[::-1] if lies_across else matrix.shape
    high = max(16, elements // max(1, fast))
    wide = max(1, elements // high)
    for i in range(0, slow, high):
        for j in range(0, fast, wide):
            one, other = slice(i, i + high), slice(j, j + wide)
            yield (other, one) if lies_across else (one, other)


def _lies_across(array: npt.NDArray[Any]) -> bool:
    """Return True if a matrix is stored by columns rather than by rows."""
    return abs(array.strides[0]) < abs(array.strides[1])
