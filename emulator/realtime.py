"""A fleet of real-time emulated devices that joins a running parameter server.

Each device has its own agent, as in `cleave join`, and its own WebSocket connection. The server
cannot distinguish an emulated device from a phone. All devices share the event loop, the threads
and the backend of this process.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from cleave.device.agent import DRAIN_S, Agent, Look, Notice, ServerSelection
from cleave.device.host.policy import Cause, Permission
from cleave.device.session import DeviceSession, RefusedError
from cleave.errors import CleaveError, UsageError
from cleave.machine.backends import MatmulBackend
from cleave.protocol.device_counters import DeviceCounters
from cleave.protocol.messages import ErrorCode, Feature, Welcome
from cleave.transport.connection import open_connection
from cleave.transport.join_url import JoinUrl
from emulator.activity import Activity, Presence
from emulator.compute import EmulatedProcessor
from emulator.links import SharedLines, links_of
from emulator.paced import Clock, Lateness, PacedComputer, PacedConnection
from emulator.virtual import hello_of
from profiles.availability import Availability
from profiles.fleet_device import FleetDevice

_SPARE_DESCRIPTORS: Final = 64
_JOINING_AT_ONCE: Final = 32
_ASKING_AT_ONCE: Final = 8  # concurrent handshakes; fewer than the refusals that a server tolerates


@dataclass(slots=True)
class RealTimeCounters:
    """Counters of a real-time fleet since its start.

    Attributes:
        connected: number of sessions that the server has welcomed and that have not ended.
        joined, left: number of times that a device joined, and that a device left.
        done: blocks, FLOPs and bytes of all sessions, ended and current.
        lateness: lateness of the devices' results.
    """

    connected: int = 0
    joined: int = 0
    left: int = 0
    done: DeviceCounters = field(default_factory=DeviceCounters)
    lateness: Lateness = field(default_factory=Lateness)


def need_descriptors(devices: int) -> None:
    """Raise the limit of open files so that this process can open a connection per device.

    Raises:
        UsageError: when the hard limit is too low. The message says how to raise the hard limit.
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
                f"{devices} devices need {needed} file descriptors and this process may have "
                f"{hard}; raise the limit (ulimit -n {needed}, as root or in limits.conf), or "
                f"emulate fewer devices"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


class _Session(DeviceSession):
    """A session of an emulated device, which does not reconnect after the server's `bye`.

    Attributes:
        over: callbacks that run when the session ends.
    """

    over: ExitStack

    @property
    def comes_back_s(self) -> float | None:
        """Return None (never) after the server's `bye`; 0 without `bye`, or after a redirect."""
        return 0.0 if self.bye is None or self.moves_to else None

    async def run(self) -> str:
        """Run the session, then the callbacks of `over`; return why the session ended."""
        with self.over:
            return await super().run()


class RealTimeFleet:
    """Emulated devices that join a server and take as long as the modelled devices would.

    Args:
        devices: the devices to emulate.
        target: join URL of the server.
        backend: executes the matrix multiplications of all devices; None to return zeros instead of
            results.
        speed: emulated seconds per real second.
        seed: seed of jitter, drift and the presence of devices.
        start_hour: hour of the day at emulated time 0, for devices with daily hours.
        threads: number of threads that execute matrix multiplications.

    Attributes:
        observers: functions that are called with every activity of every device. Times are in
            emulated seconds.
        notes: for each reason, how often a device could not join or lost its connection.
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
        self._refusal: RefusedError | None = None  # of the shared credential, by the server
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
        """Run the devices until all have left permanently; cancel this coroutine to end earlier.

        Raises:
            CleaveError: when no device can join. The message has the reason.
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
        """Run one device, which reconnects until the server sends `bye` or refuses it for good."""
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
        """Return a function that reports if the device is present, and when that changes."""
        rng = random.Random(f"{self._seed} presence {number} {device.name}")
        presences = stays.presences(rng, self._start_hour)
        stay = next(presences)

        async def look() -> Permission:
            nonlocal stay
            now_s = self._clock.now_s()
            while now_s >= stay.to_s:
                stay = next(presences)
            if now_s < stay.from_s:
                return Permission(Cause.OWNER, "its stay is over", stay.from_s)
            return Permission(None, "", stay.to_s)

        return look

    async def _connect(
        self,
        number: int,
        device: FleetDevice,
        server_selection: ServerSelection,
        ready: Callable[[int], None],
    ) -> DeviceSession:
        """Open a session, once fewer than `_JOINING_AT_ONCE` devices are joining."""
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
            observe = self._tell if self.observers else None
            connection = PacedConnection(real, down, up, clock, observe, number)
            computer = PacedComputer(
                EmulatedProcessor(device, now_s),
                self._backend,
                self._pool,
                clock,
                self._lateness,
                observe,
                number,
            )

            def joined(id: int) -> None:
                self._sessions[number] = session
                self._ended.joined += 1
                self._tell(Presence(clock.now_s(), number, device.name, True))
                session.over.close()  # let another device join
                session.over.callback(self._finish, number, session, device)
                ready(id)

            def keep(welcome: Welcome) -> None:
                asked.close()  # let another device ask
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
