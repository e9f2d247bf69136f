"""The endpoint to which a server's devices connect while another process trains.

If the training process (the worker) is lost and restarts, the devices stay connected. A new
worker withdraws the GEMMs and the step of the previous worker. Workers use an endpoint through
`cleave.cluster.endpoints`. Ray runs `OwnEndpoint` as an actor on a node of the cluster.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from cleave import arrays
from cleave.arrays import Array, Buffer, DType
from cleave.cluster.membership import Membership, Report, Roll
from cleave.cluster.message_packing import Unpacker
from cleave.energy.grid import Grid
from cleave.energy.typical import load_typical
from cleave.errors import UsageError
from cleave.fleet.product import GemmFuture, Operand, Side
from cleave.planner.plan import DeviceRates, PsRates
from cleave.scheduler.counters import StepProgress
from cleave.scheduler.stages.outcomes import PassDone, StageDone
from cleave.server.access import Clocks
from cleave.server.api.event_log import EventLog
from cleave.server.api.overview import Answer, Overview, Question, ServerFacts
from cleave.server.fleet_server import Server, ServerConfig, serve
from cleave.server.jobs.energy import EnergyMeter, EnergySums, ServerLog, SessionWork
from cleave.transport.join_url import parse_join_url
from profiles.library import load_profiles


@dataclass(frozen=True, slots=True)
class FleetView:
    """A snapshot of a fleet's devices and their rates, for a worker's cache."""

    epoch: int
    rates: list[DeviceRates]
    stage_devices: dict[int, DeviceRates]
    why_no_stages: str
    device_count: int


@dataclass(frozen=True, slots=True)
class Product:
    """A worker's request for a GEMM. Later calls refer to the GEMM by `number`."""

    number: int
    a: tuple[int, bool]  # number of the operand, and whether to transpose the operand
    b: tuple[int, bool]
    rows: int  # of the output matrix
    columns: int
    dtype: DType


class Endpoint:
    """The endpoint of one rank. It runs the GEMMs and steps of the rank's worker on devices."""

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
        """Tell up to `devices` idle devices to move to another endpoint. Return the number told.

        `address` is the other endpoint's join URL, without a credential. Only devices admitted
        before `admitted_before_s`, on this server's clock, are moved.
        """
        return self._server.live.move(devices, address, admitted_before_s)

    def address(self) -> str:
        """Return the join URL without a credential, for devices that move to this endpoint."""
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
            epoch, rates, runtime.stage_devices(), runtime.why_no_stages(), runtime.device_count()
        )

    def of_runtime(self, name: str, *arguments: Any) -> Any:
        """Call the runtime's method `name`, without converting the arguments or the result."""
        return getattr(self._runtime, name)(*arguments)

    # --- GEMMs ---

    def operand(self, number: int, array: Array, dtype: DType) -> None:
        """Store an operand matrix until the worker releases or unbinds it."""
        if (known := self._operands.get(number)) is not None:
            known.bind(Buffer(array, dtype))
        else:
            self._operands[number] = self._fleet.operand(Buffer(array, dtype))

    def unbind(self, number: int) -> None:
        """Free an operand's matrix, which the worker may send again. Devices keep their copies."""
        self._operands[number].unbind()

    def release(self, number: int) -> None:
        """Discard an operand that no later GEMM uses."""
        self._operands.pop(number, None)

    def start(self, product: Product) -> None:
        """Start a GEMM on the devices, without waiting for the result."""
        out = arrays.empty(product.rows, product.columns, product.dtype)
        a, b = (Side(self._operands[number], turned) for number, turned in (product.a, product.b))
        self._futures[product.number] = self._fleet.submit(a, b, out)

    def wait(self, number: int, timeout_s: float) -> tuple[Array | None, str] | None:
        """Wait for a GEMM. Return (output, "") or (None, error message); None on timeout."""
        future = self._futures[number]
        if not future.done and not self._runtime.wait(future, timeout_s):
            return None
        if self._futures.get(number) is future:  # otherwise, a new worker already reuses the number
            del self._futures[number]
        return (None, future.error) if future.error else (future.out.array, "")

    def withdraw(self, number: int) -> None:
        """Withdraw a GEMM. The worker must still call `wait` with the GEMM's number."""
        if (future := self._futures.get(number)) is not None and not future.done:
            self._runtime.withdraw(future)

    def stuck(self, number: int) -> str:
        """Return why no connected device can finish a GEMM; empty if no reason is known."""
        future = self._futures.get(number)
        return self._runtime.stuck(future) if future is not None else ""

    # --- steps by stages ---

    def begin_step(self, work: Any, forgotten: list[int]) -> None:
        """Delete the objects numbered in `forgotten`, then start the step by stages in `work`."""
        self._unpacker.forget(forgotten)
        self._runtime.begin_step(self._unpacker.unpack(work))

    def give(self, batch: int, made: Any, after: int | None) -> None:
        """Pass a packed array that the worker computed for a micro-batch to the running step."""
        self._runtime.give(batch, self._unpacker.unpack(made), after)

    def next_outcome(self, timeout_s: float) -> Any:
        """Wait for the step's next outcome. Return it packed for the worker, or None on timeout.

        Also return None for a finished pass or stage, because `StepResult` contains its result.
        """
        outcome = self._runtime.next_outcome(timeout_s)
        if outcome is None or isinstance(outcome, PassDone | StageDone):
            return None
        return self._unpacker.sent_back(outcome)

    def count_tasks(self, counts: bool) -> None:
        """Start a new count of a step's tasks if `counts` is True. Otherwise, stop counting."""
        self._counting.close()
        if counts:
            self._counting.enter_context(self._runtime.counting_tasks())

    def close(self) -> None:
        """Send a `bye` message to every device and close the server."""
        self._server.close()


@dataclass(frozen=True, slots=True)
class EndpointSetup:
    """Settings of an endpoint in a separate process."""

    config: ServerConfig
    first: str = ""  # id of the first server, which admits devices; empty to use `config.auth`
    grid: Grid | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """The state that a server returns when the first server polls it."""

    start: str  # random id of the process, new when Ray restarts the server
    answer: Answer
    energy: EnergySums
    devices: list[dict[str, object]]  # from `Server.describe_devices`
    progress: StepProgress | None
    reports: list[Report]  # about devices, not yet received by the first server
    number: int  # number of all reports since the process started


class OwnEndpoint(Endpoint):
    """An endpoint in a separate process. A training worker and the first server call it.

    `again` is True if the process replaces a lost one. The new process uses any free port if it
    cannot listen on the configured port.
    """

    def __init__(self, setup: EndpointSetup, *, again: bool = False) -> None:
        profiles = load_profiles()
        self._energy = EnergyMeter(profiles.values(), load_typical(), setup.grid)
        self._overview = Overview(
            _facts(setup.config.card), EventLog(time.time), profiles, self._energy, Clocks()
        )
        self._start = secrets.token_hex(8)
        config = replace(setup.config, events=self._overview.happened)
        if setup.first:
            self._membership = Membership(setup.first, config.credential)
            config = replace(config, auth=self._membership)
        try:
            server = serve(config)
        except UsageError:
            if not again:
                raise
            server = serve(replace(config, port=0))
        super().__init__(server)
        self._overview.live = self._server.live
        self._log = ServerLog(self._server.live, self._energy)
        if again:  # a job may already be running
            self._log.begin()

    def look(self, question: Question, start: str, taken: int, roll: Roll | None) -> Seen:
        """Return the server's state and its pending reports about devices.

        Args:
            start: random ID of the process, from the last `Seen` that the first server received.
            taken: number of reports that the first server has received from that process.
            roll: the current list of devices; None if the list has not changed.
        """

        def seen() -> Seen:
            server = self._server
            if roll is not None:
                self._follow(roll)
            server.credit()
            reports, number = self._membership.reports(taken if start == self._start else 0)
            return Seen(
                self._start,
                self._overview.answer(question),
                self._overview.energy(),
                server.describe_devices(),
                server.progress(),
                reports,
                number,
            )

        return self._server.live.in_loop(seen)

    def _follow(self, roll: Roll) -> None:
        self._membership.replace(roll)
        for identity, (code, reason) in roll.expelled.items():
            self._server.end_identity(identity, code, reason)
        for member in roll.members:
            if member.admission.identity is not None:
                self._server.mark_own(member.admission.identity, member.admission.own)

    # --- energy of a job; see `ServerLog` ---

    def begin_log(self) -> None:
        self._log.begin()

    def did(self) -> list[SessionWork]:
        return self._log.did()

    def end_log(self) -> None:
        self._log.end()


def _facts(card: PsRates | None) -> ServerFacts:
    rates = (card.egress_bytes_per_s, card.ingress_bytes_per_s) if card is not None else ()
    known = [rate if math.isfinite(rate) else None for rate in rates] or [None, None]
    return ServerFacts(egress_bytes_per_s=known[0], ingress_bytes_per_s=known[1])
