"""The operands, output matrix and future of a GEMM on a fleet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from cleave import arrays
from cleave.arrays import Buffer, DType
from cleave.errors import FleetError
from cleave.gemm import Gemm, Span, gemm_of
from cleave.planner.plan import ElementBytes
from cleave.scheduler.tiles.gemm_job import GemmJob
from cleave.scheduler.tiles.tasks import GemmTask


class Operand:
    """A matrix with fixed values that can be an operand of GEMMs on the fleet.

    Devices may keep parts of the matrix until this object is deleted. To free the matrix's memory
    between two GEMMs, call `unbind`. Before the next GEMM, call `bind` with a buffer that has the
    same values.

    Args:
        id: unique ID of the operand, which is never reused.
        buffer: the matrix, in row-major or column-major order. The attribute is missing between
            `unbind` and `bind`.
        unbound: called with `id` when `unbind` frees the memory.
    """

    __slots__ = ("__weakref__", "_unbound", "buffer", "id")

    def __init__(
        self, id: int, buffer: Buffer, unbound: Callable[[int], object] | None = None
    ) -> None:
        self.id = id
        self.buffer = buffer
        self._unbound = unbound

    def unbind(self) -> None:
        """Drop the buffer. No running GEMM may use this operand. Devices keep their copies."""
        del self.buffer
        if self._unbound is not None:
            self._unbound(self.id)

    def bind(self, buffer: Buffer) -> None:
        """Set a new buffer with the same values as the dropped buffer."""
        self.buffer = buffer


@dataclass(frozen=True, slots=True)
class Side:
    """The left or right factor of a GEMM: an operand, optionally transposed."""

    operand: Operand
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Return the number of rows and columns of `matrix`."""
        rows, columns = self.operand.buffer.shape
        return (columns, rows) if self.transposed else (rows, columns)

    @property
    def matrix(self) -> Buffer:
        """Return the operand's matrix, transposed if `transposed` is True."""
        return self.operand.buffer.T if self.transposed else self.operand.buffer


class Output:
    """The output matrix C of one GEMM, which is assembled from result blocks.

    Blocks that cover the whole depth k are copied to C. Partial sums, which cover part of k, are
    accumulated in fp32.
    """

    def __init__(self, out: Buffer) -> None:
        self.out = out
        self._sums: Buffer | None = None
        self._summed: list[tuple[Span, Span]] = []  # regions of C with accumulated blocks

    def place(self, task: GemmTask, payload: Any) -> None:
        """Write one result block into C. `payload` is a `Buffer` or the received bytes.

        Partial sums of the same region of C must arrive in ascending order of k.
        """
        block = task.block
        dtype = DType.FP32 if task.partial else self.out.dtype
        if not isinstance(payload, Buffer):
            payload = arrays.unpack(payload, block.m.size, block.n.size, dtype)
        if not task.partial:
            self.out.region(block.m, block.n).array[...] = payload.array
            return
        target = self.sums(block.m, block.n, first=block.k.start == 0).array
        if block.k.start == 0:
            target[...] = payload.array
        else:
            target += payload.array

    def sums(self, rows: Span, columns: Span, *, first: bool) -> Buffer:
        """Return the fp32 accumulator for a region. `first` is True for its first partial sum."""
        if self._sums is None:
            fp32 = self.out.dtype is DType.FP32
            self._sums = self.out if fp32 else arrays.empty(*self.out.shape, DType.FP32)
        if first:
            self._summed.append((rows, columns))
        return self._sums.region(rows, columns)

    def finish(self) -> None:
        """Round the accumulated regions to the dtype of C, after all blocks have been written."""
        if self._sums is not None and self._sums is not self.out:
            for rows, columns in self._summed:
                exact = self._sums.region(rows, columns).array
                self.out.region(rows, columns).array[...] = arrays.narrow(exact, self.out.dtype)
        self._sums = None
        self._summed.clear()


@dataclass(slots=True, eq=False, weakref_slot=True)
class GemmFuture:
    """A GEMM that was submitted to a fleet. `result` waits until the GEMM is done."""

    job: GemmJob
    a: Side
    b: Side
    out: Buffer
    wait: Callable[[GemmFuture], object]  # called by `result` unless the GEMM is done
    done: bool = False  # whether the GEMM has ended, with or without an error
    error: str = ""  # why the GEMM failed; empty on success

    def result(self) -> Buffer:
        """Wait until the GEMM is done, and return `out`. Raise FleetError if the GEMM failed."""
        if not self.done:
            self.wait(self)
        if self.error:
            raise FleetError(self.error)
        return self.out


class Pending(Protocol):
    """Interface for a submitted GEMM, whose result may not be available yet."""

    @property
    def done(self) -> bool: ...
    def result(self) -> Buffer: ...


class Multiplier(Protocol):
    """Interface for submitting matrix products: `Fleet` or one of its wrappers."""

    def operand(self, buffer: Buffer) -> Operand: ...
    def submit(self, a: Side, b: Side, out: Buffer) -> Pending: ...


@dataclass(frozen=True, slots=True)
class Finished:
    """A submitted GEMM that the PS has already computed."""

    out: Buffer

    @property
    def done(self) -> bool:
        return True

    def result(self) -> Buffer:
        return self.out


def product_of(a: Side, b: Side, out: Buffer) -> tuple[Gemm, ElementBytes, DType]:
    """Return the dimensions, the bytes per element and the operands' dtype of ``out = a @ b``.

    Raises:
        ValueError: if the shapes or dtypes do not match.
    """
    gemm = gemm_of(a.shape, b.shape)
    dtype = a.operand.buffer.dtype
    if out.shape != (gemm.m, gemm.n) or b.operand.buffer.dtype is not dtype:
        raise ValueError(
            f"{a.shape} {dtype.value} @ {b.shape} {b.operand.buffer.dtype.value} does not match "
            f"the output shape {out.shape}"
        )
    if out.dtype not in (dtype, DType.FP32):
        raise ValueError(
            f"a {dtype.value} product must be in {dtype.value} or fp32, not {out.dtype.value}"
        )
    return gemm, ElementBytes(dtype.itemsize, out.dtype.itemsize), dtype
