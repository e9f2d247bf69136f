"""Emulated devices come, go and come back on simulated time: no test waits for real."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import pytest

from cleave.device.agent import DRAIN_S
from cleave.errors import CleaveError
from cleave.protocol import messages
from cleave.protocol.codec import decode, encode
from cleave.protocol.messages import ByeCode, ErrorCode
from cleave.transport.connection import ConnectionLostError
from cleave.transport.join_url import JoinUrl, parse_join_url
from emulator import realtime
from emulator.activity import Activity, Presence
from emulator.realtime import RealTimeFleet
from profiles.availability import Availability, Durations
from profiles.fleet_device import FleetDevice
from tests.emulator.test_paced import simulate
from tests.memory_link import MemoryConnection, memory_link

DEVICE = FleetDevice("test", 1e10, 1e7, 1e7, 0.002, 2**30)
TARGET = parse_join_url("ws://127.0.0.1:1/ws#c=x")
SPEED = 4.0


class Server:
    """Welcomes devices, gives them no work, and says goodbye to those that drain.

    Args:
        says_bye: whether it answers those that drain.
        welcome_s: how long it thinks before it welcomes a device, in simulated seconds.
        uses: how many devices its join code lets in.
    """

    def __init__(self, *, says_bye: bool = True, welcome_s: float = 0.0, uses: int = 10**9) -> None:
        self.drained = 0
        self.unanswered: list[Exception] = []  # connections that are refused next
        self.credentials: list[str] = []
        self.uses = uses
        self.joining = 0
        self.most_joining = 0
        self.links: list[MemoryConnection] = []
        self._says_bye = says_bye
        self._welcome_s = welcome_s
        self._serving: list[asyncio.Task[None]] = []

    async def connect(self, target: JoinUrl) -> MemoryConnection:
        """Open a connection, as `open_connection` does."""
        if self.unanswered:
            raise self.unanswered.pop()
        near, far = memory_link()
        self.links.append(near)
        self.joining += 1
        self.most_joining = max(self.most_joining, self.joining)
        self._serving.append(asyncio.create_task(self._serve(near)))
        return far

    async def _serve(self, link: MemoryConnection) -> None:
        try:
            while True:
                match decode(await link.receive()):
                    case messages.Hello() as hello:
                        self.credentials.append(hello.credential)
                        await asyncio.sleep(self._welcome_s)
                        self.joining -= 1
                        if hello.credential == "x" and not self.uses:
                            error = messages.Error(ErrorCode.CREDENTIAL, "it has been used")
                            await link.send(encode(error))
                            continue
                        self.uses -= 1
                        await link.send(encode(messages.Welcome(1, credential="its own")))
                    case messages.Drain():
                        self.drained += 1
                        if self._says_bye:
                            await link.send(encode(messages.Bye("drained", ByeCode.DRAINED)))
        except ConnectionLostError:
            pass


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[RealTimeFleet, list[Presence]]]:
    """Return a function that runs devices on a server for some emulated seconds."""

    def run(
        server: Server,
        devices: Sequence[FleetDevice],
        for_s: float,
        then: Callable[[], Awaitable[None]] | None = None,
        more_s: float = 0.0,
    ) -> tuple[RealTimeFleet, list[Presence]]:
        monkeypatch.setattr(realtime, "open_connection", server.connect)
        seen: list[Presence] = []

        def observe(activity: Activity) -> None:
            if isinstance(activity, Presence):
                seen.append(activity)

        async def scenario() -> RealTimeFleet:
            fleet = RealTimeFleet(devices, TARGET, None, speed=SPEED)
            fleet.observers.append(observe)
            running = asyncio.create_task(fleet.run())
            await asyncio.wait([running], timeout=for_s / SPEED)
            if then is not None:
                await then()
                await asyncio.wait([running], timeout=more_s / SPEED)
            running.cancel()
            await asyncio.wait([running])
            if not running.cancelled():
                running.result()
            return fleet

        return simulate(scenario()), seen

    return run


Run = Callable[..., tuple[RealTimeFleet, list[Presence]]]


@pytest.mark.parametrize(
    ("drains", "says_bye", "later_s"),
    [(False, True, 0.0), (True, True, 0.0), (True, False, DRAIN_S)],
)
def test_devices_come_and_go_when_their_availability_says_so(
    run: Run, drains: bool, says_bye: bool, later_s: float
) -> None:
    availability = Availability(Durations(100.0), Durations(400.0), drains=drains)
    server = Server(says_bye=says_bye)
    fleet, seen = run(server, [replace(DEVICE, availability=availability)], 4000.0)
    presences = availability.presences(random.Random("0 presence 1 test"))
    expected = []
    for from_s, to_s in presences:
        if to_s + later_s > 4000:
            break
        expected += [(from_s, True), (to_s + later_s, False)]
    assert len(expected) >= 8
    found = [(p.at_s, p.here) for p in seen[: len(expected)]]
    assert [here for _, here in found] == [here for _, here in expected]
    # It needs a moment to connect, and to say goodbye; and no look every few seconds.
    assert [s for s, _ in found] == pytest.approx([s for s, _ in expected], abs=0.1)
    assert server.drained == (len(expected) // 2 if drains else 0)
    assert not fleet.notes


def test_few_devices_join_at_once(run: Run) -> None:
    server = Server(welcome_s=1.0)
    fleet, _ = run(server, [DEVICE] * 70, 60.0)
    assert server.most_joining == 8
    assert fleet.counters().joined == 70


def test_a_join_code_that_is_used_up_is_not_tried_on_and_on(run: Run) -> None:
    server = Server(welcome_s=1.0, uses=20)
    fleet, _ = run(server, [DEVICE] * 200, 60.0)
    assert fleet.counters().joined == 20
    assert len(server.credentials) <= 20 + 8  # those that asked at the same time
    assert fleet.notes == {"the server refused this device: it has been used": 180}


def test_a_device_that_is_lost_comes_back_with_its_own_credential(run: Run) -> None:
    server = Server()

    async def break_one() -> None:
        server.unanswered = [CleaveError("no server answers")] * 2
        await server.links[0].close()

    fleet, seen = run(server, [DEVICE] * 3, 10.0, break_one, 60.0)
    assert [p.here for p in seen[:5]] == [True, True, True, False, True]
    assert fleet.notes == {"the connection was closed": 1, "no server answers": 2}
    assert server.credentials == ["x", "x", "x", "its own"]
    counted = fleet.counters()
    assert (counted.connected, counted.joined, counted.left) == (0, 4, 4)


def test_if_nobody_can_join_it_says_why(run: Run) -> None:
    server = Server()
    server.unanswered = [CleaveError("no server answers")] * 3
    with pytest.raises(CleaveError, match="no server answers"):
        run(server, [DEVICE] * 3, 10.0)
