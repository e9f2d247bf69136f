"""A device's assigned work and its predicted duration, as the scheduler tracks them."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from typing import Final

from cleave.planner.plan import DeviceRates
from cleave.planner.tiles.cost import streamed_s, tile_s
from cleave.protocol import limits
from cleave.scheduler.tiles.tasks import ArrayRef, Task

RETRY_S: Final = 2.0
"""Base of the wait before an overdue device that reports being alive gets work again. The first
time there is no wait, because only an answer may be lost. The second time in a row the wait is this
long, and then it about doubles each time."""

_MOST_DOUBLED: Final = 5


@dataclass(slots=True)
class DeviceLoad:
    """A device's tasks, the arrays it holds, and how long its work should take.

    Attributes:
        rates: rates as last stated or measured.
        draining: the device finishes its runs and gets no new work.
        overdue: the device did not answer in time, and gets no new work until it does.
        aside: nothing is planned for the device; see `events.DeviceAside`.
        one_run: the device gets one run at a time until it returns a correct result.
        missed: number of times the device was overdue since its last answer.
        retry_s: if overdue, the time when the device may get work again.
        queue: tasks not sent yet.
        running: tasks in flight, by run.
        held: arrays on the device, least recently used first.
        needed: by array, the number of queued and running tasks that use it.
        occupied_bytes: bytes of held arrays and of results in flight.
        forget, forget_bytes: dropped arrays that the device was not told about yet, and their size.
        since_s: time when the device was last idle.
        heard_s: time of the device's last answer.
        sent_tasks, sent_bytes, sent_flops, asked_bytes: tasks sent since the device was idle, the
            bytes of their arrays, their FLOPs, and the bytes of their results; bytes as they
            travel.
    """

    rates: DeviceRates
    draining: bool = False
    overdue: bool = False
    aside: bool = False
    one_run: bool = False
    missed: int = 0
    retry_s: float = 0.0
    queue: deque[Task] = field(default_factory=deque)
    running: dict[int, Task] = field(default_factory=dict)
    held: OrderedDict[int, ArrayRef] = field(default_factory=OrderedDict)
    needed: Counter[int] = field(default_factory=Counter)
    occupied_bytes: int = 0
    forget: list[int] = field(default_factory=list)
    forget_bytes: int = 0
    since_s: float = 0.0
    heard_s: float = 0.0
    sent_tasks: int = 0
    sent_bytes: float = 0.0
    sent_flops: int = 0
    asked_bytes: float = 0.0

    @property
    def id(self) -> int:
        """Return the device's id."""
        return self.rates.device

    @property
    def present(self) -> bool:
        """Return whether the device may be given work."""
        return not self.draining and not self.aside

    @property
    def has_turn(self) -> bool:
        """Return whether the device may be sent another run now."""
        return len(self.running) < (1 if self.one_run else limits.MAX_RUNS_IN_FLIGHT)

    def drop(self, array: ArrayRef) -> None:
        """Drop an array. The device is told later."""
        del self.held[array.id]
        self.occupied_bytes -= array.nbytes
        self.forget.append(array.id)
        self.forget_bytes += array.nbytes

    def miss(self, now_s: float) -> None:
        """Mark the device as overdue, and set its retry time: a longer wait each time."""
        self.overdue = True
        self.missed += 1
        self.retry_s = now_s + RETRY_S * (2 ** min(self.missed - 1, _MOST_DOUBLED) - 1)

    def heard(self, now_s: float) -> bool:
        """Record an answer; return whether the device was overdue."""
        self.heard_s, self.missed = now_s, 0
        was_overdue, self.overdue = self.overdue, False
        return was_overdue

    def asked(self, run: int, task: Task, array_bytes: int, now_s: float) -> None:
        """Record that a task and `array_bytes` bytes of new arrays are sent to the device."""
        if not self.running:
            self.since_s = self.heard_s = now_s
            self.sent_tasks = self.sent_flops = 0
            self.sent_bytes = self.asked_bytes = 0.0
        self.sent_tasks += 1
        self.sent_bytes += self.rates.down_bytes(array_bytes, task.input_ratio)
        self.sent_flops += task.flops
        self.asked_bytes += self.rates.up_bytes(task.output_bytes, task.output_ratio)
        self.running[run] = task
        self.occupied_bytes += task.output_bytes

    def ended(self, run: int) -> Task | None:
        """Remove an answered or cancelled run; return its task, or None if the run is unknown."""
        task = self.running.pop(run, None)
        if task is not None:
            self.occupied_bytes -= task.output_bytes
        return task

    def sent_s(self) -> float:
        """Return the predicted seconds for everything sent since the device was idle."""
        rates = self.rates
        return 2 * rates.latency_s + streamed_s(
            self.sent_bytes / rates.downlink_bytes_per_s,
            self.sent_flops / rates.flops_per_s,
            self.asked_bytes / rates.uplink_bytes_per_s,
        )

    def remaining_s(self, now_s: float) -> float:
        """Return the predicted seconds, from now, for all queued and running tasks."""
        running_s = max(0.0, self.since_s + self.sent_s() - now_s) if self.running else 0.0
        return running_s + sum(self.task_s(task) for task in self.queue)

    def longest_silence_s(self, expected_s: float) -> float:
        """Return the longest predicted time between two of the device's answers, in seconds.

        When a tile of p times p blocks is sent as a wavefront, the first block is back after 1/p of
        the time, and the others follow faster. No block is back faster than it takes alone.

        Args:
            expected_s: a lower bound for the predicted seconds of the running tasks.
        """
        alone_s = max((self._alone_s(task) for task in self.running.values()), default=0.0)
        shared_s = max(self.sent_s(), expected_s) / math.sqrt(max(1, self.sent_tasks))
        return max(alone_s, shared_s)

    def _alone_s(self, task: Task) -> float:
        inputs = sum(array.nbytes for array in task.inputs)
        return self._task_s(task, inputs)

    def task_s(self, task: Task) -> float:
        """Return the predicted seconds for a task on this device, alone."""
        held, needed = self.held, self.needed
        missing = sum(a.nbytes for a in task.inputs if a.id not in held and a.id not in needed)
        return self._task_s(task, missing)

    def _task_s(self, task: Task, input_bytes: int) -> float:
        """Return the predicted seconds for a task with `input_bytes` uncompressed bytes to send."""
        down_bytes = self.rates.down_bytes(input_bytes, task.input_ratio)
        up_bytes = self.rates.up_bytes(task.output_bytes, task.output_ratio)
        return tile_s(self.rates, down_bytes, task.flops, up_bytes)

    def pace_s(self, now_s: float) -> float:
        """Return the seconds that the device still needs at its pace so far."""
        left = len(self.running) + len(self.queue)
        answered = self.sent_tasks - len(self.running)
        return (now_s - self.since_s) * left / answered if answered > 0 else math.inf

    def unanswered(self) -> list[Task]:
        """Return the unanswered tasks: those in flight, then those queued."""
        return [*self.running.values(), *self.queue]
