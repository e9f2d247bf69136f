"""A machine's agent: connects while the machine may work, drains when it may not, reconnects."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Protocol, TypeAlias

from cleave.device.host.policy import ALLOWED, Cause, Permission
from cleave.device.session import DeviceStatus, RefusedError, UnansweredError
from cleave.errors import CleaveError, ProtocolError, VersionError

LOOK_S: Final = 5.0
"""Seconds between two checks of the machine, unless a check sets the time of the next one."""

DRAIN_S: Final = 30.0
"""Seconds that a device has to answer its runs once the machine may not work any more. Unanswered
runs then go to other devices."""

LONGEST_WAIT_S: Final = 300.0
"""Maximum seconds between two attempts to reach a server; the first wait is at most 1 s."""

STEADY_S: Final = 60.0
"""After a session of at least this many seconds, waits between attempts start from 1 s again."""

INTERRUPTED: Final = "interrupted"
ASKED: Final = "asked to stop"
"""This and `INTERRUPTED` are the reasons for leaving that do not come from the policy."""


class State(Enum):
    """What an agent is doing. `READY` means welcomed: the PS may still probe the device."""

    WAITING = "waiting"
    READY = "ready"
    DRAINING = "draining"
    LEFT = "left"


_NOTHING_DONE: Final = DeviceStatus()


@dataclass(frozen=True, slots=True)
class Notice:
    """A change of state, to be shown to people.

    Attributes:
        reason: readable reason; empty when ready.
        status: status of the session that is ready or was left.
        retry_s: seconds until the next attempt to reach the server; None if none is scheduled.
    """

    state: State
    reason: str = ""
    status: DeviceStatus = _NOTHING_DONE
    retry_s: float | None = None


class AgentSession(Protocol):
    """Serves a device on a connection to a server, as `DeviceSession` does."""

    @property
    def status(self) -> DeviceStatus:
        """Return the session's status."""
        ...

    @property
    def comes_back_s(self) -> float | None:
        """Return the minimum seconds before the next session; None if there must be none."""
        ...

    @property
    def moves_to(self) -> str:
        """Return the address to which the server redirected the device; empty if it did not."""
        ...

    def run(self) -> Coroutine[Any, Any, str]:
        """Serve until the session ends; return the reason why it ended."""
        ...

    def drain(self) -> None:
        """Answer the pending requests, then end."""
        ...


Connect: TypeAlias = Callable[[Callable[[int], None]], Awaitable[AgentSession]]
"""Opens a session. The session calls the function with the device's number once it is welcome."""

Look: TypeAlias = Callable[[], Awaitable[Permission]]
"""Checks the machine, and returns whether it may work now."""


class Agent:
    """Keeps a machine connected to a server as long as the machine may work.

    With `stays`, it retries an unreachable server, less and less often. Without it, `run` raises if
    the first attempt fails, unless `known` says that the server welcomes such a device. Either way
    it reconnects when the connection is lost or the server stops, even before the first welcome,
    until the server does not need it any more or refuses it permanently.

    Args:
        connect: opens a session.
        say: called with every change of state.
        look: returns whether the machine may work now; None if it always may.
        stays: whether to keep trying an unreachable server; by default True with a `look`.
        once: end after one session.
        known: returns whether the server is known to welcome such a device, so that it is worth
            retrying; by default True once it has welcomed this device.
        drain_s: seconds to finish runs when the machine may not work any more; 0 to leave without
            notice.
        clock: monotonic time in seconds.
        sleep: waits for a number of seconds.
        jitter: returns random numbers from 0 to 1, so that agents do not all reconnect at once.
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
        self._welcome = False  # whether the current session is welcomed
        self._was_welcome: bool = False  # whether any session was welcomed
        self._draining = ""  # why the current session is draining
        self._failures = 0
        self._told_s = 0.0  # minimum wait set by the server
        self._stopping = False
        self._work: asyncio.Future[None] | None = None

    async def run(self) -> None:
        """Run until `stop`; without `stays`, at most until the server needs the device no more.

        Raises:
            CleaveError: when the server refuses the device permanently; without `stays`, also when
                the first attempt reaches no server.
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
        """End the agent, draining a running session first; a second call ends it at once.

        Call it in the agent's loop.
        """
        self._stopping = True
        if self._session is not None and self._welcome and not self._draining:
            self._drain(self._session, ASKED)
        elif self._work is not None:
            self._work.cancel()

    async def _come_and_go(self) -> None:
        """Run one session after another while the machine may work, until the last one."""
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
                last = for_good or self._once or not (_answered(error) or self._known())
                if last and not (session is None and self._stays):
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
        """Run a session to its end; return why it ended.

        Raises:
            CleaveError: when the server ended it with an error.
        """
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
                running.exception()  # retrieved to avoid a warning after a cancellation
        self._told_s = session.comes_back_s or 0.0
        if self._draining not in ("", ASKED):
            reason = self._draining
        self._say(Notice(State.LEFT, reason, session.status))
        return reason

    async def _watch(
        self, session: AgentSession, running: asyncio.Future[str], permission: Permission
    ) -> None:
        """Wait until the session ends; drain it when the machine may not work any more."""

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
        """Sleep, but not longer than the session runs."""
        pause = asyncio.ensure_future(self._sleep(wait_s))
        either: set[asyncio.Future[Any]] = {running, pause}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            pause.cancel()

    def _until_look_s(self, permission: Permission) -> float:
        """Return the seconds until the next check of the machine."""
        if permission.until_s is None:
            return LOOK_S
        return max(0.0, permission.until_s - self._clock())

    def _drain(self, session: AgentSession, reason: str) -> None:
        """Make a session answer its pending requests and end; report why."""
        self._draining = reason
        self._say(Notice(State.DRAINING, reason, session.status))
        session.drain()

    def _ready(self, device: int) -> None:
        """Record that the server welcomed the session, and report it."""
        self._welcome = self._was_welcome = True
        self._say(Notice(State.READY, status=DeviceStatus(device)))

    def _wait_for(self, what: Cause | str | None, notice: Notice) -> None:
        """Report what the agent waits for; with `stays`, only if that changed."""
        if what != self._waits_for or not self._stays:
            self._waits_for = what
            self._say(notice)

    def _say(self, notice: Notice) -> None:
        self._said = notice.state
        self._tell(notice)

    def _is_for_good(self, error: CleaveError) -> bool:
        """Return whether the server would refuse again; if not, record the earliest retry."""
        if not isinstance(error, RefusedError):
            return isinstance(error, VersionError)
        self._told_s = error.comes_back_s or 0.0
        return error.for_good

    def _next_wait_s(self) -> float:
        """Return the seconds to wait before the next attempt, longer after each failure."""
        longest_s = min(LONGEST_WAIT_S, 2.0 ** min(self._failures, 20))
        self._failures += 1
        told_s, self._told_s = self._told_s, 0.0
        return told_s + longest_s * self._jitter()


def _answered(error: CleaveError) -> bool:
    """Return whether a server or proxy ended a session that had begun."""
    return isinstance(error, RefusedError | UnansweredError | ProtocolError)
