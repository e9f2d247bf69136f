"""Data classes for a matrix multiplication on a device: the stored arrays and the request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cleave.arrays import DType


@dataclass(slots=True)
class StoredArray:
    """A floating-point array that a device stores.

    Attributes:
        rows, columns, dtype: shape and element type of the array.
        payload: elements of the array, in a format that the backend understands.
        nbytes: size of the payload in bytes.
        used: whether the array was an operand of a multiplication. Only some backends set this,
            such as the emulator's backend.
    """

    rows: int
    columns: int
    dtype: DType
    payload: Any
    nbytes: int
    used: bool = False


@dataclass(slots=True)
class Compute:
    """A request to a backend to multiply pairs of stored arrays and sum the products.

    Attributes:
        run: ID of the `run` message.
        pairs: the pairs of operands.
        transpose_a, transpose_b: whether to transpose the first or the second operand of each pair.
        rows, columns: shape of the result.
        out: dtype of the result.
        flops: number of floating-point operations, two for each multiply-add.
    """

    run: int
    pairs: list[tuple[StoredArray, StoredArray]]
    transpose_a: bool
    transpose_b: bool
    rows: int
    columns: int
    out: DType
    flops: int

    @property
    def result_bytes(self) -> int:
        """Return the size of the result in bytes."""
        return self.rows * self.columns * self.out.itemsize
