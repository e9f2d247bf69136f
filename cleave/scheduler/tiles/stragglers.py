"""Finds late and overdue devices by comparing elapsed times with predicted times."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from cleave.scheduler.tiles.gemm_job import GemmJob
from cleave.scheduler.tiles.load import DeviceLoad

OVERDUE_S: Final = 1.0
"""A job is overdue after this many seconds or `OVERDUE_SHARE` times its predicted time, whichever
is longer. A device is overdue if it has a running task of an overdue job and has answered nothing
for that long."""

OVERDUE_SHARE: Final = 2.0

SILENT_SHARE: Final = 0.25
"""A device is silent if it has returned nothing for longer than its blocks should take. If at most
this share of all devices is silent, the silent devices get help before they are overdue. If more
devices are silent, the server is slow or the prediction is wrong."""


@dataclass(frozen=True, slots=True)
class Late:
    """The late devices.

    Attributes:
        remaining_s: maps a late device to the seconds that it still needs at its pace so far;
            infinite for a silent device.
        overdue: devices that have just become overdue.
    """

    remaining_s: dict[int, float]
    overdue: list[int]


def find_stragglers(
    devices: Mapping[int, DeviceLoad],
    jobs: Mapping[int, GemmJob],
    since_s: Mapping[int, float],
    now_s: float,
) -> Late:
    """Return the late devices and the overdue devices.

    Args:
        devices: maps a device ID to the device's load.
        jobs: maps a job ID to the unfinished job.
        since_s: maps a job ID to the time from which its results are expected.
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
