"""Times matrix multiplications as devices run them for tiles, in this process or over a socket.

Each measured time includes decoding the operands from the bytes that a device would receive,
multiplying them with the backend, and packing the result for sending.

In a real device process, a tile's time depends on what the device did just before. The operands
have just arrived over a socket, the event loop and the codec occupy the caches, and the compute
thread may have been asleep.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np

from cleave import arrays
from cleave.arrays import Buffer, DType, empty, narrow
from cleave.errors import FleetError
from cleave.fleet.product import Side
from cleave.gemm import Gemm, Span, Tile, cut_tile
from cleave.machine.backends import Compute, MatmulBackend, StoredArray, execute
from cleave.planner.plan import DeviceRates, ElementBytes, Plan, PlannedTile, Residency
from cleave.server.fleet_server import Server
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

    Tiles take longer in a device process (`profiles.measuring.gemm_timer`), where other data
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


_POOL_ELEMENTS: Final = 2**23
_PAUSE_S: Final = 0.004  # pause before each tile, so that the idle device lowers its clock rate
_LEAST_S: Final = 1e-9
_LOOK_S: Final = 1.0  # interval between checks that the device process is still alive


@dataclass(frozen=True, slots=True)
class InStrips:
    """A planner that assigns each GEMM to the first device. A tile has `strips` strips per side."""

    strips: int

    def plan(
        self,
        gemm: Gemm,
        element: ElementBytes,
        devices: Sequence[DeviceRates],
        residencies: Sequence[Residency] = (),
    ) -> Plan:
        """Plan a GEMM as one tile on `devices[0]`."""
        whole = Tile(Span(0, gemm.m), Span(0, gemm.n), Span(0, gemm.k))
        cut = cut_tile(whole, self.strips, self.strips)
        return Plan(gemm, (PlannedTile(devices[0].device, cut, 0, 0, 0.0),), 0.0)


class SessionTimer:
    """A `TileTimer` for a server's only device. The constructor waits until the device joins.

    Raises:
        FleetError: if no device joins within `patience_s` seconds, or `ended` returns True first.
    """

    strips = (1, 3)

    def __init__(
        self,
        server: Server,
        rng: np.random.Generator,
        patience_s: float = 60.0,
        ended: Callable[[], bool] = lambda: False,
    ) -> None:
        self._server = server
        self._ended = ended
        self._numbers = rng.standard_normal(_POOL_ELEMENTS, np.float32)
        self._pools: dict[DType, Buffer] = {}
        until_s = time.monotonic() + patience_s
        while not server.fleet.device_count:
            if ended():
                raise FleetError("the measured device process exited before it joined")
            if time.monotonic() > until_s:
                raise FleetError(f"the measured device did not join within {patience_s:g} s")
            time.sleep(0.01)

    def block_s(
        self, shape: tuple[int, int, int], strips: int, layout: Layout, dtype: DType, out: DType
    ) -> float:
        """Time a tile once on the device and return the mean time per block in seconds.

        Raises:
            FleetError: if the device process exits.
        """
        self._server.fleet.planner = InStrips(strips)
        a, b, c = shape
        turn_a, turn_b = (letter == "t" for letter in layout.value)
        rows, columns = strips * a, strips * b
        left = self._matrix((c, rows) if turn_a else (rows, c), dtype)
        right = self._matrix((columns, c) if turn_b else (c, columns), dtype)
        product = empty(rows, columns, out)
        time.sleep(_PAUSE_S)
        before_s = self._compute_s()
        # Create new operands for each tile: the server does not resend operands that the device
        # still has.
        a_side = Side(self._server.fleet.operand(left), turn_a)
        b_side = Side(self._server.fleet.operand(right), turn_b)
        future = self._server.fleet.submit(a_side, b_side, product)
        while not self._server.fleet.runtime.wait(future, _LOOK_S):
            if self._ended():
                raise FleetError("the device process exited during the measurement; measure again")
        future.result()
        return max(_LEAST_S, (self._compute_s() - before_s) / strips**2)

    def _compute_s(self) -> float:
        """Return the total compute time in seconds that the device has reported so far."""
        return sum(float(str(d["compute_s"])) for d in self._server.describe_devices())

    def _matrix(self, shape: tuple[int, int], dtype: DType) -> Buffer:
        """Return a random matrix. A matrix larger than the pool repeats the pool's numbers."""
        pool = self._pools.get(dtype)
        if pool is None:
            pool = self._pools[dtype] = Buffer(narrow(self._numbers, dtype)[None, :], dtype)
        size = shape[0] * shape[1]
        # Avoid a copy if the pool is large enough. A copy would fill caches that the device may
        # share with this process.
        flat = pool.array[0, :size] if size <= pool.array.size else np.resize(pool.array[0], size)
        return Buffer(flat.reshape(shape), dtype)
