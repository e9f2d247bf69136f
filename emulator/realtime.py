"""Emulated devices that join a running parameter server and work in real time.

An emulated device runs the same session as `cleave join`. One wrapper delays each message until
the modelled link would have delivered it. Another wrapper delays each result until the modelled
processor would have computed it. The server handles emulated and real devices in the same way.
Emulated time is this machine's time multiplied by a speed factor.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor as Pool
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from cleave.device.agent import DRAIN_S, Agent, Look, Notice, ServerSelection
from cleave.device.compute_thread import Outcome, compute
from cleave.device.core import Order
from cleave.device.policy import Cause, Permission
from cleave.device.session import DeviceSession, RefusedError
from cleave.errors import CleaveError, ProtocolError, UsageError
from cleave.machine.backends import Compute, MatmulBackend
from cleave.machine.graph_choice import open_in_process
from cleave.protocol import limits, messages
from cleave.protocol.codec import Buffer, decode, encode
from cleave.protocol.device_counters import DeviceCounters
from cleave.protocol.messages import ErrorCode, Feature, Welcome
from cleave.scheduler.sessions.probe import FIRST_ID
from cleave.transport.connection import Connection, ConnectionLostError, open_connection
from cleave.transport.join_url import JoinUrl
from emulator.activity import Activity, Direction, Presence, Transfer, execution
from emulator.device_model import Departure, EmulatedProcessor, Link, SharedLines, links_of
from emulator.virtual import hello_of
from profiles.availability import Availability
from profiles.fleet_device import FleetDevice

_WITH_ARRAYS: Final = messages.Put | messages.PutCoded | messages.Result | messages.ResultCoded

_RESULT_BYTES: Final = 64 * 1024  # only results are this long; they follow the welcome
LATE_S: Final = 0.02  # tolerated lateness: about the timer precision of a busy machine
AHEAD_S: Final = 0.5  # reading pauses while the modelled downlink is further behind than this


class Clock:
    """A clock that starts at 0 s and runs `speed` times as fast as the event loop's clock."""

    def __init__(self, speed: float = 1.0) -> None:
        self._loop = asyncio.get_running_loop()
        self._begin_s = self._loop.time()
        self._speed = speed

    def now_s(self) -> float:
        """Return the emulated time in seconds."""
        return (self._loop.time() - self._begin_s) * self._speed

    def call_at(self, when_s: float, what: Callable[[], None]) -> asyncio.TimerHandle:
        """Schedule a call to `what` at the emulated time `when_s`."""
        return self._loop.call_at(self._begin_s + when_s / self._speed, what)

    async def sleep(self, wait_s: float) -> None:
        """Sleep for `wait_s` emulated seconds."""
        await asyncio.sleep(wait_s / self._speed)

    async def sleep_until(self, when_s: float) -> None:
        """Sleep until the emulated time `when_s`."""
        wait_s = when_s - self.now_s()
        if wait_s > 0:
            await self.sleep(wait_s)


@dataclass(slots=True)
class Lateness:
    """Lateness of the results of all emulated devices. Results of server probes do not count.

    `answers` counts all results, and `late` counts results that were more than `LATE_S` late.
    `worst_s` is the maximum lateness. Times are in emulated seconds.
    """

    answers: int = 0
    late: int = 0
    worst_s: float = 0.0

    def count(self, late_s: float) -> None:
        """Count one result that is `late_s` emulated seconds late."""
        self.answers += 1
        self.worst_s = max(self.worst_s, late_s)
        self.late += late_s > LATE_S


class PacedConnection:
    """A connection that delays messages as a modelled link would.

    It reads each incoming message early but returns the message at the modelled arrival time. It
    writes each outgoing message to the real connection at the modelled arrival time. Until then,
    the server receives no part of the message. While the modelled link sends a long result, the
    connection therefore sends heartbeats.
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
        self._tasks = [asyncio.create_task(self._take_in()), asyncio.create_task(self._give_out())]

    async def receive(self) -> bytes:
        """Wait for the next message and return it at its modelled arrival time."""
        arrives_s, data = await self._inbox.get()
        await self._clock.sleep_until(arrives_s)
        if isinstance(data, Exception):
            raise data
        return data

    async def send(self, parts: Sequence[Buffer]) -> int:
        """Send a message; wait until the modelled uplink has sent it; return its size in bytes."""
        if self._failure is not None:
            raise self._failure
        nbytes = sum(len(part) for part in parts)
        carried = asyncio.ensure_future(self._carry_up(parts, nbytes))
        try:
            while not (await asyncio.wait({carried}, timeout=limits.HEARTBEAT_S))[0]:
                if nbytes >= _RESULT_BYTES:
                    await self._connection.send(encode(messages.Heartbeat()))
        finally:
            carried.cancel()
        await carried
        return nbytes

    async def _carry_up(self, parts: Sequence[Buffer], nbytes: int) -> None:
        times = await self._transmit(self._up, nbytes)
        if self._observe is not None:
            self._note(Direction.UP, b"".join(parts), times)
        self._outbox.put_nowait((times[-1], parts))
        await self._clock.sleep_until(self._up.free_s)

    async def answers(self, within_s: float) -> bool:
        """Return True if the peer answers an undelayed ping within `within_s` real seconds."""
        return await self._connection.answers(within_s)

    async def close(self) -> None:
        """Wait at most 1 s for all sent messages to arrive, then close the connection."""
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
        while not passed:  # a piece reserves the bottleneck only after the previous piece was sent
            await self._clock.sleep_until(link.free_s)
            departure.depart(link, self._clock.now_s())
        ((begin_s, end_s),) = passed
        return now_s, begin_s, end_s, link.arrival_s(end_s)

    def _note(
        self, direction: Direction, data: bytes, times: tuple[float, float, float, float]
    ) -> None:
        if self._observe is None:
            return
        at_s, *later_s = times
        message = decode(data)
        if isinstance(message, _WITH_ARRAYS):
            message.payload = None  # observers may store the message
        self._observe(Transfer(at_s, self._device, direction, message, len(data), *later_s))


@dataclass(slots=True)
class PacedComputer:
    """A `Computer` that returns results (zeros without a backend) at the modelled times."""

    processor: EmulatedProcessor
    backend: MatmulBackend | None
    pool: Pool
    clock: Clock
    lateness: Lateness
    observe: Callable[[Activity], None] | None = None
    device: int = 0
    _closed: bool = False
    _last_graph: Future[None] | None = None

    def start(self, order: Order, done: Callable[[Order, Outcome], None]) -> None:
        """Start a task; call `done` when the modelled device would have finished the task."""
        now_s = self.clock.now_s()
        begin_s, end_s = self.processor.run(order, now_s)
        done_then = execution(self.device, order, begin_s, end_s)
        if self.observe is not None and done_then is not None:
            self.observe(done_then)
        loop = asyncio.get_running_loop()

        def computed(outcome: Outcome) -> None:
            if not self._closed:
                self.clock.call_at(end_s, lambda: answer(outcome))

        def answer(outcome: Outcome) -> None:
            if not self._closed:
                if order.run < FIRST_ID:  # probes do not count: they all arrive at once
                    self.lateness.count(self.clock.now_s() - end_s)
                told = outcome if isinstance(outcome, str) else (outcome[0], end_s - begin_s)
                done(order, told)

        if (backend := self.backend) is None:
            computed((memoryview(bytes(order.result_bytes)), 0.0))
            return

        # A graph may need the outputs of the previous graph. The pool starts tasks in order, so
        # the previous graph has already begun.
        before = None if isinstance(order, Compute) else self._last_graph

        def work() -> None:
            if before is not None:
                before.result()
            outcome = compute(backend, order, open_in_process)
            loop.call_soon_threadsafe(computed, outcome)

        begun = self.pool.submit(work)
        if not isinstance(order, Compute):
            self._last_graph = begun

    def close(self) -> None:
        """Discard the results of all pending tasks."""
        self._closed = True


_SPARE_DESCRIPTORS: Final = 64
_JOINING_AT_ONCE: Final = 32
_ASKING_AT_ONCE: Final = 8  # concurrent handshakes; fewer than the refusals that a server tolerates


@dataclass(slots=True)
class RealTimeCounters:
    """Counters of a real-time fleet since its start.

    `connected` counts the current sessions, `joined` all sessions that have begun, and `left` all
    sessions that have ended. `done` contains the total work of all sessions.
    """

    connected: int = 0
    joined: int = 0
    left: int = 0
    done: DeviceCounters = field(default_factory=DeviceCounters)
    lateness: Lateness = field(default_factory=Lateness)


def need_descriptors(devices: int) -> None:
    """Ensure that this process may open enough file descriptors for `devices` devices.

    Raises:
        UsageError: if the hard limit on file descriptors is too low.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    needed = devices + _SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise UsageError(
                f"{devices} devices need {needed} file descriptors, but this process may open only "
                f"{hard}; raise the limit (ulimit -n {needed}, as root or in limits.conf), or "
                f"emulate fewer devices"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


class _Session(DeviceSession):
    """A session that runs the callbacks in `over` when the session ends."""

    over: ExitStack

    @property
    def comes_back_s(self) -> float | None:
        """Return 0 to reconnect at once, or None (never) after a `bye` without a new server."""
        return 0.0 if self.bye is None or self.moves_to else None

    async def run(self) -> str:
        """Run the session, then the callbacks in `over`; return why the session ended."""
        with self.over:
            return await super().run()


class RealTimeFleet:
    """Emulated devices that join a server and work at modelled speeds.

    Args:
        backend: executes the matrix multiplications of all devices; None to return zeros.
        speed: emulated seconds per real second. Observers receive emulated times.
        seed: random seed for jitter, drift, reconnect delays and the devices' availability.
        start_hour: hour of the day at emulated time 0, for devices with daily presence hours.
        threads: number of threads that execute matrix multiplications.

    Attributes:
        observers: functions that the fleet calls with every activity of every device.
        notes: number of failed joins and lost connections for each reason.
    """

    def __init__(
        self,
        devices: Sequence[FleetDevice],
        target: JoinUrl,
        backend: MatmulBackend | None,
        *,
        speed: float = 1.0,
        seed: int = 0,
        start_hour: float = 0.0,
        threads: int = 1,
    ) -> None:
        self.observers: list[Callable[[Activity], None]] = []
        self.notes: Counter[str] = Counter()
        self._devices = devices
        self._target = target
        self._backend = backend
        self._speed = speed
        self._seed = seed
        self._start_hour = start_hour
        self._pool = ThreadPoolExecutor(threads, "cleave-emulator")
        self._lines = SharedLines()
        self._sessions: dict[int, DeviceSession] = {}
        self._credentials: dict[int, str] = {}  # credentials from the server, by device number
        self._refusal: RefusedError | None = None  # why the shared credential is void
        self._ended = RealTimeCounters()
        self._lateness = Lateness()

    def counters(self) -> RealTimeCounters:
        """Return a snapshot of the counters."""
        now, ended = list(self._sessions.values()), self._ended
        return RealTimeCounters(
            connected=len(now),
            joined=ended.joined,
            left=ended.left,
            done=sum((session.status.done for session in now), ended.done),
            lateness=self._lateness,
        )

    async def run(self) -> None:
        """Run the devices until all have left.

        Raises:
            CleaveError: if a device is refused or fails permanently before any device has joined.
        """
        self._clock = Clock(self._speed)
        self._joining = asyncio.Semaphore(_JOINING_AT_ONCE)
        self._asking = asyncio.Semaphore(_ASKING_AT_ONCE)
        try:
            async with asyncio.TaskGroup() as group:
                for number, device in enumerate(self._devices, 1):
                    group.create_task(self._live(number, device))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)

    async def _live(self, number: int, device: FleetDevice) -> None:
        """Run one device, which reconnects until it receives a `bye` or a permanent refusal."""
        stays = device.availability

        def say(notice: Notice) -> None:
            if notice.retry_s is not None:
                self.notes[notice.reason] += 1

        agent = Agent(
            partial(self._connect, number, device, ServerSelection()),
            say,
            look=self._presence(number, device, stays) if stays is not None else None,
            stays=False,
            known=lambda: self._ended.joined > 0,
            drain_s=DRAIN_S if stays is not None and stays.drains else 0.0,
            clock=self._clock.now_s,
            sleep=self._clock.sleep,
            jitter=random.Random(f"{self._seed} retry {number} {device.name}").random,
        )
        try:
            await agent.run()
        except CleaveError as error:
            if not self._ended.joined:  # no device has joined: show the reason
                raise
            if isinstance(error, RefusedError) and error.code is ErrorCode.CREDENTIAL:
                self._refusal = error
            self.notes[str(error)] += 1

    def _presence(self, number: int, device: FleetDevice, stays: Availability) -> Look:
        """Return a function that reports whether the device is present, and when that changes."""
        rng = random.Random(f"{self._seed} presence {number} {device.name}")
        presences = stays.presences(rng, self._start_hour)
        stay = next(presences)

        async def look() -> Permission:
            nonlocal stay
            now_s = self._clock.now_s()
            while now_s >= stay.to_s:
                stay = next(presences)
            if now_s < stay.from_s:
                return Permission(Cause.OWNER, "its session is over", stay.from_s)
            return Permission(None, "", stay.to_s)

        return look

    async def _connect(
        self,
        number: int,
        device: FleetDevice,
        server_selection: ServerSelection,
        ready: Callable[[int], None],
    ) -> DeviceSession:
        """Wait while too many devices are joining or in a handshake, then open a session."""
        await self._joining.acquire()
        await self._asking.acquire()
        with ExitStack() as joining, ExitStack() as asking:
            joining.callback(self._joining.release)
            asking.callback(self._asking.release)
            # The join code is used up, and a server blocks clients that retry a refused credential.
            if self._refusal is not None and number not in self._credentials:
                raise self._refusal
            real = await server_selection.open(self._target, open_connection)
            rng = random.Random(f"{self._seed} link {number} {device.name}")
            clock, now_s = self._clock, self._clock.now_s()
            down, up = links_of(device, rng, self._lines, now_s)
            told = self._tell if self.observers else None, number
            connection = PacedConnection(real, down, up, clock, *told)
            processor = EmulatedProcessor(device, now_s)
            computer = PacedComputer(
                processor, self._backend, self._pool, clock, self._lateness, *told
            )

            def joined(id: int) -> None:
                self._sessions[number] = session
                self._ended.joined += 1
                self._tell(Presence(clock.now_s(), number, device.name, True))
                session.over.close()  # let another device join
                session.over.callback(self._finish, number, session, device)
                ready(id)

            def keep(welcome: Welcome) -> None:
                asked.close()  # let another device start its handshake
                if welcome.credential:  # use this credential, because the join code may be used up
                    self._credentials[number] = welcome.credential

            credential = self._credentials.get(number, self._target.credential)
            hello = hello_of(device, credential)
            # Only a real-time device can follow a redirect to another server.
            hello.features = (*hello.features, Feature.MOVES.value)
            session = _Session(connection, computer, hello, joined, on_welcome=keep)
            asked = asking.pop_all()
            joining.push(asked)
            session.over = joining.pop_all()
            server_selection.at(session)
        return session

    def _finish(self, number: int, session: DeviceSession, device: FleetDevice) -> None:
        del self._sessions[number]
        self._ended.left += 1
        self._ended.done += session.status.done
        self._tell(Presence(self._clock.now_s(), number, device.name, False))

    def _tell(self, activity: Activity) -> None:
        for observer in self.observers:
            observer(activity)
