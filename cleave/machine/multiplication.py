"""One multiplication as a device does it: stored arrays, and what is wanted of them. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cleave.arrays import DType


@dataclass(slots=True)
class StoredArray:
    """An array in the device's store; the payload is not looked at here.

    Attributes:
        rows, columns, dtype: of its elements.
        payload: these.
        nbytes: their size.
        used: whether it was multiplied; an executor may set it, the emulator's does.
    """

    rows: int
    columns: int
    dtype: DType
    payload: Any
    nbytes: int
    used: bool = False


@dataclass(slots=True)
class Compute:
    """Order to the executor: the sum of the products of the pairs, as `out`.

    Attributes:
        run: the run it answers.
        pairs: the arrays to multiply, as they are stored.
        transpose_a, transpose_b: how they enter the product.
        rows, columns: shape of the result.
        out: dtype of the result.
        flops: two for each multiply-add.
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
        """Size of the result."""
        return self.rows * self.columns * self.out.itemsize
