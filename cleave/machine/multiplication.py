"""One multiplication on a device: the stored arrays, and the computation. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cleave.arrays import DType


@dataclass(slots=True)
class StoredArray:
    """An array in the device's memory.

    Attributes:
        rows, columns, dtype: shape and element type.
        payload: its elements, opaque to this module.
        nbytes: size of the payload.
        used: whether it was multiplied; a backend may set it, as the emulator's does.
    """

    rows: int
    columns: int
    dtype: DType
    payload: Any
    nbytes: int
    used: bool = False


@dataclass(slots=True)
class Compute:
    """A request to the backend: the sum of the products of the pairs, in dtype `out`.

    Attributes:
        run: id of the run that this request answers.
        pairs: the arrays to multiply, as they are stored.
        transpose_a, transpose_b: whether the first or second arrays are transposed.
        rows, columns: shape of the result.
        out: dtype of the result.
        flops: FLOPs, two for each multiply-add.
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
