"""Products computed in this process, without the cost of multiplying small blocks.

In virtual time an emulated device answers with a `DeferredProduct`. Its size is known, and it is
computed only if it is packed for a network. When a GEMM is complete, the products of each tile are
computed in one multiplication, from the arrays that the devices received, directly into C. Products
of small blocks would take 2 to 6 times as long. The numbers are those of a device that multiplies
its tile in one call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cleave.arrays import Array, Buffer
from cleave.errors import UsageError
from cleave.fleet.product import Output
from cleave.gemm import Span
from cleave.machine.backends import MatmulBackend, as_buffer, execute
from cleave.machine.multiplication import Compute
from cleave.scheduler.tiles.gemm_job import GemmTask


@dataclass(slots=True)
class DeferredProduct:
    """A result that has not been computed yet."""

    order: Compute
    backend: MatmulBackend

    @property
    def nbytes(self) -> int:
        """Return the size of the result in bytes."""
        return self.order.rows * self.order.columns * self.order.out.itemsize

    def compute(self) -> Buffer:
        """Compute the block on its own, as a device with this backend does."""
        return execute(self.backend, self.order)

    def pack(self) -> memoryview:
        """Return the bytes that are sent."""
        return self.compute().pack()


@dataclass(frozen=True, slots=True)
class SizedProduct:
    """A result that has only a size."""

    nbytes: int

    def part(self, first: int, stop: int) -> SizedProduct:
        """Return the part from byte `first` to byte `stop`."""
        return SizedProduct(stop - first)

    def followed_by(self, others: Sequence[SizedProduct]) -> SizedProduct:
        """Return this result and others as one."""
        return SizedProduct(self.nbytes + sum(other.nbytes for other in others))

    def pack(self) -> memoryview:
        """Raise UsageError: a size has no bytes to pack."""
        raise UsageError("a fleet that emulates sizes only has no results to send")


class SizedOutput:
    """Replaces `Output` when results have only a size."""

    def __init__(self, out: Buffer) -> None:
        return None

    def place(self, task: GemmTask, payload: Any) -> None:
        """Do nothing: a size has no block to place."""

    def finish(self) -> None:
        """Do nothing: no result exists."""


class DeferredOutput:
    """Replaces `Output`, and multiplies tile by tile when the GEMM is complete."""

    def __init__(self, out: Buffer) -> None:
        self._output = Output(out)
        self._arrived: dict[int, list[tuple[GemmTask, Any]]] = {}

    def place(self, task: GemmTask, payload: Any) -> None:
        """Keep one result until the GEMM is complete."""
        self._arrived.setdefault(task.tile, []).append((task, payload))

    def finish(self) -> None:
        """Multiply the GEMM tile by tile, adding partial sums in the order of k."""
        for tile in sorted(self._arrived.values(), key=lambda t: (t[0][0].block.k, t[0][0].tile)):
            if not self._multiply_whole(tile):
                for task, payload in tile:
                    block = payload.compute() if isinstance(payload, DeferredProduct) else payload
                    self._output.place(task, block)
        self._arrived.clear()
        self._output.finish()

    def _multiply_whole(self, tile: Sequence[tuple[GemmTask, Any]]) -> bool:
        """Multiply a tile at once if its strips are adjacent in memory; return whether they are."""
        deferred: list[tuple[GemmTask, DeferredProduct]] = []
        for task, payload in tile:
            if not isinstance(payload, DeferredProduct):
                return False
            deferred.append((task, payload))
        first = deferred[0][0]
        m = _hull(task.block.m for task, _ in deferred)
        n = _hull(task.block.n for task, _ in deferred)
        if sum(task.block.elements for task, _ in deferred) != m.size * n.size:
            return False
        a_parts: dict[tuple[Span, Span], Buffer] = {}
        b_parts: dict[tuple[Span, Span], Buffer] = {}
        for task, product in deferred:
            block, order = task.block, product.order
            for k, (a, b) in zip(block.pieces, order.pairs, strict=True):
                if (block.m, k) not in a_parts:
                    a_parts[block.m, k] = _oriented(a, order.transpose_a)
                if (k, block.n) not in b_parts:
                    b_parts[k, block.n] = _oriented(b, order.transpose_b)
        left, right = _joined(a_parts, m, first.block.k), _joined(b_parts, first.block.k, n)
        if left is None or right is None:
            return False
        backend = deferred[0][1].backend
        if not first.partial:
            backend.matmul(left, right, self._output.out.region(m, n))
        else:
            lowest = first.block.k.start == 0
            sums = self._output.sums(m, n, first=lowest)
            backend.matmul(left, right, sums, accumulate=not lowest)
        return True


def _hull(spans: Iterable[Span]) -> Span:
    spans = list(spans)
    return Span(min(s.start for s in spans), max(s.stop for s in spans))


def _oriented(array: Any, transposed: bool) -> Buffer:
    """Return an array, transposed if the product takes it so."""
    buffer = as_buffer(array)
    return buffer.T if transposed else buffer


def _joined(parts: dict[tuple[Span, Span], Buffer], rows: Span, columns: Span) -> Buffer | None:
    """Return one view of parts that are adjacent in memory; None when they are not."""
    row0, column0 = min(parts)
    corner = parts[row0, column0]
    if len(parts) == 1:
        return corner
    view: Array = corner.array
    strides, origin = view.strides, _address(view)
    for (r, c), part in parts.items():
        offset = (r.start - row0.start) * strides[0] + (c.start - column0.start) * strides[1]
        if part.array.strides != strides or _address(part.array) != origin + offset:
            return None
    shape = (rows.size, columns.size)
    if sum(part.array.size for part in parts.values()) != shape[0] * shape[1]:
        return None
    joined = np.lib.stride_tricks.as_strided(view, shape, strides)
    return Buffer(joined, corner.dtype)


def _address(view: Array) -> int:
    return int(view.__array_interface__["data"][0])


def default_backend() -> MatmulBackend:
    """Return the torch backend if torch is installed, as operands are then torch tensors."""
    from cleave.machine.backends import NumpyBackend, TorchBackend

    try:
        return TorchBackend()
    except ImportError:
        return NumpyBackend()
