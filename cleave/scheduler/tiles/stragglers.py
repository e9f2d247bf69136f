"""Which devices are late, and which are so late that they are overdue.

Pure decisions over predicted times; the scheduler acts on them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from cleave.scheduler.tiles.gemm_job import GemmJob
from cleave.scheduler.tiles.load import DeviceLoad

OVERDUE_S: Final = 1.0
"""A job is overdue when it has taken longer than this, and longer than `OVERDUE_SHARE` times the
prediction. So is a device that has a task of such a job and has not answered anything for that
long."""

OVERDUE_SHARE: Final = 2.0

SILENT_SHARE: Final = 0.25
"""If at most this share of the devices are silent for longer than their blocks should take, these
get help before they are overdue. If more are, the server or the prediction is slow."""


@dataclass(frozen=True, slots=True)
class Late:
    """Devices that are late.

    Attributes:
        remaining_s: by device, the seconds it still needs at the pace that it has shown; infinite
            for one that does not answer.
        overdue: devices that were not overdue before, and are now.
    """

    remaining_s: dict[int, float]
    overdue: list[int]


def find_stragglers(
    devices: Mapping[int, DeviceLoad],
    jobs: Mapping[int, GemmJob],
    since_s: Mapping[int, float],
    now_s: float,
) -> Late:
    """Return the devices that are late.

    Args:
        devices: by id, each with what it was given.
        jobs: by id, those that are not complete.
        since_s: by job, since when a result of it should have come.
        now_s: the time.
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
    """Return how long a job may take; a job that is not assigned yet may wait for ever."""
    if job.expected_s is None:
        return math.inf
    return max(OVERDUE_S, OVERDUE_SHARE * job.expected_s)


def _silent(
    devices: Mapping[int, DeviceLoad], jobs: Mapping[int, GemmJob], now_s: float
) -> list[int]:
    """Return devices that answered nothing for longer than any of their blocks should take.

    Return none if they are many; see `SILENT_SHARE`.
    """
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
