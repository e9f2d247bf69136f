"""Times tiles in a real device process, which receives the operands over a socket.

A tile's time depends on what the device did just before. The operands have just arrived over a
socket, the event loop and the codec occupy the caches, and the compute thread may have been asleep.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from cleave.arrays import Buffer, DType, empty, narrow
from cleave.errors import FleetError
from cleave.fleet.product import Side
from cleave.gemm import Gemm, Span, Tile, cut_tile
from cleave.planner.plan import DeviceRates, ElementBytes, Plan, PlannedTile, Residency
from cleave.server.fleet_server import Server
from profiles.performance import Layout

_POOL_ELEMENTS: Final = 2**23
_PAUSE_S: Final = 0.004  # pause before each tile, in which the idle device lowers its clock rate
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
                raise FleetError("the device to be measured ended before it had joined")
            if time.monotonic() > until_s:
                raise FleetError(f"the device to be measured did not join in {patience_s:g} s")
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
                raise FleetError("the device ended while it was measured; measure it again")
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
