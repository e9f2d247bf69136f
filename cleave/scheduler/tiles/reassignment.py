"""Choose, from predicted times, who takes over undone tasks and who helps late devices."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from cleave.scheduler.tiles.tasks import Task

WORTH_HELPING: Final = 0.8
"""A helper gets a task only if its predicted finish is within this share of the time that the first
device still needs. The share is below 1 because predictions err and duplicated work costs twice."""

_COMPARED: Final = 16

UnitSeconds = Callable[[int, Task], float]
"""A function that predicts the seconds of a task on a device."""


@dataclass(slots=True)
class Reassignment:
    """Tasks moved to other devices.

    Attributes:
        assigned: (device, task) pairs, in order.
        finish_s: predicted finish time of the last device, in seconds from now.
        unassigned: tasks that no device may take.
    """

    assigned: list[tuple[int, Task]] = field(default_factory=list)
    finish_s: float = 0.0
    unassigned: list[Task] = field(default_factory=list)


def reassign(
    tasks: Iterable[Task],
    remaining_s: Mapping[int, float],
    able: Callable[[int, Task], bool],
    task_s: UnitSeconds,
) -> Reassignment:
    """Assign every task to the device that is predicted to finish it first.

    Args:
        tasks: tasks to assign, in this order.
        remaining_s: by device, the seconds of work that it already has.
        able: returns whether a device may take a task.
        task_s: predicts the seconds of a task on a device.
    """
    takers = _Takers(remaining_s, able, task_s)
    found = Reassignment()
    for task in tasks:
        best = takers.best(task)
        if best is None:
            found.unassigned.append(task)
            continue
        takers.take(best)
        found.finish_s = max(found.finish_s, best[0])
        found.assigned.append((best[1], task))
    return found


def speculate(
    late: Mapping[int, Sequence[Task]],
    remaining_s: Mapping[int, float],
    helpers: Mapping[int, float],
    able: Callable[[int, Task], bool],
    task_s: UnitSeconds,
) -> list[tuple[int, int, Task]]:
    """Duplicate the last tasks of late devices on helpers; the first valid answer counts.

    Args:
        late: by late device, its unanswered tasks, in its order.
        remaining_s: by late device, the expected seconds for these tasks; may be infinite.
        helpers: by helper, the seconds of work that it already has.
        able: returns whether a helper may take a task.
        task_s: predicts the seconds of a task on a device.

    Returns:
        (late device, helper, task) for each duplicated task.
    """
    takers = _Takers(helpers, able, task_s)
    left = {device: list(tasks) for device, tasks in late.items() if tasks}
    share_s = {device: remaining_s[device] / len(tasks) for device, tasks in left.items()}
    queue = [(-remaining_s[device], device) for device in left]
    heapq.heapify(queue)
    found: list[tuple[int, int, Task]] = []
    while queue:
        needs_s, device = -queue[0][0], queue[0][1]
        task = left[device].pop()
        best = takers.best(task)
        if best is not None and best[0] > needs_s * WORTH_HELPING:
            left[device].clear()  # no other late device needs longer
        elif best is not None:
            takers.take(best)
            found.append((device, best[1], task))
            needs_s -= share_s[device] if math.isfinite(needs_s) else 0.0
        if left[device]:
            heapq.heapreplace(queue, (-needs_s, device))
        else:
            heapq.heappop(queue)
    return found


class _Takers:
    """A priority queue of devices by load, to find the one that would finish a task first.

    Only the least busy devices are compared; comparing all would take a large fleet too long.
    """

    def __init__(
        self,
        busy_s: Mapping[int, float],
        able: Callable[[int, Task], bool],
        task_s: UnitSeconds,
    ) -> None:
        self._queue = [(busy, device) for device, busy in busy_s.items()]
        heapq.heapify(self._queue)
        self._able = able
        self._task_s = task_s

    def best(self, task: Task) -> tuple[float, int] | None:
        """Return a task's earliest finish time and its device; None if no device may take it."""
        looked_at, found, compared = [], None, 0
        while self._queue and compared < _COMPARED:
            busy, device = heapq.heappop(self._queue)
            looked_at.append((busy, device))
            if found is not None and busy >= found[0]:
                break
            if self._able(device, task):
                compared += 1
                finish = (busy + self._task_s(device, task), device)
                found = finish if found is None else min(found, finish)
        for entry in looked_at:
            heapq.heappush(self._queue, entry)
        return found

    def take(self, taken: tuple[float, int]) -> None:
        """Add a task to the load of the device that `best` returned."""
        finish_s, device = taken
        self._queue = [entry for entry in self._queue if entry[1] != device]
        self._queue.append((finish_s, device))
        heapq.heapify(self._queue)
