"""Results put in their places: finished blocks copied, partial sums folded in fp32."""

from __future__ import annotations

from typing import Any

from cleave import arrays
from cleave.arrays import Buffer, DType
from cleave.dispatch.gemm_work import GemmUnit


class Output:
    """The matrix C of one GEMM while its blocks come in.

    Args:
        out: where the result goes, shape (m, n).
    """

    def __init__(self, out: Buffer) -> None:
        self.out = out
        self._sums: Buffer | None = None

    def place(self, unit: GemmUnit, payload: Any) -> None:
        """Put one result in its place. Partial sums must come in the order of k."""
        block = unit.block
        dtype = DType.FP32 if unit.partial else self.out.dtype
        if not isinstance(payload, Buffer):
            payload = arrays.unpack(payload, block.m.size, block.n.size, dtype)
        if not unit.partial:
            self.out.region(block.m, block.n).array[...] = payload.array
            return
        target = self.sums().region(block.m, block.n).array
        if block.k.start == 0:
            target[...] = payload.array
        else:
            target += payload.array

    def sums(self) -> Buffer:
        """The fp32 accumulator: C itself where it is fp32."""
        if self._sums is None:
            fp32 = self.out.dtype is DType.FP32
            self._sums = self.out if fp32 else arrays.empty(*self.out.shape, DType.FP32)
        return self._sums

    def finish(self) -> None:
        """Everything is in: round the sums to the dtype of C."""
        if self._sums is not None and self._sums is not self.out:
            self.out.array[...] = arrays.narrow(self._sums.array, self.out.dtype)
            self._sums = None
