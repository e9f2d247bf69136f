"""What a device was given and how long that should take, as the scheduler keeps it."""

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
"""Base of the wait before a device that was overdue, and says that it is alive, is asked again. The
first time there is no wait, because only an answer may be lost; the second time in a row it is this
long, and then it about doubles each time."""

_MOST_DOUBLED: Final = 5


@dataclass(slots=True)
class DeviceLoad:
    """What a device was given, what it holds for that, and how long it should take.

    Attributes:
        rates: as last stated or measured.
        draining: it finishes what runs, and gets nothing new.
        overdue: it did not answer in time, and gets nothing new until it does.
        aside: nothing is planned for it; see `events.DeviceAside`.
        one_run: it is sent one run at a time until it has done one right.
        missed: how often it was overdue since it last answered.
        retry_s: when it may be asked again, if it is overdue.
        queue: tasks that it will be sent.
        running: tasks that it was sent, by run.
        held: arrays that it has, the least recently used first.
        needed: by array, how many queued and running tasks use it.
        occupied_bytes: bytes of the arrays held and of the results under way.
        forget, forget_bytes: dropped arrays that it has not been told of yet, and their size.
        since_s: when it was last idle.
        heard_s: when it last answered.
        sent_tasks, sent_bytes, sent_flops, asked_bytes: tasks that it was sent since it was idle,
            the bytes of their arrays, their FLOPs, and the bytes of their results, as all travels.
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
        """Say whether the device may be given work."""
        return not self.draining and not self.aside

    @property
    def has_turn(self) -> bool:
        """Say whether the device may be sent one more run now."""
        return len(self.running) < (1 if self.one_run else limits.MAX_RUNS_IN_FLIGHT)

    def drop(self, array: ArrayRef) -> None:
        """Drop an array; the device will be told with its next message."""
        del self.held[array.id]
        self.occupied_bytes -= array.nbytes
        self.forget.append(array.id)
        self.forget_bytes += array.nbytes

    def miss(self, now_s: float) -> None:
        """Note that the device is overdue, and set when to ask it again: later each time."""
        self.overdue = True
        self.missed += 1
        self.retry_s = now_s + RETRY_S * (2 ** min(self.missed - 1, _MOST_DOUBLED) - 1)

    def heard(self, now_s: float) -> bool:
        """Note that the device answered; return whether it was overdue until now."""
        self.heard_s, self.missed = now_s, 0
        was_overdue, self.overdue = self.overdue, False
        return was_overdue

    def asked(self, run: int, task: Task, array_bytes: int, now_s: float) -> None:
        """Note that the device is sent a task, with `array_bytes` bytes of arrays for it."""
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
        """Remove a run that was answered or cancelled; return its task, None for an unknown run."""
        task = self.running.pop(run, None)
        if task is not None:
            self.occupied_bytes -= task.output_bytes
        return task

    def sent_s(self) -> float:
        """Return the seconds predicted for everything that it was sent since it was idle."""
        rates = self.rates
        return 2 * rates.latency_s + streamed_s(
            self.sent_bytes / rates.downlink_bytes_per_s,
            self.sent_flops / rates.flops_per_s,
            self.asked_bytes / rates.uplink_bytes_per_s,
        )

    def remaining_s(self, now_s: float) -> float:
        """Return the seconds predicted, from now on, for everything that the device was given."""
        running_s = max(0.0, self.since_s + self.sent_s() - now_s) if self.running else 0.0
        return running_s + sum(self.task_s(task) for task in self.queue)

    def longest_silence_s(self, expected_s: float) -> float:
        """Return the longest predicted time between two of the device's answers, in seconds.

        Of a tile of p times p blocks that is sent as a wavefront, the first block is back after a
        p-th of the time, and the others follow sooner. But no block is back sooner than it takes
        alone, however many small ones came before it.

        Args:
            expected_s: the least time predicted for the device's jobs.
        """
        alone_s = max((self._alone_s(task) for task in self.running.values()), default=0.0)
        shared_s = max(self.sent_s(), expected_s) / math.sqrt(max(1, self.sent_tasks))
        return max(alone_s, shared_s)

    def _alone_s(self, task: Task) -> float:
        inputs = sum(array.nbytes for array in task.inputs)
        return self._task_s(task, inputs)

    def task_s(self, task: Task) -> float:
        """Return the seconds predicted for a task on this device, alone."""
        held, needed = self.held, self.needed
        missing = sum(a.nbytes for a in task.inputs if a.id not in held and a.id not in needed)
        return self._task_s(task, missing)

    def _task_s(self, task: Task, input_bytes: int) -> float:
        """Return the seconds predicted for a task whose inputs have so many plain bytes."""
        down_bytes = self.rates.down_bytes(input_bytes, task.input_ratio)
        up_bytes = self.rates.up_bytes(task.output_bytes, task.output_ratio)
        return tile_s(self.rates, down_bytes, task.flops, up_bytes)

    def pace_s(self, now_s: float) -> float:
        """Return the seconds that the device still needs, at the pace that it has shown so far."""
        left = len(self.running) + len(self.queue)
        answered = self.sent_tasks - len(self.running)
        return (now_s - self.since_s) * left / answered if answered > 0 else math.inf

    def unanswered(self) -> list[Task]:
        """Return the tasks that are not answered: those that were sent, then those queued."""
        return [*self.running.values(), *self.queue]
