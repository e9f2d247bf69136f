"""The runtime that carries out the instructions of the server's core.

A `Runtime` executes a session manager's instructions, and keeps the futures, outputs and checks of
its GEMMs. Two subclasses supply time and transport: over real connections
(`cleave.server.runtime`), and in virtual time (`emulator.virtual`).
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from cleave.arrays import Buffer, DType
from cleave.fleet.block_checks import BlockChecks
from cleave.fleet.counters import FleetCounters, StepProgress
from cleave.fleet.fleet_runtime import FleetRuntime
from cleave.fleet.product import GemmFuture, Output, floor_bytes
from cleave.planner.plan import DeviceRates
from cleave.protocol.messages import Message
from cleave.scheduler.instructions import (
    Aside,
    Check,
    Close,
    Done,
    Failed,
    ForRuntime,
    Joined,
    Note,
    Overdue,
    Place,
    Send,
    TellStep,
)
from cleave.scheduler.sessions.session_manager import SessionManager
from cleave.scheduler.stages.outcomes import StageOutcome
from cleave.scheduler.stages.work import StepWork
from cleave.scheduler.tiles.gemm_job import GemmTask
from cleave.scheduler.tiles.tasks import Task
from cleave.scheduler.traffic import TrafficKind
from cleave.verify import Judgement


class Placing(Protocol):
    """The output of one product: `cleave.fleet.product.Output` or a substitute."""

    def place(self, task: GemmTask, payload: object) -> None:
        """Write one block into the output."""
        ...

    def finish(self) -> None:
        """Complete the product once every block is written."""
        ...


Information = Joined | Overdue | Aside | Note
"""Instructions that only inform."""


class Runtime(FleetRuntime):
    """Carries out the core's instructions, and supplies time and transport for a fleet.

    Args:
        manager: the core whose instructions it carries out.
        rng: draws the secret vectors of all checks.
    """

    def __init__(self, manager: SessionManager, rng: np.random.Generator) -> None:
        self.manager = manager
        self._checks = BlockChecks(rng)
        self._futures: dict[int, GemmFuture] = {}
        self._outputs: dict[int, Placing] = {}
        self._counters = FleetCounters()
        self._gemms_before: int | None = None  # at the step's start; None between steps
        self._gemms_of_step = 0

    # --- the part of `FleetRuntime` common to all runtimes ---

    def counters(self) -> FleetCounters:
        """Return a snapshot of the counters."""
        done = self.manager.scheduler.counters
        return replace(
            self._counters,
            traffic=self._counters.traffic.snapshot(),
            saved=self._counters.saved.snapshot(),
            blocks=done.results,
            reissued=done.reissued + done.speculative + self.manager.stages.repeated,
            late=done.late,
        )

    @contextmanager
    def counting_tasks(self) -> Iterator[None]:
        """Count the tasks of a training step for `progress`."""
        self._gemms_before = before = self._counters.gemms
        try:
            yield
        finally:
            self._gemms_before = None
            self._gemms_of_step = self._counters.gemms - before

    def progress(self) -> StepProgress | None:
        """Return the progress of the current step, if any."""
        if (before := self._gemms_before) is None:
            return None
        if (tasks := self.manager.stages.tasks()) is not None:
            return StepProgress(*tasks)
        done = self._counters.gemms - before
        # A step may have more tasks than the last: another batch, or an interrupted last step.
        of = self._gemms_of_step if done <= self._gemms_of_step else 0
        return StepProgress(done, of) if done else None

    def device_count(self) -> int:
        """Return the number of devices that may be given work now."""
        return self.manager.ready_devices

    def stuck(self, future: GemmFuture) -> str:
        """Return why no device can finish a GEMM; see `FleetRuntime.stuck`."""
        return self.manager.scheduler.stuck(future.job.id) or self.manager.why_aside()

    def stage_devices(self) -> dict[int, DeviceRates]:
        """Return the rates of the devices that can run stages now."""
        able = self.manager.stages.able
        rates = [r for r in self.manager.scheduler.rates if r.device in able]
        # The scheduler's rates leave out memory that stages use; restore it here.
        return {r.device: replace(r, memory_bytes=able[r.device].memory_bytes) for r in rates}

    def why_no_stages(self) -> str:
        """Return why no device can train whole layers now; empty if one can."""
        return self.manager.stages.why_none()

    def fleet_rates(self) -> tuple[int, list[DeviceRates]]:
        """Return the fleet's epoch and the rates of the available devices."""
        return self.manager.epoch, self.manager.scheduler.rates

    # --- carrying out instructions ---

    @abstractmethod
    def now(self) -> float:
        """Return the time on the runtime's clock, in seconds."""

    @abstractmethod
    def send(self, session: int, message: Message, kind: TrafficKind) -> None:
        """Send a message and count its bytes under `kind`; do nothing if the device left."""

    @abstractmethod
    def end(self, session: int) -> None:
        """End a session after all queued messages have been sent."""

    @abstractmethod
    def conclude(self, job: int, error: str) -> None:
        """Record that a GEMM ended: complete, or with an error."""

    @abstractmethod
    def tell_step(self, outcome: StageOutcome, work: StepWork | None) -> None:
        """Store a step's outcome for `next_outcome`, unless another step has begun."""

    def tell(self, information: Information) -> None:
        """Pass information to observers of the fleet."""

    def place(self, task: Task, payload: Any) -> None:
        """Write a block into its job's output."""
        output = self._outputs.get(task.job)
        if output is not None:  # its job may have failed
            output.place(task.detail, payload)

    def check(self, check: Check) -> list[ForRuntime]:
        """Check a block; return the resulting instructions, empty while a long check runs."""
        future = self._futures.get(check.task.job)
        if future is None:  # the job has ended
            return self.checked(check, Judgement(), 0.0)
        return self.checked(check, *self.judge(check, future))

    def judge(self, check: Check, future: GemmFuture) -> tuple[Judgement, float]:
        """Return the judgement of a block and the CPU seconds that the check took."""
        began_s = time.thread_time()
        judgement = self._checks.judge(future, check.task, check.payload)
        return judgement, time.thread_time() - began_s

    def checked(self, check: Check, judgement: Judgement, took_s: float) -> list[ForRuntime]:
        """Report a check's outcome to the core; return the resulting instructions."""
        self._counters.verify_s += took_s
        if check.task.job not in self._futures:  # the job has ended
            self._checks.forget(check.task.job)
        return self.manager.checked(check, judgement, self.now())

    def execute(self, instructions: Iterable[ForRuntime]) -> None:
        """Carry out instructions, and those that result from them, in order."""
        waiting = list(instructions)
        for instruction in waiting:  # `waiting` grows in the loop
            match instruction:
                case Send() as asked:  # most frequent; attribute access is faster than a pattern
                    self.send(asked.session, asked.message, asked.kind)
                case Check() as check:
                    waiting.extend(self.check(check))
                case Place(task, payload):
                    self.place(task, payload)
                case Done(job):
                    self._checks.forget(job)
                    self.conclude(job, "")
                case Failed(job, reason):
                    self._checks.forget(job)
                    self.conclude(job, reason)
                case Close(session):
                    self.end(session)
                case TellStep(outcome, work):
                    self.tell_step(outcome, work)
                case Joined() | Overdue() | Aside() | Note() as information:
                    self.tell(information)

    def submit(self, future: GemmFuture) -> None:
        """Pass a GEMM to the core, in the thread that calls `execute`."""
        job = future.job
        self._futures[job.id] = future
        self._outputs[job.id] = self.output(future.out)
        a, b = future.a.operand.buffer, future.b.operand.buffer
        self.execute(self.manager.submit(job, a, b, self.now()))

    def output(self, out: Buffer) -> Placing:
        """Return the output object of a new product."""
        return Output(out)

    def count(self, future: GemmFuture) -> None:
        """Count a GEMM that is about to start."""
        self._count_floor(*floor_bytes(future))
        self._counters.gemms += 1

    def count_step(self, work: StepWork) -> None:
        """Count a step by stages that is about to start."""
        self._count_floor(*work.floor_bytes(DType(work.gradients).itemsize))

    def _count_floor(self, down_bytes: int, up_bytes: int) -> None:
        self._counters.floor_down_bytes += down_bytes
        self._counters.floor_up_bytes += up_bytes
