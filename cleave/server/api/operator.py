"""Serve operators, who submit, follow and stop jobs and query the server's state."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Final

from cleave.errors import CleaveError, ProtocolError, UsageError
from cleave.protocol import messages
from cleave.protocol.codec import Buffer, decode, encode
from cleave.protocol.messages import ErrorCode
from cleave.scheduler.counters import StepProgress
from cleave.scheduler.sessions.admission import AccessLevel
from cleave.server.api.device_admin import ACTIONS, DeviceAdmin, Sessions
from cleave.server.api.overview import Overview, Question
from cleave.server.jobs.jobs import Jobs, TrainingJob
from cleave.transport.connection import Connection, ConnectionLostError

VIEWER_PAUSE_S: Final = 0.25
"""Delay after a reply to a viewer before the server reads the viewer's next request."""

_RECORDS: Final = 10_000  # maximum number of training records in one reply

_TASKS_EVERY_S: Final = 1.0
"""Minimum time between two progress messages to an operator who follows a job."""

_ALL_MAY: Final = ("overview", "status")
"""Actions that viewers may request. Operators may request all actions."""


class OperatorSessions:
    """Serves the connections of operators and viewers, in the server's event loop.

    If `device_admin` or `overview` is None, requests that need it are refused. `jobs` and `server`
    are None until the server listens.
    """

    def __init__(
        self, device_admin: DeviceAdmin | None = None, overview: Overview | None = None
    ) -> None:
        self._device_admin = device_admin
        self._overview = overview
        self.jobs: Jobs | None = None
        self.server: Sessions | None = None

    async def serve(
        self, connection: Connection, hello: messages.Hello, access_level: AccessLevel
    ) -> None:
        """Serve an admitted operator or viewer until the client disconnects."""
        await connection.send(encode(messages.Welcome(device=0)))
        try:
            async with asyncio.TaskGroup() as streams:
                await self._answer_all(connection, access_level, streams)
        except* ConnectionLostError:
            pass
        except* ProtocolError as broken:
            error = messages.Error(ErrorCode.PROTOCOL, str(broken.exceptions[0]))
            with suppress(ConnectionLostError):
                await connection.send(encode(error))
        finally:
            await connection.close()

    async def _answer_all(
        self, connection: Connection, access_level: AccessLevel, streams: asyncio.TaskGroup
    ) -> None:
        """Reply to requests until the client disconnects. Start tasks that stream job records."""
        while True:
            message = decode(await connection.receive())
            if isinstance(message, messages.Bye):
                raise ConnectionLostError(message.reason)
            if not isinstance(message, messages.Request):
                raise ProtocolError(f"an operator may send only requests, not {message.TYPE}")
            reply, follow = self._answer(message, access_level)
            await connection.send(_encoded(reply))
            if access_level is AccessLevel.VIEWER:
                await asyncio.sleep(VIEWER_PAUSE_S)  # viewers must not slow down training
            if follow is not None:
                streams.create_task(self._stream(connection, follow))

    def _answer(
        self, request: messages.Request, access_level: AccessLevel
    ) -> tuple[messages.Reply, TrainingJob | None]:
        """Return the reply to a request, and the job whose records to stream (None for no job)."""
        follow: TrainingJob | None = None
        try:
            if self.jobs is None:
                raise CleaveError("the server is still starting; try again")
            if access_level is AccessLevel.VIEWER and request.action not in _ALL_MAY:
                raise UsageError(
                    f"a viewer may ask for {' and '.join(_ALL_MAY)}, not for {request.action!r}; "
                    f"use the operator's URL"
                )
            arguments = request.arguments
            match request.action:
                case "submit":
                    follow = self.jobs.submit(arguments)
                    data: dict[str, Any] = {"job": follow.id, "ahead": self._ahead(follow)}
                case "attach":
                    follow = self.jobs.find(str(arguments.get("job", "")))
                    data = {
                        "job": follow.id,
                        "state": follow.state.value,
                        "ahead": self._ahead(follow),
                    }
                case "stop" | "pause" | "resume":
                    change = getattr(self.jobs, request.action)
                    job = change(str(arguments.get("job", "")))
                    data = {"job": job.id, "state": job.state.value}
                    if request.action == "resume":
                        data["continues"] = job.continues
                case "records":
                    job = self.jobs.find(str(arguments.get("job", "")))
                    last = arguments.get("last", _RECORDS)
                    if not isinstance(last, int) or not 0 < last <= _RECORDS:
                        raise UsageError(
                            f"`last` must be between 1 and {_RECORDS:,} records, not {last!r}"
                        )
                    data = {"job": job.id, "state": job.state.value, "records": job.records[-last:]}
                case "status":
                    data = self._status()
                case "overview" if self._overview is not None:
                    data = self._overview.answer(Question.of(arguments))
                    data["operator"] = access_level is AccessLevel.OPERATOR
                case action if self._device_admin is not None and action in ACTIONS:
                    data = self._device_admin.answer(action, arguments)
                case _:
                    raise UsageError(
                        f"unknown request {request.action!r}; this server supports submit, attach, "
                        f"stop, pause, resume, records, status, overview, pair, codes, void, "
                        f"dashboard, devices, revoke, release, own and history"
                    )
        except CleaveError as error:
            failed = {"text": str(error), "exit_code": error.exit_code}
            return messages.Reply(request.id, ok=False, data=failed), None
        return messages.Reply(request.id, ok=True, data=data), follow

    def _ahead(self, job: TrainingJob) -> list[str]:
        assert self.jobs is not None
        return [other.id for other in self.jobs.ahead(job)]

    def _status(self) -> dict[str, Any]:
        assert self.jobs is not None
        server = self.server
        return {
            "jobs": [
                {
                    "job": job.id,
                    "state": job.state.value,
                    "model": job.model,
                    "steps": max(
                        (r["step"] for r in list(job.records) if r.get("event") == "step"),
                        default=0,
                    ),
                }
                for job in self.jobs.all()
            ],
            "devices": server.describe_devices() if server is not None else [],
        }

    async def _stream(self, connection: Connection, job: TrainingJob) -> None:
        """Send a job's records to a client, both past and new, until the job ends."""
        assert self.jobs is not None
        loop, news = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(news.set)

        self.jobs.follow(job, wake)
        sent = 0
        try:
            while True:
                news.clear()
                over = job.has_last_record
                for record in job.records[sent:]:
                    await connection.send(encode(messages.JobRecord(job.id, record)))
                    sent += 1
                if over:
                    return
                await self._wait(connection, job, news)
        finally:
            self.jobs.unfollow(job, wake)

    async def _wait(self, connection: Connection, job: TrainingJob, news: asyncio.Event) -> None:
        told: StepProgress | None = None
        while True:
            try:
                await asyncio.wait_for(news.wait(), _TASKS_EVERY_S)
                return
            except TimeoutError:
                shown = self.server is not None and job.is_running
                progress = self.server.progress() if self.server and shown else None
            if progress is not None and progress != told:
                told = progress
                record = {"event": "tasks", "done": progress.done, "of": progress.of}
                await connection.send(encode(messages.JobRecord(job.id, record)))


def _encoded(reply: messages.Reply) -> list[Buffer]:
    """Encode a reply or, if it cannot be encoded, a reply that states the error."""
    try:
        return encode(reply)
    except ProtocolError as error:
        failed = {"text": f"the server cannot encode this reply: {error}", "exit_code": 1}
        return encode(messages.Reply(reply.id, ok=False, data=failed))
