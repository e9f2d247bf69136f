"""A server's past and present jobs, which are saved in the store."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from cleave.server.store.store import Store, StoredJob
from cleave.server.store.writer import StoreWriter

STEPS_WRITTEN_S: Final = 5.0
"""Minimum time between two writes of a running job's progress to the store."""

_UNFINISHED: Final = ("queued", "running")
_INTERRUPTED: Final = "interrupted"


_WAITING: Final = {"fleet": "absent", "disk": "full", "servers": "waiting"}
"""Maps each `event` about waiting to the `state` that means that the job waits."""


def wait_said(record: Mapping[str, Any]) -> str | None:
    """Return the reason why a job waits, according to a record.

    The reason is empty if the job continues, and None if the record is not about waiting.
    """
    waiting = _WAITING.get(record.get("event", ""))
    if waiting is None:
        return None
    return str(record.get("text", "")) if record.get("state") == waiting else ""


LEFT_BY_SERVER: Final = "the server ended before the job did"
"""Start of the reason stored for a job that was unfinished when its server ended."""


def how_to_continue(number: int) -> str:
    """Return the advice for a job that can be resumed."""
    return f"continue with `cleave jobs resume job-{number}`"


def as_without_server(job: StoredJob) -> StoredJob:
    """Return `job`, with state `interrupted` if the server stopped before the job ended."""
    if job.state not in _UNFINISHED:
        return job
    if job.run_folder or job.request:
        how = how_to_continue(job.number)
    else:
        how = "the job had not begun; submit it again"
    reason = f"{LEFT_BY_SERVER}; {how}"
    return replace(job, state=_INTERRUPTED, reason=reason, ended_s=None)


def with_successors(jobs: Sequence[StoredJob]) -> list[StoredJob]:
    """Return `jobs`, oldest first. If a later job resumed a job's run, `reason` names that job."""
    latest = {os.path.abspath(job.run_folder): job.number for job in jobs if job.run_folder}
    found = []
    for job in jobs:
        later = latest[os.path.abspath(job.run_folder)] if job.run_folder else job.number
        if later != job.number and job.reason.startswith(LEFT_BY_SERVER):
            job = replace(job, reason=f"job-{later} resumed its run")
        found.append(job)
    return found


class JobHistory:
    """A server's job history. Unfinished jobs of an earlier process become `interrupted`."""

    def __init__(self, store: Store, writer: StoreWriter, clock: Callable[[], float]) -> None:
        self._store = store
        self._writer = writer
        self._clock = clock
        self._lock = threading.Lock()
        self._jobs = {job.number: job for job in store.jobs()}
        self._written_s: dict[int, float] = {}
        self.interrupted = [
            as_without_server(job) for job in self._jobs.values() if job.state in _UNFINISHED
        ]
        for job in self.interrupted:
            self._keep(job)

    @property
    def next_number(self) -> int:
        """Return the number for the next job. Job numbers are never reused."""
        return max(self._jobs, default=0) + 1

    def all(self) -> list[StoredJob]:
        """Return all past and present jobs, oldest first."""
        with self._lock:
            return with_successors([self._jobs[number] for number in sorted(self._jobs)])

    def left_unfinished(self) -> list[StoredJob]:
        """Return the jobs that earlier servers left unfinished. Started jobs come first.

        Omit jobs that an operator stopped or paused, and jobs whose run a later job resumed.
        """
        left = [job for job in self.all() if job.reason.startswith(LEFT_BY_SERVER)]
        return sorted(left, key=lambda job: (job.started_s is None, job.number))

    def submitted(
        self, number: int, model: str, request: Mapping[str, Any], steps_in_all: int
    ) -> None:
        """Record that a new job was queued."""
        now_s, asked = self._clock(), json.dumps(request)
        self._keep(
            StoredJob(number, model, "queued", "", now_s, request=asked, steps_in_all=steps_in_all)
        )

    def changed(self, number: int, state: str, reason: str = "") -> None:
        """Record a job's new state, and the reason for the state."""
        job, now_s = self._jobs[number], self._clock()
        started_s = now_s if state == "running" else job.started_s
        ended_s = None if state in _UNFINISHED else now_s
        self._keep(replace(job, state=state, reason=reason, started_s=started_s, ended_s=ended_s))

    def reported(self, number: int, record: Mapping[str, Any]) -> None:
        """Update a job's run folder, last step, loss and reason for waiting from a new record."""
        job = self._jobs[number]
        if (waits := wait_said(record)) is not None:
            job = replace(job, reason=waits)
        begins = "run_folder" in record and not job.run_folder
        if "run_folder" in record:
            job = replace(job, run_folder=str(record["run_folder"]))
        if record.get("event") == "start":
            job = replace(job, steps=int(record["step"]))
        if record.get("event") == "step":
            loss = float(record["loss"])  # NaN and infinity are stored as None
            job = replace(
                job, steps=int(record["step"]), loss=loss if math.isfinite(loss) else None
            )
        if job == self._jobs[number]:
            return
        now_s = self._clock()
        if begins or now_s - self._written_s.get(number, 0.0) >= STEPS_WRITTEN_S:
            self._written_s[number] = now_s
            self._keep(job)
        else:
            with self._lock:
                self._jobs[number] = job  # written to the store with a later change

    def _keep(self, job: StoredJob) -> None:
        with self._lock:
            self._jobs[job.number] = job
        self._writer.owe(("job", job.number), lambda: self._store.save_job(job))
