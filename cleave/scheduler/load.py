"""What a device was given and how long that should take: the scheduler's account of it."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from typing import Final

from cleave.planner.cost import streamed_s, tile_s
from cleave.planner.plan import DeviceRates
from cleave.protocol import limits
from cleave.scheduler.tasks import ArrayRef, Task

RETRY_S: Final = 2.0
"""A device that was overdue, and says that it is there, is asked again: at once the first time, for
an answer may be lost, after so long the second time in a row, then after twice as long."""

_MOST_DOUBLED: Final = 5


@dataclass(slots=True)
class DeviceLoad:
    """What a device was given, what it holds for that, and how long it should take.

    Attributes:
        rates: as last stated or measured.
        draining: it finishes what runs, and gets nothing new.
        overdue: it did not answer in time, and gets nothing new until it does.
        aside: nothing is planned for it; see `events.DeviceAside`.
        one_run: it is sent one run at a time until it did one right.
        missed: how often it was overdue since it answered last.
        retry_s: when it may be asked again, then.
        queue: tasks that it will be sent.
        running: tasks that it was sent, by run.
        held: arrays that it has, the least recently used first.
        needed: by array, how many queued and running tasks use it.
        occupied_bytes: arrays held and results under way.
        forget, forget_bytes: dropped arrays, to be told with the next one.
        since_s: when it was idle last.
        heard_s: when it answered last.
        sent_units, sent_bytes, sent_flops, asked_bytes: what it was sent since it was idle.
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
    sent_units: int = 0
    sent_bytes: int = 0
    sent_flops: int = 0
    asked_bytes: int = 0

    @property
    def id(self) -> int:
        """Of the device."""
        return self.rates.device

    @property
    def present(self) -> bool:
        """Whether it may be given work."""
        return not self.draining and not self.aside

    @property
    def has_turn(self) -> bool:
        """Whether it may be sent one more run now."""
        return len(self.running) < (1 if self.one_run else limits.MAX_RUNS_IN_FLIGHT)

    def drop(self, array: ArrayRef) -> None:
        """It is to forget an array, and will be told with the next message."""
        del self.held[array.id]
        self.occupied_bytes -= array.nbytes
        self.forget.append(array.id)
        self.forget_bytes += array.nbytes

    def miss(self, now_s: float) -> None:
        """It is overdue, and asked again ever later, for what waits for it waits in vain."""
        self.overdue = True
        self.missed += 1
        self.retry_s = now_s + RETRY_S * (2 ** min(self.missed - 1, _MOST_DOUBLED) - 1)

    def heard(self, now_s: float) -> bool:
        """It answered; returns whether it was overdue until now."""
        self.heard_s, self.missed = now_s, 0
        was_overdue, self.overdue = self.overdue, False
        return was_overdue

    def asked(self, run: int, task: Task, array_bytes: int, now_s: float) -> None:
        """It is sent a task, and so many bytes of arrays for it."""
        if not self.running:
            self.since_s = self.heard_s = now_s
            self.sent_units = self.sent_bytes = self.sent_flops = self.asked_bytes = 0
        self.sent_units += 1
        self.sent_bytes += array_bytes
        self.sent_flops += task.flops
        self.asked_bytes += task.output_bytes
        self.running[run] = task
        self.occupied_bytes += task.output_bytes

    def ended(self, run: int) -> Task | None:
        """It answered a run, or need not any more; None for a run that it does not have."""
        task = self.running.pop(run, None)
        if task is not None:
            self.occupied_bytes -= task.output_bytes
        return task

    def sent_s(self) -> float:
        """What it needs for all that it was sent since it was idle, predicted."""
        rates = self.rates
        return 2 * rates.latency_s + streamed_s(
            self.sent_bytes / rates.downlink_bytes_per_s,
            self.sent_flops / rates.flops_per_s,
            self.asked_bytes / rates.uplink_bytes_per_s,
        )

    def remaining_s(self, now_s: float) -> float:
        """What it needs for all that it was given, predicted, from now on."""
        running_s = max(0.0, self.since_s + self.sent_s() - now_s) if self.running else 0.0
        return running_s + sum(self.task_s(task) for task in self.queue)

    def longest_silence_s(self, expected_s: float) -> float:
        """How long it may be between two of its answers: of a tile of p times p blocks that goes
        out as a wavefront, the first comes after a p-th of the time, and others sooner; but none
        sooner than it takes alone, however many small ones went before.

        Args:
            expected_s: what its jobs take at least, predicted.
        """
        alone_s = max((self._alone_s(task) for task in self.running.values()), default=0.0)
        shared_s = max(self.sent_s(), expected_s) / math.sqrt(max(1, self.sent_units))
        return max(alone_s, shared_s)

    def _alone_s(self, task: Task) -> float:
        inputs = sum(array.nbytes for array in task.inputs)
        return tile_s(self.rates, inputs, task.flops, task.output_bytes)

    def task_s(self, task: Task) -> float:
        """What a task takes on it, alone, predicted."""
        held, needed = self.held, self.needed
        missing = sum(a.nbytes for a in task.inputs if a.id not in held and a.id not in needed)
        return tile_s(self.rates, missing, task.flops, task.output_bytes)

    def pace_s(self, now_s: float) -> float:
        """What it needs for all that it was given at the pace that it showed so far."""
        left = len(self.running) + len(self.queue)
        answered = self.sent_units - len(self.running)
        return (now_s - self.since_s) * left / answered if answered > 0 else math.inf

    def unanswered(self) -> list[Task]:
        """What it was given, in its order."""
        return [*self.running.values(), *self.queue]
