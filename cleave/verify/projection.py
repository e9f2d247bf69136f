"""One pass over a matrix: its products with some vectors, and the squared norms of its rows.

By numpy, or by a compiled loop that does all of it for a part of a row while that is in the
innermost cache (`cleave.verify.kernels`), about three times as fast.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from threading import Thread
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from cleave.arrays import Buffer

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

Pass = Callable[[Buffer, Floats, Doubles | None], Floats]
"""`project(matrix, vectors, squares)`.

A matrix of shape (rows, columns), any dtype and strides, and vectors of shape (count, columns),
count 0 or more; returns their products, shape (count, rows), in fp32, and adds the squared norms of
the rows to `squares`, shape (rows,), where they are asked for. The matrix is read from memory once.
"""

_AT_ONCE: Final = 400_000
"""Elements; they stay in the cache from the first vector to the norms."""

_FEW: Final = 4
"""Vectors that are multiplied one by one, straight from the cache; for more BLAS packs it."""

_ONE_THREAD: Final = 250_000
"""Multiply-adds of one product for which OpenBLAS starts no threads: they would spin for longer
than they work, on processors that training wants."""

_WORTH_COMPILING_BYTES: Final = 4e9
"""What is read before loops are compiled: it takes seconds, and saves a tenth of one a gigabyte."""


class Projector:
    """A `Pass` by numpy at first, and by compiled loops in a run long enough for them to pay.

    They need the extra `fast`; without it all is done by numpy. They are compiled in a thread of
    their own, and kept on disk for the next run.

    Args:
        worth_compiling_bytes: to be read before.
    """

    def __init__(self, worth_compiling_bytes: float = _WORTH_COMPILING_BYTES) -> None:
        self._pass: Pass = numpy_pass
        self._before_bytes = worth_compiling_bytes if find_spec("numba") else np.inf

    @property
    def compiled(self) -> bool:
        """Whether it is that far."""
        return self._pass is not numpy_pass

    def __call__(self, matrix: Buffer, vectors: Floats, squares: Doubles | None) -> Floats:
        if self._before_bytes > 0:
            self._before_bytes -= matrix.nbytes
            if self._before_bytes <= 0:
                Thread(target=self._compile, name="cleave-compile", daemon=True).start()
        return self._pass(matrix, vectors, squares)

    def _compile(self) -> None:
        try:
            self._pass = compiled_pass()
        except ImportError as error:  # of a numba that does not know this numpy
            warnings.warn(f"results are checked by numpy alone: {error}", stacklevel=1)


def numpy_pass(matrix: Buffer, vectors: Floats, squares: Doubles | None) -> Floats:
    """The `Pass` by numpy."""
    count = len(vectors)
    out = np.zeros((count, matrix.shape[0]), np.float32)
    few = count <= _FEW
    for m, k in _chunks(matrix, _AT_ONCE if few else _ONE_THREAD // count):
        part = _float32(matrix, m, k)
        if few:
            for sums, vector in zip(out, vectors, strict=True):
                sums[m] += part @ vector[k]
        else:
            out[:, m] += vectors[:, k] @ part.T
        if squares is not None:
            squares[m] += _row_squares(part)
    return out


def compiled_pass() -> Pass:
    """The `Pass` by compiled loops.

    Raises:
        ImportError: without numba.
    """
    from cleave.verify import kernels

    along, across = kernels.compiled()

    def project(matrix: Buffer, vectors: Floats, squares: Doubles | None) -> Floats:
        out = np.zeros((len(vectors), matrix.shape[0]), np.float32)
        if matrix.array.size == 0:
            return out
        whole = [(slice(0, matrix.shape[0]), slice(0, matrix.shape[1]))]
        for m, k in whole if matrix.dtype.itemsize == 4 else _chunks(matrix, _AT_ONCE):
            part = Buffer(matrix.array[m, k], matrix.dtype).float32()
            products = np.zeros((len(vectors), part.shape[0]), np.float32)
            norms = np.zeros(0 if squares is None else part.shape[0], np.float32)
            kernel = across if _lies_across(part) else along
            kernel(*_flat(part), np.ascontiguousarray(vectors[:, k]), products, norms)
            out[:, m] += products
            if squares is not None:
                squares[m] += _mended(part, norms)
        return out

    return project


def _flat(part: Floats) -> tuple[Floats, int]:
    """All of a matrix's memory from its first element to its last, and the elements from one
    line, that is row or column, to the next."""
    lines = part.T if _lies_across(part) else part
    step, unit = lines.strides
    if (unit != 4 and lines.shape[1] > 1) or step % 4 or step < 0:
        lines = np.ascontiguousarray(lines)
        step = lines.strides[0]
    stride = step // 4 if len(lines) > 1 else lines.shape[1]
    if lines.flags.c_contiguous:
        return lines.reshape(-1), stride
    length = (len(lines) - 1) * stride + lines.shape[1]
    return as_strided(lines, (length,), (4,), writeable=False), stride


def _chunks(matrix: Buffer, elements: int) -> Iterator[tuple[slice, slice]]:
    """Rows and columns of parts of about so many elements, not flat however long the rows are.

    Parts follow one another as they lie in memory.
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
    """Whether its columns are nearer together in memory than its rows."""
    return abs(array.strides[0]) < abs(array.strides[1])


def _float32(matrix: Buffer, rows: slice, columns: slice) -> Floats:
    """A part of a matrix in fp32, aligned: bytes that came in a message may lie anywhere, and numpy
    would copy them element by element where they enter a product transposed."""
    part = Buffer(matrix.array[rows, columns], matrix.dtype).float32()
    return part if part.flags.aligned else part.copy()


def _row_squares(values: Floats) -> Doubles:
    """Squared norms of rows."""
    if _lies_across(values):
        return _mended(values, np.square(values) @ np.ones(values.shape[1], np.float32))
    return _mended(values, np.vecdot(values, values))


def _mended(values: Floats, norms: Floats) -> Doubles:
    """Squared norms of rows, in double precision where they vanish or overflow in fp32."""
    squares = norms.astype(np.float64)
    strange = ~((squares > 1e-26) & (squares < 1e36))
    if strange.any():
        some = values[strange]
        squares[strange] = np.einsum("ij,ij->i", some, some, dtype=np.float64)
    return squares
