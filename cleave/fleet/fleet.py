"""The class that training code uses to register operands and run GEMMs on a fleet."""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass, field
from itertools import count
from typing import Self
from weakref import WeakValueDictionary

from cleave.arrays import Buffer
from cleave.errors import FleetError
from cleave.fleet.fleet_runtime import FleetRuntime
from cleave.fleet.product import GemmFuture, Operand, Side, product_of
from cleave.planner.plan import Planner
from cleave.planner.tiles.planner import TilePlanner
from cleave.scheduler.counters import FleetCounters
from cleave.scheduler.tiles.gemm_job import GemmJob, MatrixRef

_log = logging.getLogger(__name__)


@dataclass
class Fleet:
    """A fleet of devices that multiplies matrices.

    `cleave.fleet.local_fallback` wraps a fleet to handle periods without devices.
    `cleave.fleet.selection` wraps a fleet to compute a GEMM on the PS if that is faster.

    Args:
        runtime: executes the GEMMs and provides the clock and the connections to devices.
        planner: divides each GEMM into tiles and assigns the tiles to devices.
    """

    runtime: FleetRuntime
    planner: Planner = field(default_factory=TilePlanner)

    def __post_init__(self) -> None:
        self._operands = count(1)
        self._jobs = count(1)
        # The runtime holds strong references to running GEMMs.
        self._under_way: WeakValueDictionary[int, GemmFuture] = WeakValueDictionary()

    @property
    def clock(self) -> str:
        """Return the kind of the fleet's clock: `virtual` or `wall`."""
        return self.runtime.clock

    def operand(self, buffer: Buffer) -> Operand:
        """Register a matrix as an operand for GEMMs. The values must not change afterwards."""
        operand = Operand(next(self._operands), buffer, self.runtime.unbind)
        weakref.finalize(operand, self.runtime.release, operand.id).atexit = False
        return operand

    def submit(self, a: Side, b: Side, out: Buffer) -> GemmFuture:
        """Start the GEMM ``out = a @ b`` without waiting for it. GEMMs can run concurrently.

        Args:
            a: left operand, shape (m, k).
            b: right operand, shape (k, n), in the dtype of `a`.
            out: buffer for the result, shape (m, n), in the dtype of `a` or in fp32.

        Raises:
            ValueError: if the shapes or dtypes do not match.
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
        future = GemmFuture(job, a, b, out, self.runtime.wait)
        if gemm.volume:
            self.runtime.start(future)
            self._under_way[job.id] = future
        else:  # an empty sum is zero
            out.array[...] = 0
            future.done = True
        return future

    def abandon(self) -> None:
        """Withdraw all running GEMMs."""
        for future in list(self._under_way.values()):
            if not future.done:
                self.runtime.withdraw(future)
        self._under_way.clear()

    def counters(self) -> FleetCounters:
        """Return a snapshot of the fleet's counters."""
        return self.runtime.counters()

    @property
    def device_count(self) -> int:
        """Return the number of connected devices that may receive tasks now."""
        return self.runtime.device_count()

    def wait_for(self, devices: int, timeout: float | None = None) -> None:
        """Wait until `devices` devices are connected and may receive tasks.

        Args:
            timeout: maximum wait in seconds on the fleet's clock; None to wait without limit.

        Raises:
            FleetError: if too few devices join within `timeout`, or if no more devices will join.
        """
        if self.device_count >= devices:
            return
        _log.info("waiting for devices: %d of %d are connected", self.device_count, devices)
        if not self.runtime.wait_until(lambda: self.device_count >= devices, timeout):
            until = "and no more will join" if timeout is None else f"after {timeout:g} s"
            raise FleetError(
                f"{self.device_count} of {devices} devices are connected, {until}; "
                f"let more devices join, or wait for fewer devices"
            )

    def close(self) -> None:
        """Close the fleet. It cannot be used afterwards. Closing it again has no effect."""
        self.runtime.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
