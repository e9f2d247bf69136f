"""A device's assigned tasks, and predictions of how long they take."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from typing import Final

from cleave.planner.plan import DeviceRates, tile_s
from cleave.protocol import limits
from cleave.scheduler.tiles.tasks import ArrayRef, Task

# Wait in seconds before a device that is overdue for the second time in a row, but sends
# heartbeats, gets tasks. The first wait is 0, because perhaps only an answer was lost. Later waits
# roughly double.
RETRY_S: Final = 2.0
_MOST_DOUBLED: Final = 5


@dataclass(slots=True)
class DeviceLoad:
    """A device's tasks, the arrays that the device holds, and its predicted timing.

    Attributes:
        sent_tasks, sent_flops: number and FLOPs of the tasks sent since `since_s`.
        sent_bytes, asked_bytes: predicted encoded size of these tasks' inputs and results.
    """

    rates: DeviceRates
    # the device gets no new tasks, and leaves once its runs in flight are answered
    draining: bool = False
    overdue: bool = False  # the device missed a deadline and gets no new tasks until it answers
    aside: bool = False  # the device is excluded from plans; see `events.DeviceAside`
    one_run: bool = False  # the device gets one run at a time until it returns a correct result
    missed: int = 0  # number of times the device became overdue since its last answer
    retry_s: float = 0.0  # earliest time at which an overdue device may get tasks again
    queue: deque[Task] = field(default_factory=deque)  # tasks that have not been sent
    running: dict[int, Task] = field(default_factory=dict)  # maps a run in flight to its task
    # arrays on the device, least recently used first
    held: OrderedDict[int, ArrayRef] = field(default_factory=OrderedDict)
    # maps an array to the number of queued and running tasks that use it
    needed: Counter[int] = field(default_factory=Counter)
    occupied_bytes: int = 0  # bytes of the arrays on the device and of the results in flight
    # IDs of dropped arrays about which the device has not been told
    forget: list[int] = field(default_factory=list)
    forget_bytes: int = 0
    since_s: float = 0.0  # time when the device was last sent a task while no run was in flight
    heard_s: float = 0.0  # time of the device's last answer, or `since_s` if that is later
    sent_tasks: int = 0
    sent_bytes: float = 0.0
    sent_flops: int = 0
    asked_bytes: float = 0.0

    @property
    def id(self) -> int:
        """Return the device's session ID."""
        return self.rates.device

    @property
    def present(self) -> bool:
        """Return whether the device is available for tasks."""
        return not self.draining and not self.aside

    @property
    def has_turn(self) -> bool:
        """Return whether another run may be sent to the device now."""
        return len(self.running) < (1 if self.one_run else limits.MAX_RUNS_IN_FLIGHT)

    def drop(self, array: ArrayRef) -> None:
        """Remove an array from the device's record. The drop message is sent later."""
        del self.held[array.id]
        self.occupied_bytes -= array.nbytes
        self.forget.append(array.id)
        self.forget_bytes += array.nbytes

    def miss(self, now_s: float) -> None:
        """Mark the device as overdue. Consecutive misses lengthen its wait for new tasks."""
        self.overdue = True
        self.missed += 1
        self.retry_s = now_s + RETRY_S * (2 ** min(self.missed - 1, _MOST_DOUBLED) - 1)

    def heard(self, now_s: float) -> bool:
        """Record an answer from the device. Return whether the device was overdue."""
        self.heard_s, self.missed = now_s, 0
        was_overdue, self.overdue = self.overdue, False
        return was_overdue

    def asked(self, run: int, task: Task, array_bytes: int, now_s: float) -> None:
        """Record that a task is sent to the device, with `array_bytes` bytes of new inputs."""
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
        """Remove an answered or cancelled run. Return its task, or None if the run is unknown."""
        task = self.running.pop(run, None)
        if task is not None:
            self.occupied_bytes -= task.output_bytes
        return task

    def sent_s(self) -> float:
        """Return the predicted time of the tasks sent since `since_s`, in seconds."""
        return tile_s(self.rates, self.sent_bytes, self.sent_flops, self.asked_bytes)

    def remaining_s(self, now_s: float) -> float:
        """Return the predicted time until all queued and running tasks finish, in seconds."""
        running_s = max(0.0, self.since_s + self.sent_s() - now_s) if self.running else 0.0
        return running_s + sum(self.task_s(task) for task in self.queue)

    def longest_silence_s(self, expected_s: float) -> float:
        """Return the longest predicted time between two consecutive answers, in seconds.

        If a tile of p × p blocks is sent in wavefront order, the first block is returned after 1/p
        of the tile's time, and later blocks follow at shorter intervals. No block is returned
        faster than a single block on an idle device.

        Args:
            expected_s: a lower bound on the predicted time of the running tasks, in seconds.
        """
        alone_s = max(
            (
                self._task_s(task, sum(array.nbytes for array in task.inputs))
                for task in self.running.values()
            ),
            default=0.0,
        )
        shared_s = max(self.sent_s(), expected_s) / math.sqrt(max(1, self.sent_tasks))
        return max(alone_s, shared_s)

    def task_s(self, task: Task) -> float:
        """Return the time in seconds that a task is predicted to need if the device is idle."""
        held, needed = self.held, self.needed
        missing = sum(a.nbytes for a in task.inputs if a.id not in held and a.id not in needed)
        return self._task_s(task, missing)

    def _task_s(self, task: Task, input_bytes: int) -> float:
        """Return a task's predicted time in seconds if it needs `input_bytes` of new inputs."""
        down_bytes = self.rates.down_bytes(input_bytes, task.input_ratio)
        up_bytes = self.rates.up_bytes(task.output_bytes, task.output_ratio)
        return tile_s(self.rates, down_bytes, task.flops, up_bytes)

    def pace_s(self, now_s: float) -> float:
        """Return the time in seconds that the unanswered tasks need at the pace since `since_s`.

        The time is infinite if no task has been answered.
        """
        left = len(self.running) + len(self.queue)
        answered = self.sent_tasks - len(self.running)
        return (now_s - self.since_s) * left / answered if answered > 0 else math.inf

    def unanswered(self) -> list[Task]:
        """Return the tasks without a result: first the running tasks, then the queued tasks."""
        return [*self.running.values(), *self.queue]
