"""The runtime of a fleet whose devices are connected to a door, see `cleave.cluster.door`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from cleave.cluster.door import FleetView, Product
from cleave.cluster.parcels import Packer, received_back
from cleave.fleet.counters import FleetCounters, StepProgress
from cleave.fleet.fleet_runtime import FleetRuntime
from cleave.fleet.product import GemmFuture, Operand
from cleave.planner.plan import DeviceRates
from cleave.scheduler.stages.arrays import StageArray
from cleave.scheduler.stages.outcomes import StageOutcome
from cleave.scheduler.stages.work import StepWork

_FRESH_S: Final = 0.1  # what was looked at is taken to be so for that long
_CALL_S: Final = 60.0  # the longest that the door waits within one call
_LOOK_S: Final = 0.05

Call = Callable[..., Any]
"""Calls a method of the door by its name, with its arguments, and returns what it returns."""


class DoorRuntime(FleetRuntime):
    """Has a door do the work of a fleet.

    Args:
        call: calls the door.
        tell: calls it without waiting.
    """

    clock = "wall"

    def __init__(self, call: Call, tell: Call) -> None:
        self._call = call
        self._tell = tell
        call("attach")
        self._before = call("counters")
        self._sent: set[int] = set()
        self._unbound: set[int] = set()  # the door knows these, without their values
        self._packer = Packer()
        self._view: FleetView = call("view")
        self._seen_s = time.monotonic()

    # --- GEMMs ---

    def start(self, future: GemmFuture) -> None:
        """See `FleetRuntime.start`."""
        for operand in (future.a.operand, future.b.operand):
            self._send(operand)
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

    def _send(self, operand: Operand) -> None:
        if operand.id not in self._sent:
            self._sent.add(operand.id)
            self._unbound.discard(operand.id)
            self._call("operand", operand.id, operand.buffer.array, operand.buffer.dtype)

    def wait(self, future: GemmFuture, timeout_s: float | None = None) -> bool:
        """See `FleetRuntime.wait`."""
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

    def wait_until(self, condition: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """See `FleetRuntime.wait_until`. The condition is looked at again and again."""
        until_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() >= until_s:
                return False
            time.sleep(_LOOK_S)
        return True

    def withdraw(self, future: GemmFuture) -> None:
        """See `FleetRuntime.withdraw`."""
        self._call("withdraw", future.job.id)
        self.wait(future)

    def advance_for_local_work(self, flops: float) -> None:
        """See `FleetRuntime.advance_for_local_work`: time has passed by itself."""

    def release(self, operand: int) -> None:
        """See `FleetRuntime.release`."""
        if operand in self._sent or operand in self._unbound:
            self._sent.discard(operand)
            self._unbound.discard(operand)
            self._tell("release", operand)

    def unbind(self, operand: int) -> None:
        """See `FleetRuntime.unbind`. The door has let go of it when this returns."""
        if operand in self._sent:
            self._sent.discard(operand)
            self._unbound.add(operand)
            self._call("unbind", operand)

    # --- steps by stages ---

    def begin_step(self, work: StepWork) -> None:
        """See `FleetRuntime.begin_step`."""
        forgotten = self._packer.forget_others(work)
        self._call("begin_step", self._packer.pack(work), forgotten)

    def give(self, batch: int, made: StageArray, after: int | None = None) -> None:
        """See `FleetRuntime.give`."""
        self._call("give", batch, self._packer.pack(made), after)

    def resolve(self, right: bool, reason: str) -> None:
        """See `FleetRuntime.resolve`."""
        self._call("resolve", right, reason)

    def next_outcome(self, timeout_s: float | None = None) -> StageOutcome | None:
        """See `FleetRuntime.next_outcome`."""
        for wait_s in _within(timeout_s):
            outcome = self._call("next_outcome", wait_s)
            if outcome is not None:
                found: StageOutcome = received_back(outcome, self._packer)
                return found
        return None

    def quarantine(self, device: int, reason: str) -> None:
        """See `FleetRuntime.quarantine`."""
        self._call("quarantine", device, reason)
        self._seen_s = float("-inf")

    def withdraw_step(self) -> None:
        """See `FleetRuntime.withdraw_step`."""
        self._call("withdraw_step")

    def end_steps(self) -> None:
        """See `FleetRuntime.end_steps`."""
        self._call("end_steps")

    def close(self) -> None:
        """Leave the door open: its devices stay for the next worker."""

    # --- what there is ---

    def counters(self) -> FleetCounters:
        """See `FleetRuntime.counters`."""
        now: FleetCounters = self._call("counters")
        before: FleetCounters = self._before
        return now - before

    @contextmanager
    def counting_tasks(self) -> Iterator[None]:
        """See `FleetRuntime.counting_tasks`: whoever watches asks the door."""
        self._call("count_tasks", True)
        try:
            yield
        finally:
            self._call("count_tasks", False)

    def progress(self) -> StepProgress | None:
        """See `FleetRuntime.progress`: the door knows it, and nobody asks this process."""
        return None

    def device_count(self) -> int:
        """See `FleetRuntime.device_count`."""
        return self._now().device_count

    def stuck(self, future: GemmFuture) -> str:
        """See `FleetRuntime.stuck`."""
        text: str = self._call("stuck", future.job.id)
        return text

    def stage_devices(self) -> dict[int, DeviceRates]:
        """See `FleetRuntime.stage_devices`."""
        return self._now().stage_devices

    def why_no_stages(self) -> str:
        """See `FleetRuntime.why_no_stages`."""
        return self._now().why_no_stages

    def fleet_rates(self) -> tuple[int, list[DeviceRates]]:
        """See `FleetRuntime.fleet_rates`."""
        view = self._now()
        return view.epoch, view.rates

    def _now(self) -> FleetView:
        now_s = time.monotonic()
        if now_s - self._seen_s > _FRESH_S:
            self._view, self._seen_s = self._call("view"), now_s
        return self._view


def _within(timeout_s: float | None) -> Iterator[float]:
    """Yield how long the door may wait in each call, until the time is over."""
    until_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
    wait_s = min(_CALL_S, until_s - time.monotonic())
    yield max(0.0, wait_s)
    while (left_s := until_s - time.monotonic()) > 0:
        yield min(_CALL_S, left_s)
