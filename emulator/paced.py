"""Real-time emulation: devices over real connections that pace themselves by their profiles.

A device is the session that `cleave join` runs, with two wrappers. `PacedConnection` delays every
message until the modelled link would have delivered it. `PacedComputer` answers when the modelled
device would have. Both use the models of virtual time, on this machine's clock times a factor.

An answer is late if this machine finished the product after the emulated device would have.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor as Pool
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from cleave.device.compute_thread import Outcome, compute
from cleave.device.core import Order
from cleave.errors import ProtocolError
from cleave.machine.backends import MatmulBackend
from cleave.machine.multiplication import Compute
from cleave.protocol import messages
from cleave.protocol.codec import Buffer, decode
from cleave.scheduler.sessions.probe import FIRST_ID
from cleave.transport.connection import Connection, ConnectionLostError
from emulator.activity import Activity, Direction, Transfer, execution
from emulator.compute import EmulatedProcessor
from emulator.links import Departure, Link

_WITH_ARRAYS: Final = messages.Put | messages.PutCoded | messages.Result | messages.ResultCoded

LATE_S: Final = 0.02
"""Lateness that is tolerated, in seconds: timers of a busy machine are no more exact."""


AHEAD_S: Final = 0.5
"""Emulated seconds by which messages are received ahead of the model."""


class Clock:
    """A clock of emulated seconds, from zero: event-loop time multiplied by a speed.

    Args:
        speed: emulated seconds per real second.
    """

    def __init__(self, speed: float = 1.0) -> None:
        self._loop = asyncio.get_running_loop()
        self._begin_s = self._loop.time()
        self._speed = speed

    def now_s(self) -> float:
        """Return the emulated time in seconds."""
        return (self._loop.time() - self._begin_s) * self._speed

    def call_at(self, when_s: float, what: Callable[[], None]) -> asyncio.TimerHandle:
        """Call a function at an emulated time."""
        return self._loop.call_at(self._begin_s + when_s / self._speed, what)

    async def sleep(self, wait_s: float) -> None:
        """Sleep for emulated seconds."""
        await asyncio.sleep(wait_s / self._speed)

    async def sleep_until(self, when_s: float) -> None:
        """Sleep until an emulated time."""
        wait_s = when_s - self.now_s()
        if wait_s > 0:
            await self.sleep(wait_s)


@dataclass(slots=True)
class Lateness:
    """Lateness of this machine's answers.

    Attributes:
        answers: number of answered tasks, without the server's probes.
        late: number of answers that were more than `LATE_S` late.
        worst_s: the greatest lateness, in emulated seconds.
    """

    answers: int = 0
    late: int = 0
    worst_s: float = 0.0

    def count(self, late_s: float) -> None:
        """Count one answer that was `late_s` seconds late."""
        self.answers += 1
        self.worst_s = max(self.worst_s, late_s)
        self.late += late_s > LATE_S


class PacedConnection:
    """A connection as slow as a modelled link.

    Messages are received from the real connection slightly ahead of the model, and sent on it when
    they would arrive. So the latency delays each message once.

    Args:
        connection: the real connection.
        down, up: the modelled links.
        clock: the emulated time.
        observe: called with every message.
        device: the device's number, for observers.
    """

    def __init__(
        self,
        connection: Connection,
        down: Link,
        up: Link,
        clock: Clock,
        observe: Callable[[Activity], None] | None = None,
        device: int = 0,
    ) -> None:
        self._connection = connection
        self._down = down
        self._up = up
        self._clock = clock
        self._observe = observe
        self._device = device
        self._inbox: asyncio.Queue[tuple[float, bytes | Exception]] = asyncio.Queue()
        self._outbox: asyncio.Queue[tuple[float, Sequence[Buffer]]] = asyncio.Queue()
        self._failure: Exception | None = None
        self._tasks = [
            asyncio.create_task(self._take_in()),
            asyncio.create_task(self._give_out()),
        ]

    async def receive(self) -> bytes:
        """Return the next message when it would arrive (`Connection.receive`)."""
        arrives_s, data = await self._inbox.get()
        await self._clock.sleep_until(arrives_s)
        if isinstance(data, Exception):
            raise data
        return data

    async def send(self, parts: Sequence[Buffer]) -> int:
        """Queue a message; return its size in bytes once it has left (`Connection.send`)."""
        if self._failure is not None:
            raise self._failure
        nbytes = sum(len(part) for part in parts)
        times = await self._transmit(self._up, nbytes)
        if self._observe is not None:
            self._note(Direction.UP, b"".join(parts), times)
        self._outbox.put_nowait((times[-1], parts))
        await self._clock.sleep_until(self._up.free_s)
        return nbytes

    async def answers(self, within_s: float) -> bool:
        """Return whether the real connection answers in time, without the link's delays."""
        return await self._connection.answers(within_s)

    async def close(self) -> None:
        """End the connection; messages that have left still arrive."""
        self._tasks[0].cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await self._outbox.join()
        self._tasks[1].cancel()
        await self._connection.close()

    async def _take_in(self) -> None:
        try:
            while True:
                data = await self._connection.receive()
                times = await self._transmit(self._down, len(data))
                if self._observe is not None:
                    self._note(Direction.DOWN, data, times)
                self._inbox.put_nowait((times[-1], data))
                await self._clock.sleep_until(self._down.free_s - AHEAD_S)
        except (ConnectionLostError, ProtocolError) as error:
            self._inbox.put_nowait((0.0, error))

    async def _give_out(self) -> None:
        while True:
            arrives_s, parts = await self._outbox.get()
            await self._clock.sleep_until(arrives_s)
            try:
                await self._connection.send(parts)
            except (ConnectionLostError, ProtocolError) as error:
                self._failure = error
            finally:
                self._outbox.task_done()

    async def _transmit(self, link: Link, nbytes: int) -> tuple[float, float, float, float]:
        now_s = self._clock.now_s()
        if not link.shared:
            return now_s, *link.transmit(now_s, nbytes)
        passed: list[tuple[float, float]] = []
        departure = Departure(nbytes, lambda begin_s, end_s: passed.append((begin_s, end_s)))
        while not passed:  # a piece queues at the bottleneck only when it gets there
            await self._clock.sleep_until(link.free_s)
            departure.depart(link, self._clock.now_s())
        ((begin_s, end_s),) = passed
        return now_s, begin_s, end_s, link.arrival_s(end_s)

    def _note(
        self, direction: Direction, data: bytes, times: tuple[float, float, float, float]
    ) -> None:
        assert self._observe is not None
        at_s, begin_s, end_s, arrives_s = times
        message = decode(data)
        if isinstance(message, _WITH_ARRAYS):
            message.payload = None  # an observer may keep the message
        self._observe(
            Transfer(at_s, self._device, direction, message, len(data), begin_s, end_s, arrives_s)
        )


class PacedComputer:
    """A computer that answers when the modelled device would.

    Args:
        processor: the modelled processor.
        backend: multiplies; None returns zeros, if results do not matter.
        pool: the threads that all devices of this process share.
        clock: the emulated time.
        lateness: counts late answers.
        observe: called with every multiplication.
        device: the device's number, for observers.
    """

    def __init__(
        self,
        processor: EmulatedProcessor,
        backend: MatmulBackend | None,
        pool: Pool,
        clock: Clock,
        lateness: Lateness,
        observe: Callable[[Activity], None] | None = None,
        device: int = 0,
    ) -> None:
        self._processor = processor
        self._backend = backend
        self._pool = pool
        self._clock = clock
        self._lateness = lateness
        self._observe = observe
        self._device = device
        self._closed = False
        self._last_graph: Future[None] | None = None

    def start(self, order: Order, done: Callable[[Order, Outcome], None]) -> None:
        """Begin an order; call `done` when the modelled device would have finished it."""
        now_s = self._clock.now_s()
        begin_s, end_s = self._processor.run(order, now_s)
        done_then = execution(self._device, order, begin_s, end_s)
        if self._observe is not None and done_then is not None:
            self._observe(done_then)
        loop = asyncio.get_running_loop()

        def computed(outcome: Outcome) -> None:
            if not self._closed:
                self._clock.call_at(end_s, lambda: answer(outcome))

        def answer(outcome: Outcome) -> None:
            if not self._closed:
                if order.run < FIRST_ID:  # no probe: those come all at once, and are not timed
                    self._lateness.count(self._clock.now_s() - end_s)
                told = outcome if isinstance(outcome, str) else (outcome[0], end_s - begin_s)
                done(order, told)

        backend = self._backend
        if backend is None:
            computed((memoryview(bytes(order.result_bytes)), 0.0))
            return

        # A graph may need the outputs of the one before. Threads take work in order, so that one
        # has already begun.
        before = None if isinstance(order, Compute) else self._last_graph

        def work() -> None:
            if before is not None:
                before.result()
            outcome = compute(backend, order)
            loop.call_soon_threadsafe(computed, outcome)

        begun = self._pool.submit(work)
        if not isinstance(order, Compute):
            self._last_graph = begun

    def close(self) -> None:
        """Drop all pending answers."""
        self._closed = True
