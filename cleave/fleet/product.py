"""One GEMM on a fleet: its operands, output and future."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from cleave import arrays
from cleave.arrays import Buffer, DType
from cleave.errors import FleetError
from cleave.gemm import Gemm, Span, gemm_of
from cleave.planner.plan import ElementBytes
from cleave.scheduler.tiles.gemm_job import GemmJob, GemmTask


class Operand:
    """One version of one matrix, with its own id for as long as this object lives.

    Devices may keep parts of it. When the object is deleted, they are told to drop them. The matrix
    must not change meanwhile, but its memory may. To free the memory between two products, call
    `unbind`, then `bind` with the same values before the next product.

    Args:
        id: the operand's id, never reused.
        buffer: the matrix, row-major or not.
        unbound: called with the id when the memory is released.

    Attributes:
        id, buffer: see above; `buffer` is missing while unbound.
    """

    __slots__ = ("__weakref__", "_unbound", "buffer", "id")

    def __init__(
        self, id: int, buffer: Buffer, unbound: Callable[[int], object] | None = None
    ) -> None:
        self.id = id
        self.buffer = buffer
        self._unbound = unbound

    def unbind(self) -> None:
        """Release the memory while no product needs it. Devices keep their arrays."""
        del self.buffer
        if self._unbound is not None:
            self._unbound(self.id)

    def bind(self, buffer: Buffer) -> None:
        """Set new memory that holds the same values."""
        self.buffer = buffer


@dataclass(frozen=True, slots=True)
class Side:
    """An operand as one side of a product, as stored or transposed."""

    operand: Operand
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.operand.buffer.shape
        return (columns, rows) if self.transposed else (rows, columns)

    @property
    def matrix(self) -> Buffer:
        """Return the matrix as it enters the product."""
        return self.operand.buffer.T if self.transposed else self.operand.buffer


class Output:
    """The output matrix C of one GEMM, assembled from blocks.

    Finished blocks are copied into place; partial sums are added in fp32.

    Args:
        out: buffer for the result, shape (m, n).
    """

    def __init__(self, out: Buffer) -> None:
        self.out = out
        self._sums: Buffer | None = None
        self._summed: list[tuple[Span, Span]] = []  # regions that are sums

    def place(self, task: GemmTask, payload: Any) -> None:
        """Write one result into C. Partial sums must arrive in the order of k."""
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
        """Return the fp32 accumulator of a region; C itself if C is fp32.

        Args:
            rows, columns: the region.
            first: whether this is the region's first partial sum.
        """
        if self._sums is None:
            fp32 = self.out.dtype is DType.FP32
            self._sums = self.out if fp32 else arrays.empty(*self.out.shape, DType.FP32)
        if first:
            self._summed.append((rows, columns))
        return self._sums.region(rows, columns)

    def finish(self) -> None:
        """Round the sums to the dtype of C once every block is in place."""
        if self._sums is not None and self._sums is not self.out:
            for rows, columns in self._summed:
                exact = self._sums.region(rows, columns).array
                self.out.region(rows, columns).array[...] = arrays.narrow(exact, self.out.dtype)
        self._sums = None
        self._summed.clear()


@dataclass(slots=True, eq=False, weakref_slot=True)
class GemmFuture:
    """A running GEMM. `result` waits for it."""

    job: GemmJob
    a: Side
    b: Side
    out: Buffer
    _wait: Callable[[GemmFuture], object]
    done: bool = False
    error: str = ""

    def result(self) -> Buffer:
        """Wait until every block is in place, then return the product.

        Raises:
            FleetError: the fleet cannot finish the GEMM.
        """
        if not self.done:
            self._wait(self)
        if self.error:
            raise FleetError(self.error)
        return self.out


class Pending(Protocol):
    """A running multiplication."""

    @property
    def done(self) -> bool:
        """Return whether the product is complete, so that `result` does not wait."""
        ...

    def result(self) -> Buffer:
        """Wait for the product and return it."""
        ...


class Multiplier(Protocol):
    """The interface of `Fleet` and its wrappers that a model uses."""

    def operand(self, buffer: Buffer) -> Operand:
        """Register a matrix; see `Fleet.operand`."""
        ...

    def submit(self, a: Side, b: Side, out: Buffer) -> Pending:
        """Start a product; see `Fleet.submit`."""
        ...


@dataclass(frozen=True, slots=True)
class Finished:
    """A finished product."""

    out: Buffer

    @property
    def done(self) -> bool:
        """Return True."""
        return True

    def result(self) -> Buffer:
        """Return the product."""
        return self.out


def product_of(a: Side, b: Side, out: Buffer) -> tuple[Gemm, ElementBytes, DType]:
    """Return the GEMM ``out = a @ b``, its elements' sizes, and its operands' dtype.

    Raises:
        ValueError: shapes or dtypes do not match.
    """
    gemm = gemm_of(a.shape, b.shape)
    dtype = a.operand.buffer.dtype
    if out.shape != (gemm.m, gemm.n) or b.operand.buffer.dtype is not dtype:
        raise ValueError(
            f"{a.shape} {dtype.value} @ {b.shape} {b.operand.buffer.dtype.value} does not go "
            f"into {out.shape}"
        )
    if out.dtype not in (dtype, DType.FP32):
        raise ValueError(
            f"a product of {dtype.value} matrices is {dtype.value} or fp32, not {out.dtype.value}"
        )
    return gemm, ElementBytes(dtype.itemsize, out.dtype.itemsize), dtype


def floor_bytes(future: GemmFuture) -> tuple[int, int]:
    """Return the bytes down and up if every operand and result of a GEMM is sent once."""
    down = future.a.operand.buffer.nbytes + future.b.operand.buffer.nbytes
    return down, future.out.nbytes
