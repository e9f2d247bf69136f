"""A queue of training jobs that run one at a time. Clients can follow a job's records."""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import count
from typing import Any, Protocol

from cleave.errors import CleaveError, UsageError, unknown
from cleave.fleet.fleet import Fleet
from cleave.scheduler.sessions.session import EventKind
from cleave.server.store.job_history import (
    LEFT_BY_SERVER,
    JobHistory,
    how_to_continue,
    wait_said,
)
from cleave.server.store.store import StoredJob

Record = dict[str, Any]

_logger = logging.getLogger(__name__)


class JobState(Enum):
    """State of a job. Users see the enum values."""

    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    DONE = "done"
    STOPPED = "stopped"
    FAILED = "failed"


FINAL_STATES = (JobState.DONE, JobState.STOPPED, JobState.FAILED)

_REACHED = ("start", "step")  # values of `event` of records that name the last completed step
_LAST_EVENTS = ("end", "stopped", "failed")  # values of `event` that mark the last record of a job


@dataclass
class TrainingJob:
    """A training job of this server, and its records."""

    id: str  # `job-` and the number
    number: int
    arguments: Mapping[str, Any]  # the submitted request, which the runner interprets
    steps: int  # total number of optimizer steps
    model: str
    started_s: float | None = None  # Unix time of the last start; None before the first
    state: JobState = JobState.QUEUED
    waits: str = ""  # what the job waits for, as a sentence; empty if it does not wait
    run_folder: str = ""  # empty until known
    method: str = ""  # the setting `method` of the running job; empty until known
    pauses: bool = False  # whether an operator asked the job to pause
    left_by_server: bool = False  # whether the server ends before the job
    finished: bool = False  # whether the job has completed its last step
    continues: str = ""  # where a resumed job continues, as a clause; empty if not resumed
    after: int = 0  # the step after which a resumed job continues
    place: int = 0  # orders the queued jobs; a new number each time the job is queued
    records: list[Record] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)  # set to stop after a step
    followers: list[Callable[[], None]] = field(default_factory=list)  # called after new records

    @property
    def step(self) -> int:
        """Return the last completed step, which may be a step of the run that the job resumes."""
        reached = (r["step"] for r in reversed(self.records) if r.get("event") in _REACHED)
        return next(reached, self.after)

    @property
    def is_due(self) -> bool:
        """Return whether the job is queued. If it is not, its queue entries are outdated."""
        return self.state is JobState.QUEUED

    @property
    def is_running(self) -> bool:
        """Return whether the job is running. A running job may be waiting for devices."""
        return self.state is JobState.RUNNING

    @property
    def has_last_record(self) -> bool:
        """Return whether the last record has been added. `state` becomes final earlier."""
        return (
            self.state in FINAL_STATES
            and bool(self.records)
            and self.records[-1].get("event") in _LAST_EVENTS
        )


class Runner(Protocol):
    """Interface for running training jobs, so that the server need not import training code.

    All methods raise CleaveError for errors that the user can correct.
    """

    def check(self, arguments: Mapping[str, Any]) -> tuple[str, int]:
        """Validate a job's arguments. Return the job's model and total number of steps."""

    def resumes_after(self, run_folder: str) -> tuple[int, int]:
        """Return the step of a run's newest checkpoint, and the run's last step. 0 for none."""

    def check_pause(self, arguments: Mapping[str, Any]) -> None:
        """Raise CleaveError if a job with these arguments cannot continue after a pause."""

    def run(
        self,
        arguments: Mapping[str, Any],
        fleet: Fleet,
        report: Callable[[Record], None],
        stop: Callable[[], bool],
    ) -> None:
        """Run a job until it is complete, or until `stop` returns True after a step."""


class Jobs:
    """The queue of a server's jobs, which run one after another in a separate thread.

    Args:
        history: stores jobs across restarts of the server.
        listener: called in any thread when a job changes state, or starts or stops waiting.
        clock: returns Unix time, in seconds.
    """

    def __init__(
        self,
        fleet: Fleet,
        runner: Runner,
        history: JobHistory,
        listener: Callable[[EventKind, str], None] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._fleet = fleet
        self._runner = runner
        self._jobs: dict[str, TrainingJob] = {}
        self._history = history
        self._tell_listener = listener or (lambda kind, text: None)
        self._clock = clock
        self._numbers = count(history.next_number)
        self._places = count(1)
        self._lock = threading.Lock()
        self._turn = threading.Lock()  # held while a job starts, or is asked to stop or pause
        self._queue: queue.SimpleQueue[TrainingJob | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="cleave-training", daemon=True)
        self._thread.start()

    def submit(self, arguments: Mapping[str, Any]) -> TrainingJob:
        """Queue a new job. Raise CleaveError if it is invalid or shares a queued job's name."""
        model, steps = self._runner.check(arguments)
        name = arguments.get("name")
        for other in self.all() if name else ():
            if other.is_due and other.arguments.get("name") == name:
                raise UsageError(
                    f"{other.id}, which is queued, already has the name {name!r}; choose another "
                    "name"
                )
        with self._lock:
            number = next(self._numbers)
            job = TrainingJob(f"job-{number}", number, arguments, steps, model)
            self._jobs[job.id] = job
        self._history.submitted(number, job.model, arguments, steps)
        self._tell_listener(EventKind.JOB, f"{job.id} ({job.model}) queued")
        self._put(job)
        return job

    def _put(self, job: TrainingJob) -> None:
        with self._lock:
            job.place = next(self._places)
            self._queue.put(job)

    def ahead(self, job: TrainingJob) -> list[TrainingJob]:
        """Return the running job and the jobs queued before `job`; empty if `job` is not queued."""
        if not job.is_due:
            return []
        others = [
            other
            for other in self.all()
            if other.is_running or (other.is_due and other.place < job.place)
        ]
        return sorted(others, key=lambda other: (not other.is_running, other.place))

    def stop(self, id: str) -> TrainingJob:
        """Ask a job to stop, and return the job.

        A running job first completes its current step and writes a checkpoint.
        """
        job = self.find(id)
        with self._turn:
            job.pauses = False
            job.stop.set()
            if job.state in (JobState.PAUSED, JobState.QUEUED):
                when = "while it was paused" if job.state is JobState.PAUSED else "before it began"
                self._enter(job, JobState.STOPPED)
                self._report(job, {"event": "stopped", "text": f"stopped {when}"})
        return job

    def pause(self, id: str) -> TrainingJob:
        """Ask a job to pause until `resume` is called. Return the job.

        A running job writes a checkpoint after its current step. Then the next queued job starts.
        """
        job = self.find(id)
        with self._turn:
            if job.state is JobState.RUNNING:
                self._runner.check_pause(job.arguments)
                job.pauses = True
                job.stop.set()
            elif job.state is JobState.QUEUED:
                self._rest(job)
            elif job.state is not JobState.PAUSED:
                raise UsageError(
                    f"{id} is {job.state.value}; only jobs that have not ended can be paused"
                )
        return job

    def resume(self, id: str) -> TrainingJob:
        """Queue a paused, stopped or failed job again, and return the job.

        Unfinished jobs of an earlier server process can also be resumed.
        """
        id = f"job-{id}" if id.isdigit() else id
        with self._lock:
            job = self._jobs.get(id)
        if job is None:
            job = self._left_behind(id)
        elif job.state in (JobState.QUEUED, JobState.RUNNING):
            so = "about to pause; try again once it is paused" if job.pauses else "not paused"
            raise UsageError(f"{id} is {job.state.value} and {so}")
        elif job.state is JobState.DONE:
            again = f"cleave train --resume {job.run_folder} --steps N"
            raise UsageError(f"{id} is done; to train further, use `{again}`")
        job.after = done = 0
        if job.run_folder:
            job.arguments = _going_on(job.run_folder)
        self._runner.check(job.arguments)  # the run folder may have been deleted
        if run := job.run_folder or job.arguments.get("resume"):
            job.after, done = self._runner.resumes_after(str(run))
        after = f"it continues after step {job.after:,}"
        job.continues = after if job.after else "it starts at step 1"
        if done > job.after:
            job.continues += f", so the steps up to {done:,} are repeated"
        job.stop, job.pauses, job.waits = threading.Event(), False, ""
        job.left_by_server = False
        with self._lock:
            self._jobs[id] = job
            if job.records and job.records[-1].get("event") in _LAST_EVENTS:
                # New followers must not mistake this record for the job's last record.
                job.records[-1] = {"event": "note", "text": f"was {job.state.value}; continues"}
        self._enter(job, JobState.QUEUED)
        self._put(job)
        return job

    def resume_unfinished(self) -> None:
        """Queue the jobs that earlier servers left unfinished, and log where they continue."""
        for past in self._history.left_unfinished():
            try:
                job = self.resume(f"job-{past.number}")
                _logger.info("%s is queued again; %s", job.id, job.continues)
            except CleaveError as error:
                _logger.warning("job-%d is not resumed: %s", past.number, error)

    def _left_behind(self, id: str) -> TrainingJob:
        """Recreate an earlier process's unfinished job from its run folder or its request."""
        for past in self._history.all():
            if id != f"job-{past.number}" or past.state == JobState.DONE.value:
                continue
            if past.run_folder or past.request:
                going_on = bool(past.run_folder)
                arguments = _going_on(past.run_folder) if going_on else json.loads(past.request)
                _, steps = self._runner.check(arguments)
                job = TrainingJob(id, past.number, arguments, steps, past.model)
                job.run_folder = past.run_folder
                return job
        self.find(id)  # raises an error that states the reason
        raise UsageError(f"{id} cannot be resumed")

    def _rest(self, job: TrainingJob) -> None:
        """Mark a job as paused, and report how to resume it."""
        self._enter(job, JobState.PAUSED)
        text = f"paused; continue with: cleave jobs resume {job.id}"
        self._report(job, {"event": "note", "text": text})
        job.waits = text

    def find(self, id: str) -> TrainingJob:
        """Return job `id` (`job-3` or `3`). Raise UsageError if this process has no such job."""
        id = f"job-{id}" if id.isdigit() else id
        with self._lock:
            if id in self._jobs:
                return self._jobs[id]
        for past in self._history.all():
            if id == f"job-{past.number}":
                where = f"; its records are in {past.run_folder}" if past.run_folder else ""
                raise UsageError(f"{id} ended ({past.state}) before this server was started{where}")
        raise unknown("job", id, [f"job-{past.number}" for past in self._history.all()])

    def all(self) -> list[TrainingJob]:
        """Return all jobs that this process has queued, oldest first."""
        with self._lock:
            return list(self._jobs.values())

    def earlier(self) -> list[StoredJob]:
        """Return the jobs of earlier server processes that this process has not resumed."""
        with self._lock:
            return [job for job in self._history.all() if f"job-{job.number}" not in self._jobs]

    @property
    def running(self) -> TrainingJob | None:
        return next((job for job in self.all() if job.state is JobState.RUNNING), None)

    def close(self, timeout_s: float) -> None:
        """Ask all jobs to stop, and wait up to `timeout_s` seconds for the running job to end."""
        with self._turn:
            for job in self.all():
                job.left_by_server = not job.stop.is_set()  # otherwise, an operator stopped the job
                job.stop.set()
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            with self._turn:
                if not job.is_due:
                    continue
                if job.stop.is_set():  # the server is closing; the job stays queued in the store
                    text = (
                        f"the server stopped before the job began; when the server runs again, "
                        f"continue with: cleave jobs resume {job.id}"
                    )
                    self._report(job, {"event": "stopped", "text": text})
                    continue
                self._enter(job, JobState.RUNNING)
            _logger.info("%s started: %s", job.id, job.model)
            self._train(job)
            level = logging.ERROR if job.state is JobState.FAILED else logging.INFO
            _logger.log(level, "%s %s", job.id, job.state.value)

    def _train(self, job: TrainingJob) -> None:
        """Run a job until it ends or pauses, and report the outcome."""
        try:
            report = partial(self._report, job)
            self._runner.run(job.arguments, self._fleet, report, job.stop.is_set)
            if job.pauses and not job.finished:
                self._rest(job)
                return
            stopped = job.stop.is_set() and not job.finished
            why = f"{LEFT_BY_SERVER}; {how_to_continue(job.number)}" if job.left_by_server else ""
            self._enter(job, *((JobState.STOPPED, why) if stopped else (JobState.DONE, "")))
            final: Record = {"event": "end", "state": job.state.value}
        except CleaveError as error:
            self._enter(job, JobState.FAILED, str(error))
            final = {"event": "failed", "text": str(error), "exit_code": error.exit_code}
        except Exception as error:  # noqa: BLE001 - a job's bug must not end the server
            text = f"unexpected {type(error).__name__}: {error}"
            self._enter(job, JobState.FAILED, text)
            final = {"event": "failed", "text": text, "exit_code": 1}
        self._report(job, final)

    def _enter(self, job: TrainingJob, state: JobState, reason: str = "") -> None:
        """Set a job's state, notify the listener, and store the new state."""
        if state is JobState.RUNNING:
            job.started_s = self._clock()
        job.state = state
        why = f": {reason}" if reason else ""
        self._tell_listener(EventKind.JOB, f"{job.id} ({job.model}) {state.value}{why}")
        self._history.changed(job.number, state.value, reason)

    def _report(self, job: TrainingJob, record: Record) -> None:
        """Add a record to a job, update the job's attributes, and wake the job's followers."""
        self._history.reported(job.number, record)
        if (waits := wait_said(record)) is not None:
            job.waits = waits
        match record.get("event"):
            case "start":
                job.run_folder = str(record.get("run_folder", ""))
                job.method = str(record.get("method", ""))
            case "done":
                job.finished = not record.get("stopped")
            case "fleet":
                self._tell_listener(EventKind.PAUSE, str(record["text"]))
            case "disk" | "servers":
                self._tell_listener(EventKind.PAUSE, str(record["text"]))
                level = logging.WARNING if job.waits else logging.INFO
                _logger.log(level, "%s: %s", job.id, record["text"])
            case event if event in _LAST_EVENTS:
                job.waits = ""
        with self._lock:
            job.records.append(record)
            followers = list(job.followers)
        for wake in followers:
            wake()

    def follow(self, job: TrainingJob, wake: Callable[[], None]) -> None:
        """Register `wake` to be called after each new record, in the reporting thread."""
        with self._lock:
            job.followers.append(wake)

    def unfollow(self, job: TrainingJob, wake: Callable[[], None]) -> None:
        """Unregister `wake`, which `follow` registered."""
        with self._lock:
            job.followers.remove(wake)


def _going_on(run_folder: str) -> dict[str, Any]:
    """Return arguments that resume a run folder's job, or restart it if no checkpoint exists."""
    return {"job": {}, "resume": run_folder, "begin": True}
