"""Detect late devices and choose the devices that take over or duplicate their tasks."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from cleave.scheduler.tiles.gemm_job import GemmJob
from cleave.scheduler.tiles.load import DeviceLoad
from cleave.scheduler.tiles.tasks import Task

# A helper must finish within this share of the late device's remaining time. Predictions are
# inaccurate, and a duplicated task uses two devices.
WORTH_HELPING: Final = 0.8
_COMPARED: Final = 16

UnitSeconds = Callable[[int, Task], float]  # predicts a task's seconds on a device


@dataclass(slots=True)
class Reassignment:
    """The result of assigning tasks to other devices."""

    assigned: list[tuple[int, Task]] = field(default_factory=list)  # (device, task) pairs, in order
    finish_s: float = 0.0  # predicted seconds from now until the last device finishes
    unassigned: list[Task] = field(default_factory=list)  # tasks that no device can run


def reassign(
    tasks: Iterable[Task],
    remaining_s: Mapping[int, float],
    able: Callable[[int, Task], bool],
    task_s: UnitSeconds,
) -> Reassignment:
    """Assign each task to the device that is predicted to finish it first.

    Args:
        remaining_s: maps a device to the predicted remaining time of its tasks, in seconds.
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
    """Choose tasks of late devices to duplicate on helpers, starting with each device's last task.

    Args:
        late: maps a late device to its unanswered tasks, in the device's order.
        remaining_s: maps a late device to the predicted time of these tasks, in seconds; infinite
            if unknown.
        helpers: maps a helper to the predicted remaining time of its tasks, in seconds.

    Returns:
        (late device, helper, task) for each task to duplicate.
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
            left[device].clear()  # the other late devices need less time
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
    """A priority queue that finds the device that would finish a task first.

    Only the least loaded devices are compared, because comparing a large fleet takes too long.
    """

    def __init__(
        self, busy_s: Mapping[int, float], able: Callable[[int, Task], bool], task_s: UnitSeconds
    ) -> None:
        self._queue = [(busy, device) for device, busy in busy_s.items()]
        heapq.heapify(self._queue)
        self._able = able
        self._task_s = task_s

    def best(self, task: Task) -> tuple[float, int] | None:
        """Find the device that is predicted to finish a task first.

        Return the predicted seconds from now until the task finishes, and the device. Return
        None if no device can run the task.
        """
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
        """Add a task to a device's load. `taken` is the pair that `best` returned for the task."""
        finish_s, device = taken
        self._queue = [entry for entry in self._queue if entry[1] != device]
        self._queue.append((finish_s, device))
        heapq.heapify(self._queue)


# A job is overdue after this time or `OVERDUE_SHARE` times its predicted time, whichever is longer.
# A device is overdue if it runs a task of an overdue job and has been silent for as long.
OVERDUE_S: Final = 1.0
OVERDUE_SHARE: Final = 2.0

# A device is silent if it has returned nothing for longer than its blocks should take. Silent
# devices get help early if they are at most this share of all devices. If more are silent, the
# server is slow or the prediction is wrong.
SILENT_SHARE: Final = 0.25


@dataclass(frozen=True, slots=True)
class Late:
    """The late devices, and the devices that have just become overdue.

    Attributes:
        remaining_s: maps a late device to the time in seconds that its unanswered tasks need at its
            pace so far; infinite for a silent device.
    """

    remaining_s: dict[int, float]
    overdue: list[int]


def find_stragglers(
    devices: Mapping[int, DeviceLoad],
    jobs: Mapping[int, GemmJob],
    since_s: Mapping[int, float],
    now_s: float,
) -> Late:
    """Find the late devices, and the devices that have just become overdue.

    Args:
        since_s: maps a job ID to the time in seconds from which the job's results are expected.
    """
    limits_s = {id: _limit_s(job) for id, job in jobs.items()}
    limits_s = {id: s for id, s in limits_s.items() if now_s - since_s[id] > s}
    late = Late(dict.fromkeys(_silent(devices, jobs, now_s), math.inf), [])
    for device_id, device in devices.items() if limits_s else ():
        waited_for = {u.job for u in device.unanswered()} & limits_s.keys()
        if not waited_for:
            continue
        sofar_s = late.remaining_s.get(device_id, 0.0)
        late.remaining_s[device_id] = max(sofar_s, device.pace_s(now_s))
        if now_s - device.heard_s > max(limits_s[job] for job in waited_for):
            late.remaining_s[device_id] = math.inf
            if not device.overdue and device.running:
                late.overdue.append(device_id)
    return late


def _limit_s(job: GemmJob) -> float:
    """Return the seconds after which a job is overdue; infinite if the job is not assigned."""
    if job.expected_s is None:
        return math.inf
    return max(OVERDUE_S, OVERDUE_SHARE * job.expected_s)


def _silent(
    devices: Mapping[int, DeviceLoad], jobs: Mapping[int, GemmJob], now_s: float
) -> list[int]:
    """Return the silent devices; empty if more than `SILENT_SHARE` of all devices are silent."""
    silent = []
    for device_id, device in devices.items():
        for_s = now_s - device.heard_s
        if for_s <= OVERDUE_S or not device.running:
            continue
        asked = (jobs.get(task.job) for task in device.running.values())
        expected_s = max((w.expected_s or math.inf for w in asked if w is not None), default=0)
        if for_s > max(OVERDUE_S, OVERDUE_SHARE * device.longest_silence_s(expected_s)):
            silent.append(device_id)
    return silent if len(silent) <= SILENT_SHARE * len(devices) else []
