"""The endpoint of a server: devices connect to it, in another process than the training worker.

When the worker is lost and restarts, its devices stay connected. The worker uses the endpoint
through `cleave.cluster.door_runtime`. A worker that attaches starts with no work in flight.
"""

from __future__ import annotations

import math
import threading
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from cleave import arrays
from cleave.arrays import Array, Buffer, DType
from cleave.cluster.parcels import Unpacker, sent_back
from cleave.fleet.counters import FleetCounters
from cleave.fleet.product import GemmFuture, Operand, Side
from cleave.planner.plan import DeviceRates
from cleave.server.fleet_server import Server
from cleave.transport.join_url import parse_join_url


@dataclass(frozen=True, slots=True)
class FleetView:
    """The fleet's state for a worker between its calls; see `FleetRuntime` for each field."""

    epoch: int
    rates: list[DeviceRates]
    stage_devices: dict[int, DeviceRates]
    why_no_stages: str
    device_count: int


@dataclass(frozen=True, slots=True)
class Product:
    """A GEMM that a worker requests.

    Attributes:
        number: number of the GEMM, to wait for it.
        a, b: number of each operand, and whether it is transposed.
        rows, columns, dtype: shape and dtype of the product.
    """

    number: int
    a: tuple[int, bool]
    b: tuple[int, bool]
    rows: int
    columns: int
    dtype: DType


class Door:
    """The endpoint of one rank: runs its worker's requests on the server's devices.

    Args:
        server: server that listens for devices.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._fleet = server.fleet
        self._runtime = self._fleet.runtime
        self._lock = threading.Lock()
        self._counting = ExitStack()
        self._forget()

    def _forget(self) -> None:
        self._operands: dict[int, Operand] = {}
        self._futures: dict[int, GemmFuture] = {}
        self._unpacker = Unpacker()

    def load(self) -> int:
        """Return the number of devices, including those that are joining."""
        return len(self._server.live.manager.sessions)

    def send(self, devices: int, address: str, admitted_before_s: float = math.inf) -> int:
        """Send idle devices to another endpoint; return how many were sent.

        Args:
            devices: maximum number of devices.
            address: address of the other endpoint, see `address`.
            admitted_before_s: see `SessionManager.move`.
        """
        return self._server.live.move(devices, address, admitted_before_s)

    def address(self) -> str:
        """Return the target for devices of other endpoints: the join URL without its credential."""
        return replace(parse_join_url(self._server.url), credential="").text

    def urls(self) -> tuple[str, str]:
        """Return the join URL for devices and the URL of the join page."""
        return self._server.url, self._server.page_url

    def attach(self) -> None:
        """Attach a new worker; withdraw the previous worker's work in flight."""
        with self._lock:
            self._counting.close()
            self._fleet.abandon()
            self._runtime.end_steps()
            self._forget()

    def view(self) -> FleetView:
        """Return the current state of the fleet."""
        runtime = self._runtime
        epoch, rates = runtime.fleet_rates()
        return FleetView(
            epoch,
            rates,
            runtime.stage_devices(),
            runtime.why_no_stages(),
            runtime.device_count(),
        )

    def counters(self) -> FleetCounters:
        """Return a snapshot of the fleet's counters."""
        return self._fleet.counters()

    # --- GEMMs ---

    def operand(self, number: int, array: Array, dtype: DType) -> None:
        """Store a matrix until it is released or unbound."""
        if (known := self._operands.get(number)) is not None:
            known.bind(Buffer(array, dtype))
        else:
            self._operands[number] = self._fleet.operand(Buffer(array, dtype))

    def unbind(self, number: int) -> None:
        """Free a matrix until it is sent again; devices keep their copies."""
        self._operands[number].unbind()

    def release(self, number: int) -> None:
        """Discard a matrix."""
        self._operands.pop(number, None)

    def start(self, product: Product) -> None:
        """Start a GEMM."""
        out = arrays.empty(product.rows, product.columns, product.dtype)
        a, b = (Side(self._operands[number], turned) for number, turned in (product.a, product.b))
        self._futures[product.number] = self._fleet.submit(a, b, out)

    def wait(self, number: int, timeout_s: float) -> tuple[Array | None, str] | None:
        """Return a GEMM's (product, error); None on timeout. On error the product is None."""
        future = self._futures[number]
        if not future.done and not self._runtime.wait(future, timeout_s):
            return None
        if self._futures.get(number) is future:  # else a new worker reuses the number
            del self._futures[number]
        return (None, future.error) if future.error else (future.out.array, "")

    def withdraw(self, number: int) -> None:
        """Withdraw a GEMM; the worker waits for it afterwards."""
        if (future := self._futures.get(number)) is not None and not future.done:
            self._runtime.withdraw(future)

    def stuck(self, number: int) -> str:
        """Return why the devices cannot finish a GEMM; empty if one can, or none is connected."""
        future = self._futures.get(number)
        return self._runtime.stuck(future) if future is not None else ""

    # --- steps by stages ---

    def begin_step(self, work: Any, forgotten: list[int]) -> None:
        """Start a step.

        Args:
            work: step, packed by a `Packer`.
            forgotten: numbers of objects that will not be referenced again.
        """
        self._unpacker.forget(forgotten)
        self._runtime.begin_step(self._unpacker.unpack(work))

    def give(self, batch: int, made: Any, after: int | None) -> None:
        """Continue a micro-batch with an array from the worker."""
        self._runtime.give(batch, self._unpacker.unpack(made), after)

    def resolve(self, right: bool, reason: str) -> None:
        """Tell the fleet whether the last suspect results are right, and why."""
        self._runtime.resolve(right, reason)

    def next_outcome(self, timeout_s: float) -> Any:
        """Return the step's next outcome, naming the worker's own objects; None on timeout."""
        outcome = self._runtime.next_outcome(timeout_s)
        return None if outcome is None else sent_back(outcome, self._unpacker)

    def quarantine(self, device: int, reason: str) -> None:
        """Quarantine a device whose work was wrong."""
        self._runtime.quarantine(device, reason)

    def withdraw_step(self) -> None:
        """End the current step; devices keep what the next step can reuse."""
        self._runtime.withdraw_step()

    def end_steps(self) -> None:
        """End the current step; devices discard its data."""
        self._runtime.end_steps()

    def count_tasks(self, counts: bool) -> None:
        """Start or stop counting a step's tasks; see `FleetRuntime.counting_tasks`."""
        self._counting.close()
        if counts:
            self._counting.enter_context(self._runtime.counting_tasks())

    def close(self) -> None:
        """Send the devices a `bye` and end all sessions."""
        self._server.close()
