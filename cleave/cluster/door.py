"""A server's door: what devices are connected to, in another process than the worker that trains.

When that worker is lost and starts again, its devices stay. The worker asks for everything through
`cleave.cluster.door_runtime`; one that attaches begins with nothing under way.
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
    """What a worker looks at between its calls; see `FleetRuntime` for each."""

    epoch: int
    rates: list[DeviceRates]
    stage_devices: dict[int, DeviceRates]
    why_no_stages: str
    device_count: int


@dataclass(frozen=True, slots=True)
class Product:
    """Names a GEMM that a worker asks for.

    Attributes:
        number: of the GEMM, by which it is waited for.
        a, b: the operands by their numbers, and whether each enters transposed.
        rows, columns, dtype: of the product.
    """

    number: int
    a: tuple[int, bool]
    b: tuple[int, bool]
    rows: int
    columns: int
    dtype: DType


class Door:
    """Does with a server's devices what the worker of one rank asks.

    Args:
        server: listens for devices.
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
        """Return how many devices there are, those that join just now among them."""
        return len(self._server.live.manager.sessions)

    def send(self, devices: int, address: str, admitted_before_s: float = math.inf) -> int:
        """Send so many devices that do nothing to another door; return how many were sent.

        Args:
            devices: how many, at most.
            address: of the other, see `address`.
            admitted_before_s: see `SessionManager.move`.
        """
        return self._server.live.move(devices, address, admitted_before_s)

    def address(self) -> str:
        """Return where devices of another door are sent: the join URL without its credential."""
        return replace(parse_join_url(self._server.url), credential="").text

    def urls(self) -> tuple[str, str]:
        """Return the join URL for devices, and that of its page for browsers."""
        return self._server.url, self._server.page_url

    def attach(self) -> None:
        """Begin with a new worker; what the one before it had under way is withdrawn."""
        with self._lock:
            self._counting.close()
            self._fleet.abandon()
            self._runtime.end_steps()
            self._forget()

    def view(self) -> FleetView:
        """Return the fleet as it is now."""
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
        """See `FleetRuntime.counters`."""
        return self._fleet.counters()

    # --- GEMMs ---

    def operand(self, number: int, array: Array, dtype: DType) -> None:
        """Keep a matrix until it is released, or unbound."""
        if (known := self._operands.get(number)) is not None:
            known.bind(Buffer(array, dtype))
        else:
            self._operands[number] = self._fleet.operand(Buffer(array, dtype))

    def unbind(self, number: int) -> None:
        """Free a matrix until it is given again; devices keep what they have of it."""
        self._operands[number].unbind()

    def release(self, number: int) -> None:
        """Forget a matrix."""
        self._operands.pop(number, None)

    def start(self, product: Product) -> None:
        """Start a GEMM."""
        out = arrays.empty(product.rows, product.columns, product.dtype)
        a, b = (Side(self._operands[number], turned) for number, turned in (product.a, product.b))
        self._futures[product.number] = self._fleet.submit(a, b, out)

    def wait(self, number: int, timeout_s: float) -> tuple[Array | None, str] | None:
        """Return a GEMM's product, or why there is none; None if it is not done in time."""
        future = self._futures[number]
        if not future.done and not self._runtime.wait(future, timeout_s):
            return None
        if self._futures.get(number) is future:  # else a new worker has one of that number
            del self._futures[number]
        return (None, future.error) if future.error else (future.out.array, "")

    def withdraw(self, number: int) -> None:
        """Withdraw a GEMM; it is waited for afterwards."""
        if (future := self._futures.get(number)) is not None and not future.done:
            self._runtime.withdraw(future)

    def stuck(self, number: int) -> str:
        """See `FleetRuntime.stuck`."""
        future = self._futures.get(number)
        return self._runtime.stuck(future) if future is not None else ""

    # --- steps by stages ---

    def begin_step(self, work: Any, forgotten: list[int]) -> None:
        """Start a step.

        Args:
            work: it, as a `Packer` made it.
            forgotten: numbers of parcels that will not be named again.
        """
        self._unpacker.forget(forgotten)
        self._runtime.begin_step(self._unpacker.unpack(work))

    def give(self, batch: int, made: Any, after: int | None) -> None:
        """See `FleetRuntime.give`."""
        self._runtime.give(batch, self._unpacker.unpack(made), after)

    def resolve(self, right: bool, reason: str) -> None:
        """See `FleetRuntime.resolve`."""
        self._runtime.resolve(right, reason)

    def next_outcome(self, timeout_s: float) -> Any:
        """See `FleetRuntime.next_outcome`; what the worker has itself is named."""
        outcome = self._runtime.next_outcome(timeout_s)
        return None if outcome is None else sent_back(outcome, self._unpacker)

    def quarantine(self, device: int, reason: str) -> None:
        """See `FleetRuntime.quarantine`."""
        self._runtime.quarantine(device, reason)

    def withdraw_step(self) -> None:
        """See `FleetRuntime.withdraw_step`."""
        self._runtime.withdraw_step()

    def end_steps(self) -> None:
        """See `FleetRuntime.end_steps`."""
        self._runtime.end_steps()

    def count_tasks(self, counts: bool) -> None:
        """Begin or end to count the tasks of a step, see `FleetRuntime.counting_tasks`."""
        self._counting.close()
        if counts:
            self._counting.enter_context(self._runtime.counting_tasks())

    def close(self) -> None:
        """End all sessions, with a farewell to the devices."""
        self._server.close()
