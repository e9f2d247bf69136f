"""Results put in their places: finished blocks are copied, partial sums are added in fp32."""

from __future__ import annotations

from typing import Any

from cleave import arrays
from cleave.arrays import Buffer, DType
from cleave.gemm import Span
from cleave.scheduler.gemm_job import GemmTask


class Output:
    """The matrix C of one GEMM while its blocks come in.

    Args:
        out: where the result goes, shape (m, n).
    """

    def __init__(self, out: Buffer) -> None:
        self.out = out
        self._sums: Buffer | None = None
        self._summed: list[tuple[Span, Span]] = []  # which elements are sums

    def place(self, task: GemmTask, payload: Any) -> None:
        """Put one result in its place. Partial sums must come in the order of k."""
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
        """Return the fp32 accumulator of some elements; it is C itself where C is fp32.

        Args:
            rows, columns: the elements.
            first: whether this is their first partial sum.
        """
        if self._sums is None:
            fp32 = self.out.dtype is DType.FP32
            self._sums = self.out if fp32 else arrays.empty(*self.out.shape, DType.FP32)
        if first:
            self._summed.append((rows, columns))
        return self._sums.region(rows, columns)

    def finish(self) -> None:
        """Round the sums to the dtype of C, once every block is in."""
        if self._sums is not None and self._sums is not self.out:
            for rows, columns in self._summed:
                exact = self._sums.region(rows, columns).array
                self.out.region(rows, columns).array[...] = arrays.narrow(exact, self.out.dtype)
        self._sums = None
        self._summed.clear()
