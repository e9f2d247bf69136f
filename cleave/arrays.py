"""Buffers: the matrices that are sent between the PS and devices.

A `Buffer` is a numpy array with a dtype tag. numpy has no bf16, so bf16 elements are stored as
uint16.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cleave.gemm import Span

if TYPE_CHECKING:
    import torch

Array = npt.NDArray[Any]
Doubles = npt.NDArray[np.float64]


class DType(Enum):
    """An element type. `value` is its name in messages, and `storage` is the numpy dtype."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"

    def __init__(self, name: str) -> None:
        self.storage: np.dtype[Any] = np.dtype({"fp32": "<f4", "bf16": "<u2", "fp16": "<f2"}[name])
        self.itemsize: int = self.storage.itemsize


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Buffer:
    """A 2-D array with a dtype tag. Its numpy dtype is `dtype.storage`; any strides are allowed."""

    array: Array
    dtype: DType

    def __post_init__(self) -> None:
        if self.array.dtype != self.dtype.storage or self.array.ndim != 2:
            raise ValueError(
                f"a {self.dtype.value} buffer needs a 2-D {self.dtype.storage} array, "
                f"not {self.array.ndim}-D {self.array.dtype}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.array.shape
        return rows, columns

    @property
    def nbytes(self) -> int:
        return int(self.array.nbytes)

    @property
    def T(self) -> Buffer:  # noqa: N802 - as in numpy and torch
        return Buffer(self.array.T, self.dtype)

    def region(self, rows: Span, columns: Span) -> Buffer:
        """Return a view of the elements in `rows` and `columns`."""
        return Buffer(self.array[rows.start : rows.stop, columns.start : columns.stop], self.dtype)

    def pack(self) -> memoryview:
        """Return the elements' bytes in row-major order, as a view if the array is C-contiguous."""
        if self.array.size == 0:
            return memoryview(b"")
        return np.ascontiguousarray(self.array).reshape(-1).view(np.uint8).data

    def float32(self) -> Array:
        """Return the elements as fp32. The upcast is exact, and an fp32 array is not copied."""
        if self.dtype is DType.FP32:
            return self.array
        if self.dtype is DType.FP16:
            return self.array.astype(np.float32)
        return (self.array.astype(np.uint32) << 16).view(np.float32)


def empty(rows: int, columns: int, dtype: DType) -> Buffer:
    """Return a new C-contiguous buffer with uninitialised elements."""
    return Buffer(np.empty((rows, columns), dtype.storage), dtype)


def unpack(data: memoryview | bytes, rows: int, columns: int, dtype: DType) -> Buffer:
    """Return a buffer that shares the memory of `data`. Raise ValueError if its length is wrong."""
    expected = rows * columns * dtype.itemsize
    if len(data) != expected:
        raise ValueError(
            f"a {rows}x{columns} {dtype.value} matrix is {expected} bytes, not {len(data)}"
        )
    # The data may be unaligned, because msgpack headers may have odd lengths. numpy can read it.
    return Buffer(np.frombuffer(data, dtype.storage).reshape(rows, columns), dtype)


def largest(data: memoryview | bytes | bytearray | Array, dtype: DType) -> float:
    """Return the largest absolute value in `data`, NaN if any is NaN, or 0 if `data` is empty.

    Elements are compared as integers, without copying. Among floating-point numbers of the same
    sign, larger magnitudes have larger bit patterns, and NaNs have the largest.
    """
    bits = 8 * dtype.itemsize
    signed = np.frombuffer(data, f"<i{dtype.itemsize}")
    if not signed.size:
        return 0.0
    positive = int(signed.max())  # negative if every element has its sign bit set
    # Negative if no element has its sign bit set.
    negative = int(signed.view(f"<u{dtype.itemsize}").max()) - 2 ** (bits - 1)
    found = np.array([[max(positive, negative)]], f"<u{dtype.itemsize}")
    return float(Buffer(found.view(dtype.storage), dtype).float32()[0, 0])


def narrow(values: Array, dtype: DType) -> Array:
    """Round fp32 values to the nearest `dtype` values, ties to even.

    Infinities and NaNs are preserved. Values too large for `dtype` become infinite. If `dtype` is
    fp32, `values` itself is returned.
    """
    if dtype is DType.FP32:
        return values
    if dtype is DType.FP16:
        with np.errstate(over="ignore"):
            return values.astype(np.float16)
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    nan = np.isnan(values)
    if nan.any():  # rounding could turn a NaN into infinity
        rounded = np.where(nan, (bits >> 16) | 0x40, rounded)
    return rounded.astype(np.uint16)


def from_torch(tensor: torch.Tensor) -> Buffer:
    """Return a buffer that shares memory with a 2-D fp32, bf16 or fp16 CPU tensor."""
    import torch

    names = {torch.float32: DType.FP32, torch.bfloat16: DType.BF16, torch.float16: DType.FP16}
    if tensor.dtype not in names:
        raise ValueError(
            f"{tensor.dtype} matrices cannot be offloaded; use float32, bfloat16 or float16"
        )
    dtype = names[tensor.dtype]
    tensor = tensor.detach()
    if dtype is DType.BF16:
        tensor = tensor.view(torch.uint16)
    return Buffer(tensor.numpy(), dtype)


def to_torch(buffer: Buffer) -> torch.Tensor:
    """Return a CPU tensor that shares memory with a buffer."""
    import torch

    tensor = torch.from_numpy(buffer.array)
    return tensor.view(torch.bfloat16) if buffer.dtype is DType.BF16 else tensor
