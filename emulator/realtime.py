"""A fleet of real-time emulated devices against a running parameter server.

Every device has a session and a WebSocket of its own; the server cannot tell it from a phone. All
devices share this process: its event loop, its threads and its backend.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

from cleave.device.agent import DRAIN_S
from cleave.device.session import DeviceSession, RefusedError
from cleave.errors import CleaveError, UsageError
from cleave.machine.backends import MatmulBackend
from cleave.transport.connect import open_connection
from cleave.transport.join_url import JoinUrl
from emulator.activity import Activity, Presence
from emulator.compute import EmulatedProcessor
from emulator.links import SharedLines, links_of
from emulator.paced import Clock, Lateness, PacedComputer, PacedConnection
from emulator.virtual import hello_of
from profiles.availability import PresencePeriod as Stay
from profiles.fleet_device import FleetDevice

_SPARE_DESCRIPTORS: Final = 64
_JOINING_AT_ONCE: Final = 32
_FIRST_PAUSE_S: Final = 1.0  # before a lost device comes back
_LONGEST_PAUSE_S: Final = 60.0


@dataclass(slots=True)
class RealTimeCounters:
    """What the devices have done so far.

    Attributes:
        connected: sessions that have been welcomed and not ended.
        joined, left: how often devices joined and left.
        blocks, flops: of the tasks that were answered.
        received_bytes, sent_bytes: of all sessions.
        lateness: how late their answers were.
    """

    connected: int = 0
    joined: int = 0
    left: int = 0
    blocks: int = 0
    flops: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0
    lateness: Lateness = field(default_factory=Lateness)


def need_descriptors(devices: int) -> None:
    """Ensure that this process may open a connection for every device.

    Raises:
        UsageError: when it may not; says how to raise the limit.
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


class RealTimeFleet:
    """Emulated devices that join a server, pace themselves and leave.

    Args:
        devices: the fleet.
        target: the server to join.
        backend: multiplies for all devices; None returns zeros, if results do not matter.
        speed: emulated seconds in one real one.
        seed: seeds jitter, drift and presence.
        start_hour: the hour of the day at time zero, for devices with hours of their own.
        threads: how many threads multiply.

    Attributes:
        observers: called with every activity of every device, times in emulated seconds.
        notes: how often devices could not join or were lost, by reason.
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
        self.notes: dict[str, int] = {}
        self._devices = devices
        self._target = target
        self._backend = backend
        self._speed = speed
        self._seed = seed
        self._start_hour = start_hour
        self._pool = ThreadPoolExecutor(threads, "cleave-emulator")
        self._lines = SharedLines()
        self._sessions: dict[int, DeviceSession] = {}
        self._credentials: dict[int, str] = {}  # by device, where the server gave it its own
        self._ended = RealTimeCounters()
        self._lateness = Lateness()

    def counters(self) -> RealTimeCounters:
        """Return the counters as they are now."""
        now, ended = list(self._sessions.values()), self._ended
        states = [session.status for session in now]
        return RealTimeCounters(
            connected=sum(session.core.welcome is not None for session in now),
            joined=ended.joined,
            left=ended.left,
            blocks=ended.blocks + sum(s.blocks for s in states),
            flops=ended.flops + sum(s.flops for s in states),
            received_bytes=ended.received_bytes + sum(s.received_bytes for s in states),
            sent_bytes=ended.sent_bytes + sum(s.sent_bytes for s in states),
            lateness=self._lateness,
        )

    async def run(self) -> None:
        """Run the devices until all have left for good; cancel it to end sooner.

        Raises:
            CleaveError: when no device can join; says why.
        """
        self._clock = Clock(self._speed)
        self._joining = asyncio.Semaphore(_JOINING_AT_ONCE)
        tasks = [
            asyncio.create_task(self._live(number, device))
            for number, device in enumerate(self._devices, 1)
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                if not task.cancelling():  # a second time would interrupt its goodbye
                    task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._pool.shutdown(wait=False, cancel_futures=True)

    async def _live(self, number: int, device: FleetDevice) -> None:
        """Run all stays of one device; a lost device comes back, until the server says bye."""
        rng = random.Random(f"{self._seed} retry {number} {device.name}")
        for stay in self._stays(number, device):
            await self._clock.sleep_until(stay.from_s)
            pause_s = _FIRST_PAUSE_S
            while self._clock.now_s() < stay.to_s:
                try:
                    session, reason = await self._stay(number, device, stay.to_s)
                except CleaveError as error:
                    if not self._ended.joined:  # nobody got in: the user wants to know why
                        raise
                    reason = str(error)
                    if isinstance(error, RefusedError) and error.for_good:
                        self.notes[reason] = self.notes.get(reason, 0) + 1
                        return
                else:
                    # A device that drained is told goodbye as well; it comes again.
                    if session.bye is not None and not session.core.draining:
                        return
                    pause_s = _FIRST_PAUSE_S
                if self._clock.now_s() >= stay.to_s:
                    break
                self.notes[reason] = self.notes.get(reason, 0) + 1
                await asyncio.sleep(pause_s * rng.uniform(0.5, 1.5))
                pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)

    def _stays(self, number: int, device: FleetDevice) -> Iterator[Stay]:
        if device.availability is None:
            yield Stay(0.0, math.inf)
        else:
            rng = random.Random(f"{self._seed} presence {number} {device.name}")
            yield from device.availability.presences(rng, self._start_hour)

    async def _stay(
        self, number: int, device: FleetDevice, until_s: float
    ) -> tuple[DeviceSession, str]:
        """Run one session; return it and why it ended."""
        async with self._joining:
            real = await open_connection(self._target)
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
            welcomed = asyncio.Event()
            session = DeviceSession(
                connection,
                computer,
                hello_of(device, self._credentials.get(number, self._target.credential)),
                lambda _: welcomed.set(),
            )
            serving = asyncio.create_task(session.run())
            ready = asyncio.create_task(welcomed.wait())
            try:
                await asyncio.wait([serving, ready], return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                serving.cancel()
                raise
            finally:
                ready.cancel()
            if session.core.welcome is None:
                return session, serving.result()  # refused: says why
            if session.core.welcome.credential:  # for the join code, which may be used up by now
                self._credentials[number] = session.core.welcome.credential
        self._sessions[number] = session
        self._ended.joined += 1
        self._tell(Presence(clock.now_s(), number, device.name, True))
        try:
            return session, await self._serve(session, serving, device, until_s)
        finally:
            self._finish(number, session, device)

    async def _serve(
        self,
        session: DeviceSession,
        serving: asyncio.Task[str],
        device: FleetDevice,
        until_s: float,
    ) -> str:
        wait_s = (until_s - self._clock.now_s()) / self._speed
        try:
            await asyncio.wait([serving], timeout=None if math.isinf(wait_s) else max(0.0, wait_s))
            if serving.done():
                return serving.result()
            if device.availability is not None and device.availability.drains:
                session.drain()
                await asyncio.wait([serving], timeout=DRAIN_S / self._speed)  # as in `Agent`
            return "its stay is over"
        finally:
            if not serving.done():
                serving.cancel()
                await asyncio.wait([serving])

    def _finish(self, number: int, session: DeviceSession, device: FleetDevice) -> None:
        del self._sessions[number]
        status, ended = session.status, self._ended
        ended.left += 1
        ended.blocks += status.blocks
        ended.flops += status.flops
        ended.received_bytes += status.received_bytes
        ended.sent_bytes += status.sent_bytes
        self._tell(Presence(self._clock.now_s(), number, device.name, False))

    def _tell(self, activity: Activity) -> None:
        for observer in self.observers:
            observer(activity)
