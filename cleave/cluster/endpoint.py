"""The endpoint of a server. Its process serves devices, while another process trains.

When the worker is lost and restarts, the devices stay connected to the endpoint. The worker uses
the endpoint through `cleave.cluster.endpoint_runtime`. When a new worker attaches, the endpoint
cancels the GEMMs and the step of the previous worker.
"""

from __future__ import annotations

import math
import threading
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from cleave import arrays
from cleave.arrays import Array, Buffer, DType
from cleave.cluster.message_packing import Unpacker, sent_back
from cleave.fleet.counters import FleetCounters
from cleave.fleet.product import GemmFuture, Operand, Side
from cleave.planner.plan import DeviceRates
from cleave.server.fleet_server import Server
from cleave.transport.join_url import parse_join_url


@dataclass(frozen=True, slots=True)
class FleetView:
    """A snapshot of the fleet's state, which a worker caches.

    Attributes:
        epoch, rates: result of `FleetRuntime.fleet_rates`.
        stage_devices: result of `FleetRuntime.stage_devices`.
        why_no_stages: result of `FleetRuntime.why_no_stages`.
        device_count: result of `FleetRuntime.device_count`.
    """

    epoch: int
    rates: list[DeviceRates]
    stage_devices: dict[int, DeviceRates]
    why_no_stages: str
    device_count: int


@dataclass(frozen=True, slots=True)
class Product:
    """A GEMM that a worker requests.

    Attributes:
        number: number of the GEMM, which the worker uses to wait for the GEMM or withdraw it.
        a, b: for each operand, its number and whether the GEMM transposes it.
        rows, columns, dtype: shape and dtype of the output matrix.
    """

    number: int
    a: tuple[int, bool]
    b: tuple[int, bool]
    rows: int
    columns: int
    dtype: DType


class Endpoint:
    """The endpoint of one rank. It runs the requests of the rank's worker on the server's devices.

    Args:
        server: server to which the devices connect.
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
        """Return the number of connected devices, including devices that are joining."""
        return len(self._server.live.manager.sessions)

    def send(self, devices: int, address: str, admitted_before_s: float = math.inf) -> int:
        """Tell idle devices to move to another endpoint. Return how many devices were told to move.

        Args:
            devices: maximum number of devices to move.
            address: result of the other endpoint's `address` method.
            admitted_before_s: move only devices that this server admitted before this time.
        """
        return self._server.live.move(devices, address, admitted_before_s)

    def address(self) -> str:
        """Return the join URL without its credential, as the target for devices that move here."""
        return replace(parse_join_url(self._server.url), credential="").text

    def urls(self) -> tuple[str, str]:
        """Return the join URL for devices, and the URL of the join page for browsers."""
        return self._server.url, self._server.page_url

    def attach(self) -> None:
        """Attach a new worker. Withdraw all GEMMs and the step of the previous worker."""
        with self._lock:
            self._counting.close()
            self._fleet.abandon()
            self._runtime.end_steps()
            self._forget()

    def view(self) -> FleetView:
        """Return a snapshot of the fleet's current state."""
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
        """Store an operand matrix until the worker releases or unbinds it.

        Args:
            array: elements of the matrix.
            dtype: dtype of the matrix.
        """
        if (known := self._operands.get(number)) is not None:
            known.bind(Buffer(array, dtype))
        else:
            self._operands[number] = self._fleet.operand(Buffer(array, dtype))

    def unbind(self, number: int) -> None:
        """Free an operand's memory until the worker sends the operand again.

        Devices keep their copies of the operand.
        """
        self._operands[number].unbind()

    def release(self, number: int) -> None:
        """Discard operand number `number`. Later GEMMs do not use it."""
        self._operands.pop(number, None)

    def start(self, product: Product) -> None:
        """Start a GEMM on the devices, without waiting for the result."""
        out = arrays.empty(product.rows, product.columns, product.dtype)
        a, b = (Side(self._operands[number], turned) for number, turned in (product.a, product.b))
        self._futures[product.number] = self._fleet.submit(a, b, out)

    def wait(self, number: int, timeout_s: float) -> tuple[Array | None, str] | None:
        """Wait for a GEMM.

        Args:
            timeout_s: maximum time to wait, in seconds.

        Returns:
            The output matrix and an empty text, or None and the error of a failed GEMM. On timeout,
            None instead of a pair.
        """
        future = self._futures[number]
        if not future.done and not self._runtime.wait(future, timeout_s):
            return None
        if self._futures.get(number) is future:  # otherwise, a new worker already reuses the number
            del self._futures[number]
        return (None, future.error) if future.error else (future.out.array, "")

    def withdraw(self, number: int) -> None:
        """Withdraw a GEMM. The worker must still call `wait` for it."""
        if (future := self._futures.get(number)) is not None and not future.done:
            self._runtime.withdraw(future)

    def stuck(self, number: int) -> str:
        """Return why no connected device can finish a GEMM.

        Empty if some device can finish the GEMM, or if no device is connected.
        """
        future = self._futures.get(number)
        return self._runtime.stuck(future) if future is not None else ""

    # --- steps by stages ---

    def begin_step(self, work: Any, forgotten: list[int]) -> None:
        """Start a training step by stages.

        Args:
            work: the step's `StepWork`, packed by the worker's `Packer`.
            forgotten: numbers of the graphs and arrays that the worker will not reference again.
        """
        self._unpacker.forget(forgotten)
        self._runtime.begin_step(self._unpacker.unpack(work))

    def give(self, batch: int, made: Any, after: int | None) -> None:
        """Continue a micro-batch with an array that the worker computed.

        Args:
            batch: number of the micro-batch.
            made: the array, packed by the worker's `Packer`.
            after: see `FleetRuntime.give`.
        """
        self._runtime.give(batch, self._unpacker.unpack(made), after)

    def resolve(self, right: bool, reason: str) -> None:
        """Tell the fleet whether the numbers in the last `Suspect` outcome are correct, and why."""
        self._runtime.resolve(right, reason)

    def next_outcome(self, timeout_s: float) -> Any:
        """Wait for the next outcome of the step. Return None on timeout.

        The outcome contains references instead of the arrays that came from the worker.
        """
        outcome = self._runtime.next_outcome(timeout_s)
        return None if outcome is None else sent_back(outcome, self._unpacker)

    def quarantine(self, device: int, reason: str) -> None:
        """Quarantine a device that returned wrong results."""
        self._runtime.quarantine(device, reason)

    def withdraw_step(self) -> None:
        """End the current step. Devices keep the arrays that the next step can use."""
        self._runtime.withdraw_step()

    def end_steps(self) -> None:
        """End the current step. Devices discard the step's arrays."""
        self._runtime.end_steps()

    def count_tasks(self, counts: bool) -> None:
        """Start or stop counting the tasks of a training step; see `FleetRuntime.counting_tasks`.

        Args:
            counts: True to start a new count, False to stop counting.
        """
        self._counting.close()
        if counts:
            self._counting.enter_context(self._runtime.counting_tasks())

    def close(self) -> None:
        """Send a `bye` to every device and close the server."""
        self._server.close()
