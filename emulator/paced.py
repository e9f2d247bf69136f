"""Real-time emulation: sessions over real connections, as slow as the devices' profiles.

An emulated device is the session that `cleave join` runs, with two wrappers. `PacedConnection`
delays every message until the modelled link would have delivered the message. `PacedComputer`
delays every result until the modelled device would have finished the computation. Both wrappers use
the models of virtual time. Emulated time is this machine's time multiplied by a speed factor.

A result is late if this machine finished the computation after the modelled device would have.
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
from cleave.machine.backends import Compute, MatmulBackend
from cleave.protocol import messages
from cleave.protocol.codec import Buffer, decode
from cleave.scheduler.sessions.probe import FIRST_ID
from cleave.transport.connection import Connection, ConnectionLostError
from emulator.activity import Activity, Direction, Transfer, execution
from emulator.compute import EmulatedProcessor
from emulator.links import Departure, Link

_WITH_ARRAYS: Final = messages.Put | messages.PutCoded | messages.Result | messages.ResultCoded

LATE_S: Final = 0.02
"""Tolerated lateness of a result in seconds, about the precision of a busy machine's timers."""


AHEAD_S: Final = 0.5
"""Maximum backlog of the modelled downlink, in emulated seconds. With a longer backlog, the next
message is not read from the real connection yet."""


class Clock:
    """A clock of emulated seconds since its creation: event-loop time multiplied by `speed`.

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
        """Sleep for `wait_s` emulated seconds."""
        await asyncio.sleep(wait_s / self._speed)

    async def sleep_until(self, when_s: float) -> None:
        """Sleep until an emulated time."""
        wait_s = when_s - self.now_s()
        if wait_s > 0:
            await self.sleep(wait_s)


@dataclass(slots=True)
class Lateness:
    """Lateness of the results of all emulated devices.

    Attributes:
        answers: number of results, except results of the server's probes.
        late: number of results that were more than `LATE_S` late.
        worst_s: maximum lateness of a result, in emulated seconds.
    """

    answers: int = 0
    late: int = 0
    worst_s: float = 0.0

    def count(self, late_s: float) -> None:
        """Count one result that was `late_s` emulated seconds late."""
        self.answers += 1
        self.worst_s = max(self.worst_s, late_s)
        self.late += late_s > LATE_S


class PacedConnection:
    """A connection that delays messages as a modelled link does.

    A received message is read from the real connection before the modelled link would deliver it. A
    sent message is written to the real connection at its modelled arrival time. In each direction,
    the modelled latency therefore delays a message exactly once.

    Args:
        connection: the real connection.
        down, up: the modelled downlink and uplink.
        clock: clock of emulated time.
        observe: called with a `Transfer` for every message.
        device: the device's number in the `Transfer`.
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
        """Return the next message at its modelled arrival time (`Connection.receive`)."""
        arrives_s, data = await self._inbox.get()
        await self._clock.sleep_until(arrives_s)
        if isinstance(data, Exception):
            raise data
        return data

    async def send(self, parts: Sequence[Buffer]) -> int:
        """Send a message; return its size in bytes once the modelled uplink has sent it."""
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
        """Return True if the peer answers a ping in time, without modelled delays."""
        return await self._connection.answers(within_s)

    async def close(self) -> None:
        """Close the connection; wait up to 1 s until all sent messages have arrived."""
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
        while not passed:  # each piece reserves the bottleneck only after the previous piece
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
    """A `Computer` that returns each result when the modelled device would finish it.

    Args:
        processor: the modelled processor.
        backend: executes matrix multiplications; None to return zeros instead of results.
        pool: thread pool that all devices of this process share.
        clock: clock of emulated time.
        lateness: counts late results.
        observe: called with a record of every matrix multiplication and graph run.
        device: the device's number in these records.
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
        """Start an order; call `done` when the modelled device would have finished the order."""
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
                if order.run < FIRST_ID:  # skip probes, which arrive all at once
                    self._lateness.count(self._clock.now_s() - end_s)
                told = outcome if isinstance(outcome, str) else (outcome[0], end_s - begin_s)
                done(order, told)

        backend = self._backend
        if backend is None:
            computed((memoryview(bytes(order.result_bytes)), 0.0))
            return

        # A graph may need the outputs of the previous graph. The pool starts tasks in order, so
        # the previous graph has already begun.
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
        """Discard the results of all pending orders."""
        self._closed = True
