"""Times matrix multiplications with the code that devices use for tiles.

Each measured time includes decoding the operands from the bytes that a device would receive,
multiplying the operands with the backend, and packing the result for sending.
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
from cleave.machine.backends import Compute, MatmulBackend, StoredArray, execute
from profiles.performance import Layout

Clock = Callable[[], float]
Shape = tuple[int, int, int]

_ENOUGH_S: Final = 0.02
REPEATS: Final = 3  # minimum number of timed repetitions of each multiplication


class TileTimer(Protocol):
    """Interface for measuring how long a device takes to compute a tile."""

    @property
    def strips(self) -> Sequence[int]:
        """Return the values of `strips` that `block_s` supports."""
        ...

    def block_s(self, shape: Shape, strips: int, layout: Layout, dtype: DType, out: DType) -> float:
        """Time a tile once and return the mean time per block in seconds.

        Args:
            shape: rows, columns and depth of one block.
            strips: number of strips per side. The tile consists of strips x strips blocks.
        """
        ...


class Bench:
    """Times tiles on a backend in this process (a `TileTimer`).

    Tiles take longer in a device process (`profiles.measuring.tile_timer`), where other data
    occupies the caches. Small tiles take about twice as long there.

    Args:
        elements: maximum total number of elements of the two operands.
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
        """Return a task for `once` that multiplies an a x c matrix by a c x b matrix."""
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
        """Multiply once and return the time in seconds, which includes packing the result.

        Before the timed part, the operands are copied to new memory, as if they had just arrived
        over a socket. Multiplying recently used operands would be up to a third faster.
        """
        pairs = [(_as_received(left), _as_received(right)) for left, right in order.pairs]
        arrived = replace(order, pairs=pairs)
        began_s = self.clock()
        execute(self.backend, arrived).pack()
        return self.clock() - began_s

    def block_s(self, shape: Shape, strips: int, layout: Layout, dtype: DType, out: DType) -> float:
        """Return the time in seconds for a tile of one block. `Bench` supports no larger tiles."""
        return self.once(self.order(*shape, layout, dtype, out))

    def seconds(self, order: Compute, enough_s: float = _ENOUGH_S) -> float:
        """Run a task at least 3 times and for `enough_s`; return the median time in seconds."""
        took = [self.once(order)]
        if took[0] < enough_s:  # discard the cold start of a short multiplication
            took.clear()
        while len(took) < REPEATS or sum(took) < enough_s:
            took.append(self.once(order))
        return statistics.median(took)


def _as_received(array: StoredArray) -> StoredArray:
    return replace(array, payload=bytes(array.payload))
