"""The agent that connects a machine to a server while the owner's policy permits computation."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from cleave.device.policy import ALLOWED, Cause, Permission
from cleave.device.session import DeviceStatus, RefusedError, UnansweredError
from cleave.errors import CleaveError, ProtocolError, UsageError, VersionError
from cleave.transport.join_url import JoinUrl, parse_join_url

LOOK_S: Final = 5.0  # interval between checks of the machine, unless a check sets another time
DRAIN_S: Final = 30.0  # time for a draining device to finish its runs; then the PS reassigns them
LONGEST_WAIT_S: Final = 30.0  # maximum wait between connection attempts; the first is up to 1 s
STEADY_S: Final = 60.0  # a session of at least this length resets the backoff to 1 s

INTERRUPTED: Final = "interrupted"
ASKED: Final = "asked to stop"  # like `INTERRUPTED`, this reason does not come from the policy


class State(Enum):
    """The state of an agent. In `READY`, the PS has welcomed the device but may still test it."""

    WAITING = "waiting"
    READY = "ready"
    DRAINING = "draining"
    LEFT = "left"


_NOTHING_DONE: Final = DeviceStatus()


@dataclass(frozen=True, slots=True)
class Notice:
    """A change of the agent's state, to show to the user.

    Attributes:
        reason: readable reason for the change; empty for `State.READY`.
        retry_s: seconds until the next connection attempt; None if no attempt is scheduled.
    """

    state: State
    reason: str = ""
    status: DeviceStatus = _NOTHING_DONE
    retry_s: float | None = None


class AgentSession(Protocol):
    """The part of `DeviceSession` that an agent uses."""

    @property
    def status(self) -> DeviceStatus: ...
    @property
    def comes_back_s(self) -> float | None: ...
    @property
    def moves_to(self) -> str: ...
    def run(self) -> Coroutine[Any, Any, str]: ...
    def drain(self) -> None: ...


# Opens a session. Calls its argument with the device's number once the PS welcomes the device.
Connect: TypeAlias = Callable[[Callable[[int], None]], Awaitable[AgentSession]]

Look: TypeAlias = Callable[[], Awaitable[Permission]]  # returns whether the machine may compute now


class Agent:
    """Keeps a machine connected to a server while the policy permits computation.

    With `stays`, the agent retries an unreachable server with exponential backoff. Without `stays`,
    `run` raises if the server is unreachable, unless `known` returns True. The agent reconnects
    when the connection is lost or the server stops, even before the first welcome. It stops when
    the server refuses the device permanently or, without `stays`, no longer needs the device.

    Args:
        say: called with every change of the agent's state.
        look: returns whether the machine may compute now; None to compute at any time.
        stays: whether to retry an unreachable server; by default, True if `look` is given.
        once: whether to stop after one session.
        known: returns True if the server has welcomed a device with the same credential, so that a
            retry may succeed. By default, True once the server has welcomed this device.
        drain_s: time in seconds to finish current runs once the policy forbids computation; 0 to
            leave immediately.
        jitter: returns a random number from 0 to 1, so that agents do not all reconnect at once.
    """

    def __init__(
        self,
        connect: Connect,
        say: Callable[[Notice], None],
        *,
        look: Look | None = None,
        stays: bool | None = None,
        once: bool = False,
        known: Callable[[], bool] | None = None,
        drain_s: float = DRAIN_S,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Coroutine[Any, Any, None]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._connect = connect
        self._tell = say
        self._look = look
        self._stays = look is not None if stays is None else stays
        self._once = once
        self._known = known or (lambda: self._was_welcome)
        self._drain_s = drain_s
        self._clock = clock
        self._sleep = sleep
        self._jitter = jitter
        self._said: State | None = None
        self._waits_for: Cause | str | None = None
        self._session: AgentSession | None = None
        self._welcome = False  # whether the server welcomed the current session
        self._was_welcome: bool = False  # whether the server welcomed any session
        self._draining = ""  # why the current session is draining
        self._failures = 0
        self._told_s = 0.0  # minimum wait that the server requested
        self._stopping = False
        self._work: asyncio.Future[None] | None = None

    async def run(self) -> None:
        """Run until `stop` is called, or the server refuses or no longer needs the device.

        Raises:
            CleaveError: if the server refuses the device permanently or, without `stays`, is
                unreachable and `known` returns False.
        """
        self._work = asyncio.ensure_future(self._come_and_go())
        try:
            await self._work
        except asyncio.CancelledError:
            if not self._stopping:
                raise
        if self._said is not State.LEFT:
            self._say(Notice(State.LEFT, INTERRUPTED))

    def stop(self) -> None:
        """Drain the current session if the PS has accepted it.

        Otherwise, or on a second call, stop immediately. Call this method from the event loop.
        """
        self._stopping = True
        if self._session is not None and self._welcome and not self._draining:
            self._drain(self._session, ASKED)
        elif self._work is not None:
            self._work.cancel()

    async def _come_and_go(self) -> None:
        """Run sessions one after another, while the policy permits, until the agent must stop."""
        permission = ALLOWED
        while not self._stopping:
            if self._look is not None:
                permission = await self._look()
            if not permission.may_work:
                self._wait_for(permission.cause, Notice(State.WAITING, permission.reason))
                await self._sleep(self._until_look_s(permission))
                continue
            session: AgentSession | None = None
            began_s = self._clock()
            try:
                session = await self._connect(self._ready)
                reason = await self._serve(session, permission)
            except CleaveError as error:
                for_good = self._is_for_good(error)
                answered = isinstance(error, RefusedError | UnansweredError | ProtocolError)
                last = for_good or self._once or not (answered or self._known())
                if last and (for_good or session is not None or not self._stays):
                    raise
                reason = str(error)
                if session is not None:
                    self._say(Notice(State.LEFT, reason, session.status))
            if session is not None:
                self._waits_for = None
                if self._clock() - began_s >= STEADY_S:
                    self._failures = 0
                if self._draining:
                    continue
                if session.moves_to:
                    await self._sleep(self._next_wait_s())  # grows with repeated redirects
                    continue
                if self._once or (not self._stays and session.comes_back_s is None):
                    return
            wait_s = self._next_wait_s()
            self._wait_for(reason, Notice(State.WAITING, reason, retry_s=wait_s))
            await self._sleep(wait_s)

    async def _serve(self, session: AgentSession, permission: Permission) -> str:
        """Run a session to its end. Return why it ended, or raise the session's error."""
        self._session, self._welcome, self._draining = session, False, ""
        running = asyncio.ensure_future(session.run())
        reason = INTERRUPTED
        try:
            await self._watch(session, running, permission)
            if running.done():
                reason = running.result()
        except asyncio.CancelledError:
            self._say(Notice(State.LEFT, reason, session.status))
            raise
        finally:
            self._session = None
            running.cancel()
            await asyncio.wait({running})
            if not running.cancelled():
                running.exception()  # retrieve the exception, or asyncio logs a warning
        self._told_s = session.comes_back_s or 0.0
        if self._draining not in ("", ASKED):
            reason = self._draining
        self._say(Notice(State.LEFT, reason, session.status))
        return reason

    async def _watch(
        self, session: AgentSession, running: asyncio.Future[str], permission: Permission
    ) -> None:
        """Wait until the session ends. Drain the session once the policy forbids computation."""

        def ends() -> bool:
            return bool(self._draining) or running.done()

        while self._look is not None and not ends():
            await self._sleep_beside(running, self._until_look_s(permission))
            if not ends():
                permission = await self._look()
            if not permission.may_work and not ends():
                if self._welcome and self._drain_s:
                    self._drain(session, permission.reason)
                    await self._sleep_beside(running, self._drain_s)
                self._draining = permission.reason
                return
        await asyncio.wait({running})

    async def _sleep_beside(self, running: asyncio.Future[str], wait_s: float) -> None:
        """Sleep for `wait_s` seconds, or until the session ends."""
        pause = asyncio.ensure_future(self._sleep(wait_s))
        either: set[asyncio.Future[Any]] = {running, pause}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            pause.cancel()

    def _until_look_s(self, permission: Permission) -> float:
        """Return the time until the next check of the machine, in seconds."""
        if permission.until_s is None:
            return LOOK_S
        return max(0.0, permission.until_s - self._clock())

    def _drain(self, session: AgentSession, reason: str) -> None:
        """Tell a session to finish its pending requests and end. Report the reason."""
        self._draining = reason
        self._say(Notice(State.DRAINING, reason, session.status))
        session.drain()

    def _ready(self, device: int) -> None:
        """Record and report that the server welcomed the session."""
        self._welcome = self._was_welcome = True
        self._say(Notice(State.READY, status=DeviceStatus(device)))

    def _wait_for(self, what: Cause | str | None, notice: Notice) -> None:
        """Report why the agent is waiting. With `stays`, report only a changed cause (`what`)."""
        if what != self._waits_for or not self._stays:
            self._waits_for = what
            self._say(notice)

    def _say(self, notice: Notice) -> None:
        self._said = notice.state
        self._tell(notice)

    def _is_for_good(self, error: CleaveError) -> bool:
        """Return whether an error is permanent. For a refusal, also record the minimum wait."""
        if not isinstance(error, RefusedError):
            return isinstance(error, VersionError)
        self._told_s = error.comes_back_s or 0.0
        return error.for_good

    def _next_wait_s(self) -> float:
        """Return the random wait in seconds before the next attempt. Failures raise its maximum."""
        longest_s = min(LONGEST_WAIT_S, 2.0 ** min(self._failures, 20))
        self._failures += 1
        told_s, self._told_s = self._told_s, 0.0
        return told_s + longest_s * self._jitter()


_Opened = TypeVar("_Opened")


class _Moving(Protocol):
    @property
    def moves_to(self) -> str: ...
    @property
    def welcomed(self) -> bool: ...


class ServerSelection:
    """Selects the server for the next session: the home server, or the target of a redirect.

    After a redirect, the new server remains selected as long as it welcomes the device. Otherwise
    the device returns to its home server.
    """

    def __init__(self) -> None:
        self._session: _Moving | None = None
        self._elsewhere: JoinUrl | None = None

    async def open(
        self, home: JoinUrl, connect: Callable[[JoinUrl], Awaitable[_Opened]]
    ) -> _Opened:
        """Open a connection to the selected server. After an error, select the home server."""
        last, self._session = self._session, None
        if last is not None and not last.welcomed:
            self._elsewhere = None
        if last is not None and last.moves_to:
            with suppress(UsageError):  # ignore an invalid address
                # The home server knows the credential, and trusts the server that it redirects to.
                moved = parse_join_url(last.moves_to)
                if moved.address.startswith("wss:") or home.address.startswith("ws:"):
                    self._elsewhere = replace(moved, credential=home.credential)
        try:
            return await connect(self._elsewhere or home)
        except CleaveError:
            self._elsewhere = None
            raise

    def at(self, session: _Moving) -> None:
        """Set the current session, whose outcome determines the next server."""
        self._session = session
