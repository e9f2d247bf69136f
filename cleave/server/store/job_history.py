"""What is remembered of jobs: written to the store as they go."""

from __future__ import annotations

import math
import shlex
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from cleave.server.store.store import Store, StoredJob
from cleave.server.store.writer import StoreWriter

STEPS_WRITTEN_S: Final = 5.0
"""How often the progress of a running job is written."""

_UNFINISHED: Final = ("queued", "running")
_INTERRUPTED: Final = "interrupted"


def as_without_server(job: StoredJob) -> StoredJob:
    """A job as it is where no server runs that could be at it."""
    if job.state not in _UNFINISHED:
        return job
    if job.run_folder:
        how = f"go on with `cleave train --server URL --resume {shlex.quote(job.run_folder)}`"
    else:
        how = "it had not begun; submit it again"
    reason = f"the server ended before the job did; {how}"
    return replace(job, state=_INTERRUPTED, reason=reason, ended_s=None)


class JobHistory:
    """Follows the jobs of a server. Any thread may call it.

    Args:
        store: where they are remembered.
        ledger: whose thread writes.
        clock: Unix time, in seconds.

    Attributes:
        interrupted: the jobs that were running or queued when the server before was killed.
    """

    def __init__(self, store: Store, writer: StoreWriter, clock: Callable[[], float]) -> None:
        self._store = store
        self._ledger = writer
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
        """The number of the next job: none is ever used twice."""
        return max(self._jobs, default=0) + 1

    def all(self) -> list[StoredJob]:
        """Every job, oldest first."""
        with self._lock:
            return [self._jobs[number] for number in sorted(self._jobs)]

    def submitted(self, number: int, model: str) -> None:
        """A job was queued."""
        now_s = self._clock()
        self._keep(StoredJob(number, model, "queued", "", now_s, None, None, 0, None, ""))

    def changed(self, number: int, state: str, reason: str = "") -> None:
        """A job is in another state."""
        job, now_s = self._jobs[number], self._clock()
        started_s = now_s if state == "running" else job.started_s
        ended_s = None if state in _UNFINISHED else now_s
        self._keep(replace(job, state=state, reason=reason, started_s=started_s, ended_s=ended_s))

    def reported(self, number: int, record: Mapping[str, Any]) -> None:
        """A job reported a record."""
        job = self._jobs[number]
        begins = "run_folder" in record and not job.run_folder
        if "run_folder" in record:
            job = replace(job, run_folder=str(record["run_folder"]))
        if record.get("event") == "step":
            loss = float(record["loss"])  # what is no number is none in the store either
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
                self._jobs[number] = job  # written with what comes next

    def _keep(self, job: StoredJob) -> None:
        with self._lock:
            self._jobs[job.number] = job
        self._ledger.owe(("job", job.number), lambda: self._store.save_job(job))
