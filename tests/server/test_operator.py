"""An operator's session, over a link in memory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from cleave.protocol import messages
from cleave.protocol.codec import decode, encode
from cleave.protocol.messages import ErrorCode, Message, Role
from cleave.scheduler.admission import AccessLevel
from cleave.server.api.operator import OperatorSessions
from cleave.server.jobs.jobs import Jobs
from cleave.transport.connection import Connection, ConnectionLostError, memory_link

PATIENCE_S = 60.0
HELLO = messages.Hello(role=Role.OPERATOR)
SUBMIT = messages.Request(1, "submit", {"job": {"model": "opt-tiny"}})


class Runner:
    """Reports one record, and trains until told to stop."""

    def __init__(self, record: dict[str, Any]) -> None:
        self.record = record
        self.ends = threading.Event()

    def check(self, arguments: Mapping[str, Any]) -> int:
        return 1

    def check_pause(self, arguments: Mapping[str, Any]) -> None:
        pass

    def run(self, arguments: Any, fleet: Any, report: Any, stop: Any) -> None:
        report(self.record)
        assert self.ends.wait(PATIENCE_S)


async def heard(link: Connection) -> Message:
    return decode(await link.receive())


async def said(link: Connection, message: Message) -> None:
    await link.send(encode(message))


async def followed(jobs: Jobs) -> tuple[Connection, asyncio.Task[None]]:
    """An operator who has submitted a job; and its session on the server."""
    sessions = OperatorSessions()
    sessions.jobs = jobs
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


@pytest.mark.parametrize("bye", [True, False])
def test_who_leaves_is_followed_by_no_records(bye: bool) -> None:
    runner = Runner({"event": "note", "text": "preparing"})
    jobs = Jobs(None, runner)  # type: ignore[arg-type]

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
    runner.ends.set()
    jobs.close(PATIENCE_S)


def test_what_is_no_request_ends_the_session_with_a_reason() -> None:
    runner = Runner({"event": "note", "text": "preparing"})
    jobs = Jobs(None, runner)  # type: ignore[arg-type]

    async def scenario() -> None:
        link, session = await followed(jobs)
        await said(link, messages.Drain())
        while isinstance(told := await heard(link), messages.JobRecord):
            pass
        assert isinstance(told, messages.Error)
        assert (told.code, "not drain" in told.message) == (ErrorCode.PROTOCOL, True)
        await session

    in_time(scenario())
    runner.ends.set()
    jobs.close(PATIENCE_S)


def test_a_record_that_cannot_be_sent_is_no_reason_to_wait_for_ever() -> None:
    runner = Runner({"event": "note", "text": object()})
    jobs = Jobs(None, runner)  # type: ignore[arg-type]

    async def scenario() -> None:
        link, session = await followed(jobs)
        told = await heard(link)
        assert isinstance(told, messages.Error)
        assert "cannot be written" in told.message
        await session

    in_time(scenario())
    runner.ends.set()
    jobs.close(PATIENCE_S)
