"""An agent on a machine: connects while it may work, drains when it may not, and comes back."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Protocol, TypeAlias

from cleave.device.host.policy import Cause, Permission
from cleave.device.session import DeviceStatus, RefusedError
from cleave.errors import CleaveError, VersionError

LOOK_S: Final = 5.0
"""Seconds between two looks at the machine."""

DRAIN_S: Final = 30.0
"""Seconds that a device has to answer its runs when the machine may not work any more. What is
missing then goes to other devices."""

LONGEST_WAIT_S: Final = 300.0
"""The longest wait between two tries to reach a server, in seconds; the first is at most one
second."""

STEADY_S: Final = 60.0
"""A session that lasted this many seconds was a success: waits start from a second again."""

INTERRUPTED: Final = "interrupted"
ASKED: Final = "asked to stop"
"""This and `INTERRUPTED` are the reasons for leaving that do not come from the policy."""


class State(Enum):
    """What an agent says that it is doing."""

    WAITING = "waiting"
    READY = "ready"
    DRAINING = "draining"
    LEFT = "left"


_NOTHING_DONE: Final = DeviceStatus(0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Notice:
    """A change of state, for people to see.

    Attributes:
        state: the new state.
        reason: for people; empty when ready.
        status: of the session that is ready or left.
        retry_s: seconds until the server is tried again, if the agent waits for that.
    """

    state: State
    reason: str = ""
    status: DeviceStatus = _NOTHING_DONE
    retry_s: float | None = None


class AgentSession(Protocol):
    """A connection to a server, such as `DeviceSession`."""

    @property
    def status(self) -> DeviceStatus: ...

    @property
    def comes_back_s(self) -> float | None:
        """Return the least seconds to wait before the next session; None if there is to be none."""
        ...

    def run(self) -> Coroutine[Any, Any, str]:
        """Serve until the session ends; return why it did."""
        ...

    def drain(self) -> None:
        """Answer what was asked, then end."""
        ...


Connect: TypeAlias = Callable[[Callable[[int], None]], Awaitable[AgentSession]]
"""Opens a session. The session calls the function with the device's number once it is welcome."""

Look: TypeAlias = Callable[[], Awaitable[Permission]]
"""Looks at the machine, and returns whether it may work now."""


class Agent:
    """Keeps a machine connected to a server as long as it may work.

    With a policy it stays: a server that cannot be reached is tried again, less and less often.
    Without one, the server must welcome it at once. It then comes back whenever the connection is
    lost or the server stops, until the server has no more use for it or refuses it for good.

    Args:
        connect: opens a session.
        say: called with every change of state.
        look: says whether the machine may work now; None for no policy.
        once: without a policy, end after one session.
        clock: seconds that never go back.
        sleep: waits this many seconds.
        jitter: random numbers from 0 to 1, so that many agents do not come back at once.
    """

    def __init__(
        self,
        connect: Connect,
        say: Callable[[Notice], None],
        *,
        look: Look | None = None,
        once: bool = False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Coroutine[Any, Any, None]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._connect = connect
        self._tell = say
        self._look = look
        self._once = once
        self._clock = clock
        self._sleep = sleep
        self._jitter = jitter
        self._said: State | None = None
        self._waits_for: Cause | str | None = None
        self._session: AgentSession | None = None
        self._welcome = False  # whether the session now is
        self._was_welcome = False  # whether any session was
        self._draining = ""  # why the session now does
        self._drain_ends_s = math.inf
        self._failures = 0
        self._told_s = 0.0  # the server said when to come back, at the soonest
        self._stopping = False
        self._work: asyncio.Future[None] | None = None

    async def run(self) -> None:
        """Run until `stop`; without a policy, at most until the server needs the device no more.

        Raises:
            CleaveError: when the server refuses the device; without a policy, also when no server
                can be reached at first. A server that has welcomed the device before is tried
                again, except, without a policy, after a refusal for good.
        """
        self._work = asyncio.ensure_future(
            self._come_back() if self._look is None else self._come_and_go(self._look)
        )
        try:
            await self._work
        except asyncio.CancelledError:
            if not self._stopping:
                raise
        if self._said is not State.LEFT:
            self._say(Notice(State.LEFT, INTERRUPTED))

    def stop(self) -> None:
        """End the agent, draining first if a session is under way; when called again, end at once.

        Call it in the agent's loop.
        """
        self._stopping = True
        if self._session is not None and self._welcome and not self._draining:
            self._drain(self._session, ASKED)
        elif self._work is not None:
            self._work.cancel()

    async def _come_back(self) -> None:
        """Run one session after another, without a policy, until one ends for good."""
        while True:
            session: AgentSession | None = None
            began_s = self._clock()
            try:
                session = await self._connect(self._ready)
                reason = await self._serve(session, None)
                if session.comes_back_s is None or self._once or self._draining:
                    return
            except CleaveError as error:
                if self._is_for_good(error) or self._once or not self._was_welcome:
                    raise
                reason = str(error)
                if session is not None:
                    self._say(Notice(State.LEFT, reason, session.status))
            if self._clock() - began_s >= STEADY_S:
                self._failures = 0
            wait_s = self._next_wait_s()
            self._say(Notice(State.WAITING, reason, retry_s=wait_s))
            await self._sleep(wait_s)

    async def _come_and_go(self, look: Look) -> None:
        while not self._stopping:
            verdict = await look()
            if not verdict.may_work:
                self._wait_for(verdict.cause, Notice(State.WAITING, verdict.reason))
                await self._sleep(LOOK_S)
                continue
            fault = await self._visit(look)
            if fault and not self._stopping:
                wait_s = self._next_wait_s()
                self._wait_for(fault, Notice(State.WAITING, fault, retry_s=wait_s))
                await self._sleep(wait_s)

    async def _visit(self, look: Look) -> str:
        """Run one session; return what went wrong, empty if it was drained."""
        try:
            session = await self._connect(self._ready)
        except CleaveError as error:
            return str(error)
        began_s = self._clock()
        try:
            reason = await self._serve(session, look)
        except CleaveError as error:
            if not self._was_welcome or self._is_for_good(error):
                raise  # a wrong credential, for one: more tries would change nothing
            reason = str(error)
            self._say(Notice(State.LEFT, reason, session.status))
        if self._clock() - began_s >= STEADY_S:
            self._failures = 0
        self._waits_for = None
        return "" if self._draining else reason

    async def _serve(self, session: AgentSession, look: Look | None) -> str:
        """Run a session to its end; return why it ended.

        Raises:
            CleaveError: when the server ended it as an error.
        """
        self._session, self._welcome, self._draining = session, False, ""
        running = asyncio.ensure_future(session.run())
        reason = INTERRUPTED
        try:
            if look is not None:
                await self._watch(session, running, look)
            if look is None or running.done():
                reason = await running
        except asyncio.CancelledError:
            self._say(Notice(State.LEFT, reason, session.status))
            raise
        finally:
            self._session = None
            running.cancel()
            await asyncio.wait({running})
        self._told_s = session.comes_back_s or 0.0
        if self._draining not in ("", ASKED):
            reason = self._draining
        self._say(Notice(State.LEFT, reason, session.status))
        return reason

    async def _watch(self, session: AgentSession, running: asyncio.Future[str], look: Look) -> None:
        """Wait until the session ends; drain it when the machine may not work any more."""
        while not running.done():
            pause = asyncio.ensure_future(self._sleep(LOOK_S))
            either: set[asyncio.Future[Any]] = {running, pause}
            try:
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            finally:
                pause.cancel()
            if self._draining:
                if self._clock() >= self._drain_ends_s:
                    return
                continue
            verdict = await look()
            if not verdict.may_work and not self._draining and not running.done():
                self._drain(session, verdict.reason)
                if not self._welcome:
                    return  # it was given nothing yet

    def _drain(self, session: AgentSession, reason: str) -> None:
        self._draining = reason
        self._drain_ends_s = math.inf if reason == ASKED else self._clock() + DRAIN_S
        if self._welcome:
            self._say(Notice(State.DRAINING, reason, session.status))
            session.drain()

    def _ready(self, device: int) -> None:
        self._welcome = self._was_welcome = True
        self._say(Notice(State.READY, status=DeviceStatus(device, 0, 0, 0, 0)))

    def _wait_for(self, what: Cause | str | None, notice: Notice) -> None:
        """Report what the agent waits for, but only when that changes."""
        if what != self._waits_for:
            self._waits_for = what
            self._say(notice)

    def _say(self, notice: Notice) -> None:
        self._said = notice.state
        self._tell(notice)

    def _is_for_good(self, error: CleaveError) -> bool:
        """Say whether the server would refuse again; if not, note when it may be tried again."""
        if not isinstance(error, RefusedError):
            return isinstance(error, VersionError)
        self._told_s = error.comes_back_s or 0.0
        return error.for_good

    def _next_wait_s(self) -> float:
        longest_s = min(LONGEST_WAIT_S, 2.0 ** min(self._failures, 20))
        self._failures += 1
        told_s, self._told_s = self._told_s, 0.0
        return told_s + longest_s * self._jitter()
