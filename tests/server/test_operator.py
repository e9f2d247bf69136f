"""An operator's session, over a link in memory."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cleave.errors import UsageError
from cleave.protocol import messages
from cleave.protocol.codec import decode, encode
from cleave.protocol.messages import ErrorCode, Message, Role
from cleave.scheduler.counters import StepProgress
from cleave.scheduler.sessions.admission import AccessLevel
from cleave.scheduler.sessions.session import EventKind
from cleave.server.api import operator
from cleave.server.api.operator import OperatorSessions
from cleave.server.api.overview import Question
from cleave.server.jobs.jobs import Jobs
from cleave.server.store.job_history import JobHistory
from cleave.server.store.store import Store
from cleave.server.store.writer import StoreWriter
from cleave.transport.connection import Connection, ConnectionLostError
from tests.integration.processes import until
from tests.memory_link import memory_link
from tests.server.clocks import Clock
from tests.server.test_overview import Fleet, overview_of

PATIENCE_S = 60.0
HELLO = messages.Hello(role=Role.OPERATOR)
SUBMIT = messages.Request(1, "submit", {"job": {"model": "opt-tiny"}})


class Runner:
    """Reports one record, and trains until told to stop."""

    def __init__(self, record: dict[str, Any]) -> None:
        self.record = record
        self.ends = threading.Event()

    def check(self, arguments: Mapping[str, Any]) -> tuple[str, int]:
        return "opt-tiny", 1

    def check_pause(self, arguments: Mapping[str, Any]) -> None:
        pass

    def run(self, arguments: Any, fleet: Any, report: Any, stop: Any) -> None:
        report(self.record)
        assert self.ends.wait(PATIENCE_S)


@pytest.fixture
def runner() -> Runner:
    return Runner({"event": "note", "text": "preparing"})


@pytest.fixture
def jobs(runner: Runner, history: JobHistory) -> Iterator[Jobs]:
    jobs = Jobs(None, runner, history)  # type: ignore[arg-type]
    yield jobs
    runner.ends.set()
    jobs.close(PATIENCE_S)


async def heard(link: Connection) -> Message:
    return decode(await link.receive())


async def said(link: Connection, message: Message) -> None:
    await link.send(encode(message))


async def followed(jobs: Jobs, server: Any = None) -> tuple[Connection, asyncio.Task[None]]:
    """An operator who has submitted a job; and its session on the server."""
    sessions = OperatorSessions()
    sessions.jobs, sessions.server = jobs, server
    link, there = memory_link()
    session = asyncio.create_task(sessions.serve(there, HELLO, AccessLevel.OPERATOR))
    assert isinstance(await heard(link), messages.Welcome)
    await said(link, SUBMIT)
    reply = await heard(link)
    assert isinstance(reply, messages.Reply)
    assert reply.ok
    return link, session


def in_time(scenario: Any) -> None:
    asyncio.run(asyncio.wait_for(scenario, PATIENCE_S))


Read = Callable[[], JobHistory]


@pytest.fixture
def read(tmp_path: Path) -> Iterator[Read]:
    """Return a function that reads what is known of jobs, as a server does that starts again."""
    with closing(Store(tmp_path / "cleave.db")) as store:
        writer = StoreWriter(store, time.time)

        def read() -> JobHistory:
            writer.flush()
            return JobHistory(store, writer, time.time)

        yield read
        writer.close()


def test_a_job_that_had_not_begun_goes_on_when_the_server_is_started_again(read: Read) -> None:
    runner, wanted = Runner({"event": "note"}), {"job": {"model": "opt-tiny"}, "name": "night"}
    jobs = Jobs(None, runner, read())  # type: ignore[arg-type]
    first = jobs.submit({"job": {"model": "opt-tiny"}})
    until(lambda: first.is_running)
    jobs.pause(jobs.submit(wanted).id)
    jobs.submit(wanted)
    with pytest.raises(UsageError, match="job-3, which is queued, already has the name 'night'"):
        jobs.submit(wanted)
    later = read()  # as after SIGKILL
    assert [job.state for job in later.all()] == ["interrupted", "paused", "interrupted"]
    again = Jobs(None, Runner({"event": "note"}), later)  # type: ignore[arg-type]
    clock = Clock()
    overview = overview_of(Fleet(clock), clock)
    overview.jobs = again
    rows = overview.answer(Question())["jobs"]
    assert [(row["job"], row["state"], row["earlier"]) for row in rows] == [
        ("job-1", "interrupted", True),
        ("job-2", "paused", True),
        ("job-3", "interrupted", True),
    ]
    for number in (2, 3):
        assert again.resume(f"{number}").arguments == wanted
    assert [row["earlier"] for row in overview.answer(Question())["jobs"]] == [True, False, False]
    runner.ends.set()
    for each in (jobs, again):
        each.close(0.0)


class Trainer(Runner):
    """Does two steps, of which the first has a checkpoint, and trains until told to stop."""

    folder = "runs/a"

    def run(self, arguments: Any, fleet: Any, report: Any, stop: Any) -> None:
        report({"event": "start", "step": 0, "steps": 9, "run_folder": self.folder})
        report({"event": "step", "step": 2, "loss": 1.0})
        until(lambda: stop() or self.ends.is_set())

    def resumes_after(self, run_folder: str) -> tuple[int, int]:
        assert run_folder == self.folder
        return 1, 2


def test_a_server_continues_what_the_last_one_left_unfinished(
    read: Read, caplog: pytest.LogCaptureFixture
) -> None:
    """Not what an operator stopped, nor a run that another job continues."""

    def begun() -> Jobs:
        return Jobs(None, Trainer({}), read())  # type: ignore[arg-type]

    wanted = {"job": {"model": "opt-tiny"}}
    jobs = begun()
    stopped = jobs.submit(wanted)
    until(lambda: stopped.run_folder)
    jobs.stop(stopped.id)
    until(lambda: stopped.has_last_record)
    with pytest.raises(UsageError, match="no job 'job-9'; use one of job-1"):
        jobs.stop("9")
    running = jobs.submit(wanted)
    until(lambda: len(running.records) == 2)
    jobs.submit(wanted)
    jobs.close(PATIENCE_S)
    assert running.records[-1] == {"event": "end", "state": "stopped"}

    again = begun()
    assert [job.number for job in again._history.left_unfinished()] == [2, 3]
    with caplog.at_level("INFO", "cleave"):
        again.resume_unfinished()
    assert [job.id for job in again.all()] == ["job-2", "job-3"]
    where = "it continues after step 1, so the steps up to 2 are repeated"
    assert again.find("2").continues == where
    assert f"job-2 is queued again; {where}" in caplog.text
    assert again.find("3").continues == "it starts at step 1"
    with pytest.raises(UsageError, match="no job 'job-9'; use one of job-1, job-2, job-3"):
        again.stop("9")
    until(lambda: again.find("2").is_running)
    again.close(PATIENCE_S)

    newer = begun()
    continued = newer.submit({**wanted, "resume": Trainer.folder})
    until(lambda: continued.run_folder)
    newer.close(PATIENCE_S)
    last = begun()
    last.resume_unfinished()
    assert [job.id for job in last.all()] == ["job-4", "job-3"]
    assert last.earlier()[1].reason == "job-4 resumed its run"
    last.close(PATIENCE_S)


def test_a_job_that_resumes_a_run_and_has_not_begun_says_where_it_continues(
    history: JobHistory,
) -> None:
    jobs = Jobs(None, Trainer({}), history)  # type: ignore[arg-type]
    wanted = {"job": {"model": "opt-tiny"}}
    running = jobs.submit(wanted)
    until(lambda: running.is_running)
    jobs.pause(jobs.submit({**wanted, "resume": Trainer.folder}).id)
    resumed = jobs.resume("2")
    assert resumed.continues.startswith("it continues after step 1, so")
    overview = overview_of(Fleet(clock := Clock()), clock)
    overview.jobs = jobs
    assert resumed.step == overview.answer(Question())["jobs"][1]["step"] == 1
    resumed.records.append({"event": "start", "step": 3})  # after a choice of --restart, 0
    assert overview.answer(Question(job="job-2"))["job"]["step"] == 3
    history.reported(2, {"event": "start", "step": 3, "run_folder": Trainer.folder})
    assert history.all()[1].steps == 3
    jobs.close(PATIENCE_S)


def test_who_submits_is_told_what_the_job_waits_for(jobs: Jobs) -> None:
    first = jobs.submit({"job": {"model": "opt-tiny"}})

    async def scenario() -> None:
        link, session = await followed(jobs)  # job-2
        await asyncio.to_thread(until, lambda: first.is_running)
        jobs.submit({"job": {"model": "opt-tiny"}})
        jobs.pause("job-2")
        jobs.resume("job-2")  # it begins after job-3 now
        await said(link, messages.Request(2, "attach", {"job": "job-2"}))
        while not isinstance(reply := await heard(link), messages.Reply):
            pass
        assert reply.data == {"job": "job-2", "state": "queued", "ahead": ["job-1", "job-3"]}
        await link.close()
        await session

    in_time(scenario())
    assert jobs.ahead(first) == []


@pytest.mark.parametrize("level", list(AccessLevel))
def test_an_overview_lists_the_queue_and_says_whether_the_client_may_change_it(
    level: AccessLevel, jobs: Jobs
) -> None:
    clock = Clock()
    overview = overview_of(Fleet(clock), clock)
    overview.jobs = jobs
    first = jobs.submit({"job": {"model": "opt-tiny"}, "name": "night"})
    until(lambda: first.is_running and first.records)
    for _ in range(2):
        jobs.submit({"job": {"model": "opt-tiny"}})
    jobs.pause("job-2")
    jobs.resume("job-2")  # it begins after job-3 now

    async def scenario() -> None:
        sessions = OperatorSessions(overview=overview)
        sessions.jobs = jobs
        link, there = memory_link()
        session = asyncio.create_task(sessions.serve(there, HELLO, level))
        assert isinstance(await heard(link), messages.Welcome)
        await said(link, messages.Request(1, "overview", {}))
        reply = await heard(link)
        assert isinstance(reply, messages.Reply)
        assert reply.data["operator"] is (level is AccessLevel.OPERATOR)
        rows = reply.data["jobs"]
        assert [(row["job"], row["state"]) for row in rows] == [
            ("job-1", "running"),
            ("job-3", "queued"),
            ("job-2", "queued"),
        ]
        assert (rows[0]["name"], rows[0]["step"], rows[0]["loss"]) == ("night", 0, None)
        await link.close()
        await session

    in_time(scenario())


@pytest.mark.parametrize("bye", [True, False])
def test_who_leaves_is_followed_by_no_records(bye: bool, jobs: Jobs, runner: Runner) -> None:

    async def scenario() -> None:
        link, session = await followed(jobs)
        record = await heard(link)
        assert isinstance(record, messages.JobRecord)
        assert record.record == runner.record
        if bye:
            await said(link, messages.Bye("enough"))
        else:
            await link.close()
        await session
        with pytest.raises(ConnectionLostError):
            await link.receive()

    in_time(scenario())
    (job,) = jobs.all()
    assert job.followers == []


def test_the_last_record_comes_though_the_job_was_over_before_it(history: JobHistory) -> None:
    runner = Runner({"event": "note", "text": "preparing"})
    runner.ends.set()

    async def scenario() -> None:
        loop = asyncio.get_running_loop()

        async def looks_again() -> None:
            for wake in [wake for job in served.all() for wake in job.followers]:
                wake()
            for _ in range(10):
                await asyncio.sleep(0)

        def listener(kind: EventKind, text: str) -> None:
            if "done" in text:  # its state is final, and its last record is not there yet
                asyncio.run_coroutine_threadsafe(looks_again(), loop).result(PATIENCE_S)

        served = Jobs(None, runner, history, listener)  # type: ignore[arg-type]
        link, _ = await followed(served)
        records = [await heard(link) for _ in range(2)]
        assert [record.record["event"] for record in records] == ["note", "end"]  # type: ignore[union-attr]
        await link.close()
        await asyncio.to_thread(served.close, PATIENCE_S)

    in_time(scenario())


def test_who_follows_a_job_is_told_how_far_its_step_is(
    monkeypatch: pytest.MonkeyPatch, jobs: Jobs
) -> None:
    monkeypatch.setattr(operator, "_TASKS_EVERY_S", 0.01)
    server = SimpleNamespace(progress=lambda: StepProgress(3, 8))

    async def scenario() -> None:
        link, session = await followed(jobs, server)
        await heard(link)
        told = await heard(link)
        assert isinstance(told, messages.JobRecord)
        assert told.record == {"event": "tasks", "done": 3, "of": 8}
        await said(link, messages.Bye("enough"))
        await session

    in_time(scenario())
    (job,) = jobs.all()
    assert [record["event"] for record in job.records] == ["note"]


def test_a_job_that_goes_on_is_followed_to_its_second_end(jobs: Jobs, runner: Runner) -> None:

    async def scenario() -> None:
        link, _ = await followed(jobs)
        await heard(link)
        await said(link, messages.Request(2, "stop", {"job": "job-1"}))
        assert isinstance(await heard(link), messages.Reply)
        runner.ends.set()  # not before it was stopped, or it would be done and not resumed
        assert isinstance(await heard(link), messages.JobRecord)
        await said(link, messages.Request(3, "resume", {"job": "job-1"}))
        assert isinstance(await heard(link), messages.Reply)
        await said(link, messages.Request(4, "attach", {"job": "job-1"}))
        assert isinstance(await heard(link), messages.Reply)
        records = [await heard(link) for _ in range(4)]
        events = [record.record["event"] for record in records]  # type: ignore[union-attr]
        assert events == ["note", "note", "note", "end"]
        await link.close()

    in_time(scenario())


def test_what_is_no_request_ends_the_session_with_a_reason(jobs: Jobs) -> None:

    async def scenario() -> None:
        link, session = await followed(jobs)
        await said(link, messages.Drain())
        while isinstance(told := await heard(link), messages.JobRecord):
            pass
        assert isinstance(told, messages.Error)
        assert (told.code, "not drain" in told.message) == (ErrorCode.PROTOCOL, True)
        await session

    in_time(scenario())


def test_a_record_that_cannot_be_sent_is_no_reason_to_wait_for_ever(
    jobs: Jobs, runner: Runner
) -> None:
    runner.record["text"] = object()

    async def scenario() -> None:
        link, session = await followed(jobs)
        told = await heard(link)
        assert isinstance(told, messages.Error)
        assert "cannot be encoded" in told.message
        await session

    in_time(scenario())
