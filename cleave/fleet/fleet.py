"""The fleet, as used by training: operands and submitted GEMMs."""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass, field
from itertools import count
from types import TracebackType
from typing import Self
from weakref import WeakValueDictionary

from cleave.arrays import Buffer
from cleave.errors import FleetError
from cleave.fleet.counters import FleetCounters
from cleave.fleet.fleet_runtime import FleetRuntime
from cleave.fleet.product import GemmFuture, Operand, Side, product_of
from cleave.planner.plan import Planner
from cleave.planner.tiles.planner import TilePlanner
from cleave.scheduler.tiles.gemm_job import GemmJob, MatrixRef

_log = logging.getLogger(__name__)


@dataclass
class Fleet:
    """Multiplies matrices on a fleet of devices.

    Wrappers decide what happens without devices (`cleave.fleet.local_fallback`) and which
    multiplications are worth sending (`cleave.fleet.selection`).

    Args:
        runtime: supplies time and transport.
        planner: chooses the tiles.
    """

    runtime: FleetRuntime
    planner: Planner = field(default_factory=TilePlanner)

    def __post_init__(self) -> None:
        self._operands = count(1)
        self._jobs = count(1)
        # The runtime holds GEMMs that are running.
        self._under_way: WeakValueDictionary[int, GemmFuture] = WeakValueDictionary()

    @property
    def clock(self) -> str:
        """Return `virtual` or `wall`: the clock of `fleet_s`."""
        return self.runtime.clock

    def operand(self, buffer: Buffer) -> Operand:
        """Register a matrix. It must not change while the operand lives."""
        operand = Operand(next(self._operands), buffer, self.runtime.unbind)
        weakref.finalize(operand, self.runtime.release, operand.id).atexit = False
        return operand

    def submit(self, a: Side, b: Side, out: Buffer) -> GemmFuture:
        """Start ``out = a @ b``. GEMMs submitted before the first `result` run concurrently.

        Args:
            a, b: shapes (m, k) and (k, n), of one dtype.
            out: shape (m, n), in the dtype of the operands or fp32.

        Raises:
            ValueError: shapes or dtypes do not match.
        """
        gemm, element, dtype = product_of(a, b, out)
        job = GemmJob(
            next(self._jobs),
            gemm,
            MatrixRef(a.operand.id, a.transposed),
            MatrixRef(b.operand.id, b.transposed),
            element,
            dtype.value,
            out.dtype.value,
            self.planner,
        )
        future = GemmFuture(job, a, b, out, self._await)
        if gemm.volume:
            self.runtime.start(future)
            self._under_way[job.id] = future
        else:  # an empty sum is zero
            out.array[...] = 0
            future.done = True
        return future

    def _await(self, future: GemmFuture) -> None:
        self.runtime.wait(future)
        self._under_way.pop(future.job.id, None)

    def abandon(self) -> None:
        """Withdraw every GEMM that is not done."""
        for future in list(self._under_way.values()):
            if not future.done:
                self.runtime.withdraw(future)
        self._under_way.clear()

    def counters(self) -> FleetCounters:
        """Return a snapshot of the counters."""
        return self.runtime.counters()

    @property
    def device_count(self) -> int:
        """Return the number of devices that may be given work now."""
        return self.runtime.device_count()

    def wait_for(self, devices: int, timeout: float | None = None) -> None:
        """Wait until enough devices may be given work.

        Args:
            devices: number of devices.
            timeout: maximum seconds on the fleet's clock; None for no limit.

        Raises:
            FleetError: the devices did not join in time.
        """
        if self.device_count >= devices:
            return
        _log.info("waiting for devices: %d of %d are there", self.device_count, devices)
        if not self.runtime.wait_until(lambda: self.device_count >= devices, timeout):
            until = "no more are due" if timeout is None else f"after {timeout:g} s"
            raise FleetError(
                f"{self.device_count} of {devices} devices are there, {until}; "
                f"let others join, or ask for fewer"
            )

    def close(self) -> None:
        """End all sessions. Closing twice does nothing."""
        self.runtime.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
