"""The base class of the runtimes that execute the instructions of a `SessionManager`.

The session manager makes all decisions but performs no I/O. The base class has subclasses in
`cleave.server.runtime` (wall time, network connections) and in `emulator.virtual` (virtual time,
emulated devices).
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from cleave.arrays import Buffer, DType, unpack
from cleave.fleet.fleet_runtime import FleetRuntime
from cleave.fleet.product import GemmFuture, Output
from cleave.gemm import wavefront
from cleave.planner.plan import DeviceRates
from cleave.protocol.messages import Message
from cleave.scheduler.counters import FleetCounters, StepProgress, TrafficKind
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
from cleave.scheduler.rounds.work import RoundResult, RoundWork
from cleave.scheduler.sessions.session_manager import SessionManager
from cleave.scheduler.stages.arrays import StageArray
from cleave.scheduler.stages.outcomes import StageOutcome
from cleave.scheduler.stages.work import StepWork
from cleave.scheduler.tiles.tasks import GemmTask, Task
from cleave.verify import GemmCheck, Judgement, Projector


class BlockChecks:
    """Verifies the result blocks of all running GEMMs. Not thread-safe.

    `rng` generates the secret vectors. The seed of `rng` must come from the operating system.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._project = Projector()
        self._checks: dict[int, GemmCheck] = {}

    def judge(self, future: GemmFuture, task: Task, payload: object) -> Judgement:
        """Verify one result block and return the verdict. `payload` is a `Buffer` or raw bytes."""
        check = self._checks.get(future.job.id)
        if check is None:
            plan = future.job.plan
            assert plan is not None
            blocks = (block for tile in plan.tiles for block in wavefront(tile.cut))
            a, b = future.a.matrix, future.b.matrix
            check = GemmCheck(a, b, blocks, self._rng, self._project)
            self._checks[future.job.id] = check
        detail, block = task.gemm, task.gemm.block
        if not isinstance(payload, Buffer):
            assert isinstance(payload, bytes | memoryview)
            payload = unpack(payload, block.m.size, block.n.size, DType(detail.out))
        return check.judge(block, payload)

    def forget(self, job: int) -> None:
        """Free the verification state of a GEMM that has ended."""
        self._checks.pop(job, None)


class Placing(Protocol):
    """Interface for writing result blocks into the output matrix of one GEMM."""

    def place(self, task: GemmTask, payload: object) -> None: ...
    def finish(self) -> None: ...


Information = Joined | Overdue | Aside | Note
"""Instructions that only notify observers of the fleet."""


class Runtime(FleetRuntime):
    """Base class that executes a session manager's instructions.

    Subclasses provide the clock and the connections. `rng` generates the secret vectors for the
    verification of results.
    """

    def __init__(self, manager: SessionManager, rng: np.random.Generator) -> None:
        self.manager = manager
        self._checks = BlockChecks(rng)
        self._futures: dict[int, GemmFuture] = {}
        self._outputs: dict[int, Placing] = {}
        self._counters = FleetCounters()
        # Number of GEMMs started before the current training step; None between steps.
        self._gemms_before: int | None = None
        self._gemms_of_step = 0

    # --- the part of `FleetRuntime` common to all runtimes ---

    def counters(self) -> FleetCounters:
        done = self.manager.scheduler.counters
        return replace(
            self._counters,
            traffic=self._counters.traffic.snapshot(),
            saved=self._counters.saved.snapshot(),
            blocks=done.results + self.manager.stages.results + self.manager.rounds.results,
            reissued=done.reissued + done.speculative + self.manager.stages.repeated,
            late=done.late,
        )

    @contextmanager
    def counting_tasks(self) -> Iterator[None]:
        self._gemms_before = before = self._counters.gemms
        try:
            yield
        finally:
            self._gemms_before = None
            self._gemms_of_step = self._counters.gemms - before

    def progress(self) -> StepProgress | None:
        if (before := self._gemms_before) is None:
            return None
        if (tasks := self.manager.stages.tasks()) is not None:
            return StepProgress(*tasks)
        done = self._counters.gemms - before
        # A step has more GEMMs than the previous step if, for example, the previous step was
        # interrupted.
        of = self._gemms_of_step if done <= self._gemms_of_step else 0
        return StepProgress(done, of) if done else None

    def device_count(self) -> int:
        return self.manager.ready_devices

    def stuck(self, future: GemmFuture) -> str:
        return self.manager.scheduler.stuck(future.job.id) or self.manager.why_aside()

    @property
    def state_leaves(self) -> bool:
        return bool(self.manager.stages.holders.leaving)

    def stage_devices(self) -> dict[int, DeviceRates]:
        able = self.manager.stages.able
        rates = [r for r in self.manager.scheduler.rates if r.device in able]
        # The scheduler's rates exclude the memory that stages use. Add it back.
        return {r.device: replace(r, memory_bytes=able[r.device].memory_bytes) for r in rates}

    def own_devices(self) -> Set[int]:
        return {s.id for s in list(self.manager.sessions.values()) if s.here}

    def why_no_stages(self) -> str:
        return self.manager.stages.why_none()

    def fleet_rates(self) -> tuple[int, list[DeviceRates]]:
        return self.manager.epoch, self.manager.scheduler.rates

    # --- changes of the current step by stages, see `FleetRuntime` ---

    @abstractmethod
    def change_step(self, change: Callable[..., list[ForRuntime]], *arguments: object) -> None:
        """Call a method of the session manager with `arguments` and the current time."""

    def renew(self, arrays: Mapping[StageArray, StageArray]) -> None:
        self.change_step(self.manager.renew, arrays)

    def give(self, batch: int, made: StageArray, after: int | None = None) -> None:
        self.change_step(self.manager.give, batch, made, after)

    def begin_snapshot(self, work: StepWork, position: int) -> None:
        self.change_step(self.manager.begin_snapshot, work, position)

    def update(self, scalars: Sequence[StageArray]) -> None:
        self.change_step(self.manager.update, scalars)

    def resolve(self, right: bool, reason: str) -> None:
        self.change_step(self.manager.resolve, right, reason)

    def withdraw_step(self) -> None:
        self.change_step(self.manager.withdraw_step)

    def end_steps(self) -> None:
        self.change_step(self.manager.end_steps)

    # --- execution of instructions ---

    @abstractmethod
    def now(self) -> float:
        """Return the current time on the runtime's clock in seconds."""

    @abstractmethod
    def send(self, session: int, message: Message, kind: TrafficKind) -> None:
        """Send a message to a device, or drop the message if the device has left.

        The size of the message counts as traffic of kind `kind`.
        """

    @abstractmethod
    def end(self, session: int) -> None:
        """End a session after all queued messages of the session have been sent."""

    @abstractmethod
    def conclude(self, job: int, error: str) -> None:
        """Record the end of a GEMM and wake the thread that waits for the GEMM.

        `error` is the reason why the GEMM failed; empty on success.
        """

    @abstractmethod
    def tell_step(
        self, outcome: StageOutcome | RoundResult, work: StepWork | RoundWork | None
    ) -> None:
        """Make `next_outcome` return an outcome, unless the outcome's step has been abandoned."""

    def tell(self, information: Information) -> None:
        """Notify the fleet's observers of an event. The base class does nothing."""

    def place(self, task: Task, payload: Any) -> None:
        """Write a result block into the output of the task's GEMM."""
        output = self._outputs.get(task.job)
        if output is not None:  # None if the GEMM has failed
            output.place(task.gemm, payload)

    def check(self, check: Check) -> list[ForRuntime]:
        """Verify a result block and return the instructions that follow from the verdict.

        The list is empty if a subclass verifies the block in the background.
        """
        future = self._futures.get(check.task.job)
        if future is None:  # the GEMM has ended
            return self.checked(check, Judgement(), 0.0)
        return self.checked(check, *self.judge(check, future))

    def judge(self, check: Check, future: GemmFuture) -> tuple[Judgement, float]:
        """Verify a result block of a running GEMM. Return the verdict and the CPU seconds used."""
        began_s = time.thread_time()
        judgement = self._checks.judge(future, check.task, check.payload)
        return judgement, time.thread_time() - began_s

    def checked(self, check: Check, judgement: Judgement, took_s: float) -> list[ForRuntime]:
        """Report the verdict on a result block to the manager. Return the manager's instructions.

        `took_s` is the CPU time of the verification in seconds.
        """
        self._counters.verify_s += took_s
        if check.task.job not in self._futures:  # the GEMM has ended
            self._checks.forget(check.task.job)
        return self.manager.checked(check, judgement, self.now())

    def execute(self, instructions: Iterable[ForRuntime]) -> None:
        """Execute instructions in order, followed by the instructions that result from them."""
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
        """Submit a GEMM to the session manager. Call this in the thread that calls `execute`."""
        job = future.job
        self._futures[job.id] = future
        self._outputs[job.id] = self.output(future.out)
        a, b = future.a.operand.buffer, future.b.operand.buffer
        self.execute(self.manager.submit(job, a, b, self.now()))

    def output(self, out: Buffer) -> Placing:
        """Return an object that assembles the result blocks of a new GEMM in `out`."""
        return Output(out)

    def count(self, future: GemmFuture) -> None:
        """Add a new GEMM and the size of its operands and result to the fleet's counters."""
        self._counters.gemms += 1
        operands = future.a.operand, future.b.operand
        self._counters.floor_down_bytes += sum(operand.buffer.nbytes for operand in operands)
        self._counters.floor_up_bytes += future.out.nbytes

    def count_step(self, work: StepWork) -> None:
        """Add the minimum traffic of a new step by stages to the fleet's counters."""
        down_bytes, up_bytes = work.floor_bytes(DType(work.gradients).itemsize)
        self._counters.floor_down_bytes += down_bytes
        self._counters.floor_up_bytes += up_bytes
