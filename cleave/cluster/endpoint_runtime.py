"""A fleet runtime for devices that are connected to an endpoint in another process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from cleave.cluster.endpoint import FleetView, Product
from cleave.cluster.message_packing import Packer
from cleave.fleet.counters import FleetCounters, StepProgress
from cleave.fleet.fleet_runtime import FleetRuntime
from cleave.fleet.product import GemmFuture
from cleave.planner.plan import DeviceRates
from cleave.scheduler.stages.arrays import StageArray
from cleave.scheduler.stages.outcomes import StageOutcome
from cleave.scheduler.stages.work import StepWork

_FRESH_S: Final = 0.1  # lifetime of the cached `FleetView`, in seconds
_CALL_S: Final = 60.0  # maximum time that one remote call waits, in seconds

Call = Callable[..., Any]
"""Function that takes a method's name and arguments, calls the endpoint, and returns the result."""


class EndpointRuntime(FleetRuntime):
    """A fleet runtime that calls an endpoint. `call` waits for the result, but `tell` need not."""

    clock = "wall"
    keeps_state = False  # it sends each array to the endpoint once, so snapshots could not change

    def __init__(self, call: Call, tell: Call) -> None:
        self._call = call
        self._tell = tell
        call("attach")
        self._before = call("of_runtime", "counters")
        self._sent: set[int] = set()
        self._unbound: set[int] = set()  # operands whose elements the endpoint has dropped
        self._packer = Packer()
        self._view: FleetView = call("view")
        self._seen_s = time.monotonic()

    # --- GEMMs ---

    def start(self, future: GemmFuture) -> None:
        """Send a GEMM's operands to the endpoint if it lacks them, and start the GEMM."""
        for operand in (future.a.operand, future.b.operand):
            if operand.id not in self._sent:
                self._sent.add(operand.id)
                self._unbound.discard(operand.id)
                self._call("operand", operand.id, operand.buffer.array, operand.buffer.dtype)
        rows, columns = future.out.shape
        self._call(
            "start",
            Product(
                future.job.id,
                (future.a.operand.id, future.a.transposed),
                (future.b.operand.id, future.b.transposed),
                rows,
                columns,
                future.out.dtype,
            ),
        )

    def wait(self, future: GemmFuture, timeout_s: float | None = None) -> bool:
        """Wait for a GEMM and copy its result into `future.out`. Return False on timeout."""
        if future.done:
            return True
        for wait_s in _within(timeout_s):
            answer = self._call("wait", future.job.id, wait_s)
            if answer is not None:
                product, future.error = answer
                if product is not None:
                    future.out.array[...] = product
                future.done = True
                return True
        return False

    def withdraw(self, future: GemmFuture) -> None:
        """Withdraw a GEMM and wait until it has ended."""
        self._call("withdraw", future.job.id)
        self.wait(future)

    def release(self, operand: int) -> None:
        if operand in self._sent or operand in self._unbound:
            self._sent.discard(operand)
            self._unbound.discard(operand)
            self._tell("release", operand)

    def unbind(self, operand: int) -> None:
        if operand in self._sent:
            self._sent.discard(operand)
            self._unbound.add(operand)
            self._call("unbind", operand)

    # --- steps by stages ---

    def begin_step(self, work: StepWork) -> None:
        forgotten = self._packer.forget_others(work)
        self._call("begin_step", self._packer.pack(work), forgotten)

    def give(self, batch: int, made: StageArray, after: int | None = None) -> None:
        self._call("give", batch, self._packer.pack(made), after)

    def resolve(self, right: bool, reason: str) -> None:
        self._call("of_runtime", "resolve", right, reason)

    def next_outcome(self, timeout_s: float | None = None) -> StageOutcome | None:
        for wait_s in _within(timeout_s):
            outcome = self._call("next_outcome", wait_s)
            if outcome is not None:
                found: StageOutcome = self._packer.received_back(outcome)
                return found
        return None

    def quarantine(self, device: int, reason: str) -> None:
        """Quarantine a device, and invalidate the cached `FleetView`."""
        self._call("of_runtime", "quarantine", device, reason)
        self._seen_s = float("-inf")

    def withdraw_step(self) -> None:
        self._call("of_runtime", "withdraw_step")

    def end_steps(self) -> None:
        self._call("of_runtime", "end_steps")

    def close(self) -> None:
        """Do nothing, so that the devices stay connected for the next worker."""

    # --- state of the fleet ---

    def counters(self) -> FleetCounters:
        """Return the fleet's counters for the time since this worker attached to the endpoint."""
        now: FleetCounters = self._call("of_runtime", "counters")
        before: FleetCounters = self._before
        return now - before

    @contextmanager
    def counting_tasks(self) -> Iterator[None]:
        """In the `with` block, make the endpoint count a training step's tasks for operators."""
        self._call("count_tasks", True)
        try:
            yield
        finally:
            self._call("count_tasks", False)

    def progress(self) -> StepProgress | None:
        """Return None, because operators get the progress from the endpoint."""
        return None

    def device_count(self) -> int:
        return self._now().device_count

    def stuck(self, future: GemmFuture) -> str:
        text: str = self._call("stuck", future.job.id)
        return text

    def stage_devices(self) -> dict[int, DeviceRates]:
        return self._now().stage_devices

    def why_no_stages(self) -> str:
        return self._now().why_no_stages

    def fleet_rates(self) -> tuple[int, list[DeviceRates]]:
        view = self._now()
        return view.epoch, view.rates

    def _now(self) -> FleetView:
        now_s = time.monotonic()
        if now_s - self._seen_s > _FRESH_S:
            self._view, self._seen_s = self._call("view"), now_s
        return self._view


def _within(timeout_s: float | None) -> Iterator[float]:
    """Yield the maximum wait of each remote call, in seconds, until `timeout_s` has passed."""
    until_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
    wait_s = min(_CALL_S, until_s - time.monotonic())
    yield max(0.0, wait_s)
    while (left_s := until_s - time.monotonic()) > 0:
        yield min(_CALL_S, left_s)
