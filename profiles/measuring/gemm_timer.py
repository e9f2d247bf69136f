"""Times multiplications with the code that multiplies tiles.

A measurement covers a `Compute` of the device's core, arrays as bytes as received over a socket, a
backend, and packing the block for sending.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, Protocol

import numpy as np

from cleave import arrays
from cleave.arrays import DType
from cleave.machine.backends import MatmulBackend, execute
from cleave.machine.multiplication import Compute, StoredArray
from profiles.performance import Layout

Clock = Callable[[], float]
Shape = tuple[int, int, int]

_ENOUGH_S: Final = 0.02
REPEATS: Final = 3
"""Minimum number of timed repetitions."""


class TileTimer(Protocol):
    """Times tiles as a device computes them."""

    @property
    def strips(self) -> Sequence[int]:
        """Return the numbers of strips per side that tiles may have."""
        ...

    def block_s(self, shape: Shape, strips: int, layout: Layout, dtype: DType, out: DType) -> float:
        """Return the mean seconds of a block of a tile; see `TimedTile`.

        Args:
            shape: rows, columns, depth of a block.
            strips: strips per side of the tile; one of `strips`.
            layout, dtype, out: layout, input dtype and result dtype of the product.
        """
        ...


class Bench:
    """Times tiles on a backend in this process (a `TileTimer`).

    In a device process tiles take longer, small ones twice as long, because its caches hold other
    data; `profiles.measuring.tile_timer` times tiles there.

    Args:
        backend: backend that multiplies.
        elements: maximum number of elements of both inputs together.
        clock: clock in seconds.
        rng: generator of the operands.
    """

    def __init__(
        self,
        backend: MatmulBackend,
        elements: int,
        clock: Clock = time.perf_counter,
        rng: np.random.Generator | None = None,
    ) -> None:
        self.strips = (1,)
        self.backend, self.clock = backend, clock
        rng = rng or np.random.default_rng(0)
        self._numbers = rng.standard_normal(elements, np.float32)
        self._bytes: dict[DType, memoryview] = {}

    def order(self, a: int, b: int, c: int, layout: Layout, dtype: DType, out: DType) -> Compute:
        """Return an a x c by c x b product to time, with operands stored as `layout` says."""
        transpose_a, transpose_b = (letter == "t" for letter in layout.value)
        left = self._array(0, (c, a) if transpose_a else (a, c), dtype)
        right = self._array(a * c, (b, c) if transpose_b else (c, b), dtype)
        return Compute(1, [(left, right)], transpose_a, transpose_b, a, b, out, 2 * a * b * c)

    def _array(self, first: int, shape: tuple[int, int], dtype: DType) -> StoredArray:
        if dtype not in self._bytes:
            self._bytes[dtype] = arrays.narrow(self._numbers, dtype).view(np.uint8).data
        begin, nbytes = first * dtype.itemsize, shape[0] * shape[1] * dtype.itemsize
        return StoredArray(*shape, dtype, self._bytes[dtype][begin : begin + nbytes], nbytes)

    def once(self, order: Compute) -> float:
        """Return the seconds of one multiplication, until the block is ready to be sent.

        Operands are new in memory, as if just received over a socket. Products of recently used
        operands would be up to a third faster.
        """
        pairs = [(_as_received(left), _as_received(right)) for left, right in order.pairs]
        arrived = replace(order, pairs=pairs)
        began_s = self.clock()
        execute(self.backend, arrived).pack()
        return self.clock() - began_s

    def block_s(self, shape: Shape, strips: int, layout: Layout, dtype: DType, out: DType) -> float:
        """See `TileTimer.block_s`; tiles here have one block each."""
        return self.once(self.order(*shape, layout, dtype, out))

    def seconds(self, order: Compute, enough_s: float = _ENOUGH_S) -> float:
        """Return the median of at least three multiplications that take `enough_s` in all.

        A short first multiplication is a warm-up and does not count.
        """
        took = [self.once(order)]
        if took[0] < enough_s:  # a cold start does not matter for longer ones
            took.clear()
        while len(took) < REPEATS or sum(took) < enough_s:
            took.append(self.once(order))
        return statistics.median(took)


def _as_received(array: StoredArray) -> StoredArray:
    return replace(array, payload=bytes(array.payload))
