"""Executors: what multiplies. Chosen by what is installed and what is faster here."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from cleave import arrays
from cleave.arrays import Buffer, DType
from cleave.errors import UsageError

if TYPE_CHECKING:
    from cleave.device.core import Array, Compute


class Executor(Protocol):
    """Multiplies matrices."""

    @property
    def name(self) -> str: ...

    def matmul(self, a: Buffer, b: Buffer, out: Buffer, *, accumulate: bool = False) -> None:
        """out = a @ b, or out += a @ b.

        Args:
            a, b: shapes (m, k) and (k, n), of one dtype, any strides.
            out: shape (m, n), of the same dtype or fp32; fp32 when accumulating.
        """
        ...


class NumpyExecutor:
    """Multiplies with numpy alone: 16-bit inputs are widened, exactly, products rounded once."""

    name = "numpy"

    def matmul(self, a: Buffer, b: Buffer, out: Buffer, *, accumulate: bool = False) -> None:
        """See `Executor.matmul`."""
        left, right = a.float32(), b.float32()
        if accumulate:
            out.array[...] += left @ right
        elif out.dtype is DType.FP32:
            np.matmul(left, right, out=out.array)
        else:
            out.array[...] = arrays.narrow(left @ right, out.dtype)


class TorchExecutor:
    """Multiplies with torch."""

    name = "torch"

    def __init__(self) -> None:
        import torch

        self._torch = torch
        # Received arrays are views of read-only bytes, of which torch warns once. They are only
        # read, so the warning is spent here.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.from_numpy(np.frombuffer(b"\0", np.uint8))

    def matmul(self, a: Buffer, b: Buffer, out: Buffer, *, accumulate: bool = False) -> None:
        """See `Executor.matmul`."""
        torch = self._torch
        left, right, target = (arrays.to_torch(x) for x in (a, b, out))
        with torch.inference_mode():
            if out.dtype is not a.dtype:  # 16-bit in, fp32 out: torch's CPU has no such product
                left, right = left.float(), right.float()
            if accumulate:
                torch.addmm(target, left, right, out=target)
            else:
                torch.mm(left, right, out=target)


def as_buffer(array: Array) -> Buffer:
    """An array of a device's store as a matrix, in place where it can be."""
    if isinstance(array.payload, Buffer):
        return array.payload
    return arrays.unpack(array.payload, array.rows, array.columns, array.dtype)


def execute(executor: Executor, order: Compute) -> Buffer:
    """Do one computation: the sum of the products of its pairs, accumulated in fp32.

    Returns:
        A new matrix of shape (order.rows, order.columns) and dtype `order.out`.
    """
    pairs = []
    for stored_a, stored_b in order.pairs:
        a, b = as_buffer(stored_a), as_buffer(stored_b)
        pairs.append((a.T if order.transpose_a else a, b.T if order.transpose_b else b))
    if len(pairs) == 1:
        out = arrays.empty(order.rows, order.columns, order.out)
        executor.matmul(*pairs[0], out)
        return out
    total = arrays.empty(order.rows, order.columns, DType.FP32)
    for i, (a, b) in enumerate(pairs):
        executor.matmul(a, b, total, accumulate=i > 0)
    return Buffer(arrays.narrow(total.array, order.out), order.out)


@dataclass(frozen=True, slots=True)
class Speed:
    """A quick measurement of an executor."""

    executor: Executor
    flops_per_s: float


def measure(executor: Executor, side: int = 512, repeats: int = 3) -> Speed:
    """Time a few square fp32 multiplications (some ten milliseconds on a laptop)."""
    rng = np.random.default_rng(0)
    a, b = (Buffer(rng.standard_normal((side, side), np.float32), DType.FP32) for _ in range(2))
    out = arrays.empty(side, side, DType.FP32)
    executor.matmul(a, b, out)  # starts threads, loads kernels
    best_s = float("inf")
    for _ in range(repeats):
        start_s = time.perf_counter()
        executor.matmul(a, b, out)
        best_s = min(best_s, time.perf_counter() - start_s)
    return Speed(executor, 2 * side**3 / max(best_s, 1e-9))


def choose(name: str = "auto") -> Speed:
    """The executor to use, with its measured speed.

    Args:
        name: `numpy`, `torch`, or `auto`: torch where it is installed and faster.

    Raises:
        UsageError: for an unknown name, or torch where it is not installed.
    """
    known: Sequence[str] = ("auto", "numpy", "torch")
    if name not in known:
        raise UsageError(f"unknown executor {name!r}; use one of {', '.join(known)}")
    speeds = []
    if name in ("auto", "torch"):
        try:
            speeds.append(measure(TorchExecutor()))
        except ImportError:
            if name == "torch":
                raise UsageError(
                    "the torch executor needs torch, which is not installed here; "
                    "install cleave[train] or use --executor numpy"
                ) from None
    if name in ("auto", "numpy"):
        speeds.append(measure(NumpyExecutor()))
    return max(speeds, key=lambda speed: speed.flops_per_s)
