"""Timing multiplications with the very code that tiles run through.

An order of the device's core, its arrays as bytes that came over a socket, an executor, and the
block packed for sending.
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
"""How often something is timed at least."""


class TileTimer(Protocol):
    """Times tiles as a device computes them."""

    @property
    def strips(self) -> Sequence[int]:
        """How many strips a side its tiles may have."""
        ...

    def block_s(self, shape: Shape, strips: int, layout: Layout, dtype: DType, out: DType) -> float:
        """Mean seconds of a block of a tile, see `Sample`.

        Args:
            shape: rows, columns, depth of a block.
            strips: how many the tile has, a side; one of `strips`.
            layout, dtype, out: of the product.
        """
        ...


class Bench:
    """Times tiles on an executor in this process (a `TileTimer`).

    A device process has other things in its caches when a tile comes, and its tiles take longer,
    small ones twice as long; `profiles.measuring.tile_timer` times those.

    Args:
        executor: what multiplies.
        elements: the most that both inputs of a tile have together.
        clock: in seconds.
        rng: of the numbers that are multiplied.
    """

    def __init__(
        self,
        executor: MatmulBackend,
        elements: int,
        clock: Clock = time.perf_counter,
        rng: np.random.Generator | None = None,
    ) -> None:
        self.strips = (1,)
        self.executor, self.clock = executor, clock
        rng = rng or np.random.default_rng(0)
        self._numbers = rng.standard_normal(elements, np.float32)
        self._bytes: dict[DType, memoryview] = {}

    def order(self, a: int, b: int, c: int, layout: Layout, dtype: DType, out: DType) -> Compute:
        """The order for an a x c by c x b product, its operands stored as `layout` says."""
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
        """Seconds of one multiplication, the block ready to be sent at the end.

        Its operands are new in memory, as those of a tile are that came over a socket: products of
        operands that were multiplied a moment ago are up to a third faster.
        """
        pairs = [(_as_received(left), _as_received(right)) for left, right in order.pairs]
        arrived = replace(order, pairs=pairs)
        began_s = self.clock()
        execute(self.executor, arrived).pack()
        return self.clock() - began_s

    def block_s(self, shape: Shape, strips: int, layout: Layout, dtype: DType, out: DType) -> float:
        """See `TileTimer.block_s`; its tiles are one block each."""
        return self.once(self.order(*shape, layout, dtype, out))

    def seconds(self, order: Compute, enough_s: float = _ENOUGH_S) -> float:
        """The median of several: three at least, and `enough_s` together. After one for warming."""
        took = [self.once(order)]
        if took[0] < enough_s:  # what a long one loses by starting cold is nothing
            took.clear()
        while len(took) < REPEATS or sum(took) < enough_s:
            took.append(self.once(order))
        return statistics.median(took)


def _as_received(array: StoredArray) -> StoredArray:
    return replace(array, payload=bytes(array.payload))
