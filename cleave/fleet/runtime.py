"""Runtimes: what carries out the instructions of the server's core.

A `Runtime` executes the instructions of a session manager for a fleet, and keeps the futures,
outputs and checks of its GEMMs. Two subclasses supply time and bytes: over real connections
(`cleave.server.runtime`), and in virtual time (`emulator.virtual`).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Protocol

import numpy as np

from cleave.arrays import Buffer, DType
from cleave.fleet.block_checks import BlockChecks
from cleave.fleet.product import GemmFuture, Output, floor_bytes
from cleave.planner.plan import DeviceRates
from cleave.protocol.messages import Message
from cleave.scheduler.gemm_job import GemmTask
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
from cleave.scheduler.session_manager import SessionManager
from cleave.scheduler.stage_arrays import StageArray
from cleave.scheduler.stage_outcomes import StageOutcome
from cleave.scheduler.stage_work import StepWork
from cleave.scheduler.tasks import Task
from cleave.scheduler.traffic import Traffic, TrafficKind
from cleave.verify import Judgement


@dataclass(slots=True)
class FleetCounters:
    """Counts what the fleet did since it was made; subtract two snapshots for a step.

    Attributes:
        fleet_s: seconds on the fleet's clock (virtual or wall) during which the training thread
            waited for GEMMs or a step by stages.
        waited_s: wall seconds during which it did.
        verify_s: processor seconds spent on checking results.
        traffic: bytes of encoded messages, by what they are for.
        saved: bytes that these would have been more without coding, likewise.
        floor_down_bytes, floor_up_bytes: bytes if every operand and every result of every GEMM were
            sent once, and of steps by stages what `StepWork.floor_bytes` says.
        gemms, tiles, blocks: planned GEMMs, their tiles, and blocks that came back.
        reissued: tasks given out again because a device was lost or failed, and passes of stages.
        late: answers that nobody waited for any more.
        local_gemms: GEMMs multiplied on the PS because no device was there.
    """

    fleet_s: float = 0.0
    waited_s: float = 0.0
    verify_s: float = 0.0
    traffic: Traffic = field(default_factory=Traffic)
    saved: Traffic = field(default_factory=Traffic)
    floor_down_bytes: int = 0
    floor_up_bytes: int = 0
    gemms: int = 0
    tiles: int = 0
    blocks: int = 0
    reissued: int = 0
    late: int = 0
    local_gemms: int = 0

    @property
    def downlink_bytes(self) -> int:
        """Return the bytes of all messages from the PS to devices."""
        return self.traffic.down.total

    @property
    def uplink_bytes(self) -> int:
        """Return the bytes of all messages from devices to the PS."""
        return self.traffic.up.total

    def __add__(self, more: FleetCounters) -> FleetCounters:
        return FleetCounters(
            **{f.name: getattr(self, f.name) + getattr(more, f.name) for f in fields(self)}
        )

    def __sub__(self, earlier: FleetCounters) -> FleetCounters:
        return FleetCounters(
            **{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)}
        )


class Placing(Protocol):
    """Puts the blocks of one product in place: `cleave.fleet.product.Output`, or one like it."""

    def place(self, task: GemmTask, payload: object) -> None:
        """Put one block in its place."""
        ...

    def finish(self) -> None:
        """Complete the product, once every block is there."""
        ...


@dataclass(frozen=True, slots=True)
class StepProgress:
    """How far a training step is.

    Attributes:
        done: tasks: multiplications that were begun; by stages, passes of micro-batches through
            stages, and stages whose gradients are here.
        of: how many there are; 0 if that is not known yet.
    """

    done: int
    of: int


Information = Joined | Overdue | Aside | Note
"""Instructions that only inform; nothing has to be done."""


class Runtime(ABC):
    """Carries out the core's instructions, and moves time and bytes for a fleet.

    Args:
        manager: the core whose instructions it carries out.
        rng: draws the secret vectors of all checks.
    """

    clock: ClassVar[str]
    """`virtual` or `wall`: the clock that `FleetCounters.fleet_s` counts on."""

    def __init__(self, manager: SessionManager, rng: np.random.Generator) -> None:
        self.manager = manager
        self._checks = BlockChecks(rng)
        self._futures: dict[int, GemmFuture] = {}
        self._outputs: dict[int, Placing] = {}
        self._counters = FleetCounters()
        self._gemms_before: int | None = None  # the step that is under way; None between steps
        self._gemms_of_step = 0

    # --- what a fleet asks for ---

    @abstractmethod
    def start(self, future: GemmFuture) -> None:
        """Start a GEMM, without waiting."""

    @abstractmethod
    def wait(self, future: GemmFuture, timeout_s: float | None = None) -> bool:
        """Return when the future is done, or after `timeout_s` seconds on the runtime's clock.

        Returns:
            Whether it is done.
        """

    @abstractmethod
    def wait_until(self, condition: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Return when a condition holds, or after `timeout_s` seconds on the runtime's clock.

        Returns:
            Whether it holds; False also where nothing is left that could happen.
        """

    @abstractmethod
    def withdraw(self, future: GemmFuture) -> None:
        """Withdraw a GEMM. Its future is then done: as withdrawn, or as it ended just before."""

    @abstractmethod
    def advance_for_local_work(self, flops: float) -> None:
        """Advance a virtual clock by the time that the caller's own work of `flops` takes."""

    @abstractmethod
    def begin_step(self, work: StepWork) -> None:
        """Start a training step by stages, without waiting."""

    @abstractmethod
    def give(self, batch: int, made: StageArray, after: int | None = None) -> None:
        """Go on with a micro-batch of that step with what the caller made of it.

        See `cleave.scheduler.stage_step.StageStep.give`.
        """

    @abstractmethod
    def next_outcome(self, timeout_s: float | None = None) -> StageOutcome | None:
        """Return what comes next of the step by stages; None if nothing does in time."""

    @abstractmethod
    def quarantine(self, device: int, reason: str) -> None:
        """End the sessions of a device whose work was found wrong, and keep it out."""

    @abstractmethod
    def withdraw_step(self) -> None:
        """End the step by stages, if any; devices keep what the next one can use."""

    @abstractmethod
    def end_steps(self) -> None:
        """End the step by stages, if any, and let devices forget what they hold for it."""

    @abstractmethod
    def release(self, operand: int) -> None:
        """Forget an operand. May be called from any thread, in any state."""

    @abstractmethod
    def close(self) -> None:
        """End all sessions."""

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
        """Count the tasks of a training step for `progress`; the next one has as many."""
        self._gemms_before = before = self._counters.gemms
        try:
            yield
        finally:
            self._gemms_before = None
            self._gemms_of_step = self._counters.gemms - before

    def progress(self) -> StepProgress | None:
        """Return how far the step is that is under way, if any. Any thread may call this."""
        if (before := self._gemms_before) is None:
            return None
        if (tasks := self.manager.stages.tasks()) is not None:
            return StepProgress(*tasks)
        done = self._counters.gemms - before
        # A step may have more than the one before: of another batch, or after an interruption.
        of = self._gemms_of_step if done <= self._gemms_of_step else 0
        return StepProgress(done, of) if done else None

    def device_count(self) -> int:
        """Return how many devices may be given work now."""
        return self.manager.ready_devices

    def stuck(self, future: GemmFuture) -> str:
        """Say why no connected device can finish a GEMM; empty if one can, or none is there."""
        return self.manager.scheduler.stuck(future.job.id)

    def stage_devices(self) -> dict[int, DeviceRates]:
        """Return the devices that can run stages and may be given work now, with their rates."""
        able = self.manager.stages.able
        rates = [r for r in self.manager.scheduler.rates if r.device in able]
        # Tiles may have less of their memory while stages hold something there.
        return {r.device: replace(r, memory_bytes=able[r.device].memory_bytes) for r in rates}

    def why_no_stages(self) -> str:
        """Say in a sentence why no device can train whole layers now; empty if one can."""
        return self.manager.stages.why_none()

    def fleet_rates(self) -> tuple[int, list[DeviceRates]]:
        """Return the fleet's epoch, and the rates of the devices that may be given work now."""
        return self.manager.epoch, self.manager.scheduler.rates

    # --- carrying out instructions ---

    @abstractmethod
    def now(self) -> float:
        """Return the time in seconds, on the runtime's clock."""

    @abstractmethod
    def send(self, session: int, message: Message, kind: TrafficKind) -> None:
        """Send a message, and count its bytes as of `kind`; do nothing if the device is gone."""

    @abstractmethod
    def end(self, session: int) -> None:
        """End a session, after everything that was queued for it has been sent."""

    @abstractmethod
    def conclude(self, job: int, error: str) -> None:
        """Note that a GEMM has ended: with every block in place, or with an error."""

    @abstractmethod
    def tell_step(self, outcome: StageOutcome, work: StepWork | None) -> None:
        """Keep what came of a step by stages for `next_outcome`, unless another has begun."""

    def tell(self, information: Information) -> None:  # noqa: B027 - nobody need be told
        """Pass information on to those who watch the fleet."""

    def place(self, task: Task, payload: Any) -> None:
        """Put a block in its place."""
        output = self._outputs.get(task.job)
        if output is not None:  # else its job has failed, and nobody waits for it
            output.place(task.detail, payload)

    def check(self, check: Check) -> list[ForRuntime]:
        """Check a block; return the instructions that follow, none yet if the check takes long."""
        future = self._futures.get(check.task.job)
        if future is None:  # nobody waits for it any more
            return self.checked(check, Judgement(), 0.0)
        return self.checked(check, *self.judge(check, future))

    def judge(self, check: Check, future: GemmFuture) -> tuple[Judgement, float]:
        """Return the judgement on a block, and the processor seconds that it took."""
        began_s = time.thread_time()
        judgement = self._checks.judge(future, check.task, check.payload)
        return judgement, time.thread_time() - began_s

    def checked(self, check: Check, judgement: Judgement, took_s: float) -> list[ForRuntime]:
        """Tell the core what a check found; return the instructions that follow."""
        self._counters.verify_s += took_s
        if check.task.job not in self._futures:  # it ended meanwhile
            self._checks.forget(check.task.job)
        return self.manager.checked(check, judgement, self.now())

    def execute(self, instructions: Iterable[ForRuntime]) -> None:
        """Carry out instructions, and those that follow from them, in order."""
        waiting = list(instructions)
        for instruction in waiting:  # which grows
            match instruction:
                case Send() as asked:  # most of them: unpacked faster than by a pattern
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
        """Hand a GEMM to the core, in the thread that `execute` is called in."""
        job = future.job
        self._futures[job.id] = future
        self._outputs[job.id] = self.output(future.out)
        a, b = future.a.operand.buffer, future.b.operand.buffer
        self.execute(self.manager.submit(job, a, b, self.now()))

    def output(self, out: Buffer) -> Placing:
        """Return where the blocks of a new product are put."""
        return Output(out)

    def count(self, future: GemmFuture) -> None:
        """Count a GEMM that is about to start."""
        self._count_floor(*floor_bytes(future))
        self._counters.gemms += 1

    def count_step(self, work: StepWork) -> None:
        """Count a step by stages that is about to start."""
        self._count_floor(*work.floor_bytes(DType(work.gradients).itemsize))

    def _count_floor(self, down_bytes: int, up_bytes: int) -> None:
        """Count the bytes if everything were sent once."""
        self._counters.floor_down_bytes += down_bytes
        self._counters.floor_up_bytes += up_bytes
