"""Emulated devices come, go and come back on simulated time: no test waits for real."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Executor as Pool
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave.arrays import DType
from cleave.device.agent import DRAIN_S
from cleave.device.compute_thread import Outcome
from cleave.device.core import Order
from cleave.errors import CleaveError
from cleave.machine.backends import Compute, NumpyBackend, StoredArray
from cleave.protocol import messages
from cleave.protocol.codec import decode, encode
from cleave.protocol.messages import ByeCode, ErrorCode
from cleave.transport.connection import ConnectionLostError
from cleave.transport.join_url import JoinUrl, parse_join_url
from emulator import realtime
from emulator.activity import Activity, Direction, Multiplication, Presence, Transfer
from emulator.device_model import EmulatedProcessor, Link, Shared
from emulator.realtime import Clock, Lateness, PacedComputer, PacedConnection, RealTimeFleet
from profiles.availability import Availability, Durations
from profiles.fleet_device import FleetDevice
from tests.examples import examples
from tests.memory_link import MemoryConnection, memory_link

T = TypeVar("T")
NEAR = 1e-6


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer instead of waiting for it."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        select = self._selector.select  # type: ignore[attr-defined]

        def jump(timeout: float | None) -> Any:
            assert timeout is not None, "nothing will ever happen"
            self._now_s += timeout
            return select(0)

        self._selector.select = jump  # type: ignore[attr-defined]

    def time(self) -> float:
        """The simulated time."""
        return self._now_s


def simulate(scenario: Coroutine[Any, Any, T]) -> T:
    loop = SimulatedLoop()
    try:
        return loop.run_until_complete(scenario)
    finally:
        loop.run_until_complete(_end(asyncio.all_tasks(loop)))
        loop.close()


async def _end(tasks: set[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def link(rate: float, latency_s: float, shared: list[Shared] | None = None) -> Link:
    return Link(rate, latency_s, shared=shared or [])


class Device:
    """One paced connection, and the server's end of it."""

    def __init__(self, down: Link, up: Link, speed: float = 1.0, observe: Any = None) -> None:
        self.server, far = memory_link()
        self.clock = Clock(speed)
        self.connection = PacedConnection(far, down, up, self.clock, observe, 7)

    async def received(self, count: int) -> list[tuple[float, bytes]]:
        """What the device is given, and when."""
        found = []
        for _ in range(count):
            data = await self.connection.receive()
            found.append((self.clock.now_s(), data))
        return found

    async def at_server(self, count: int) -> list[tuple[float, bytes]]:
        """What the server is given, and when."""
        found = []
        for _ in range(count):
            data = await self.server.receive()
            found.append((self.clock.now_s(), data))
        return found


def test_a_pipeline_upwards_pays_its_latency_once() -> None:
    async def scenario() -> tuple[list[float], list[tuple[float, bytes]]]:
        device = Device(link(1000.0, 0.5), link(2000.0, 3.0))
        left = []
        for i in range(4):
            assert await device.connection.send([bytes([i]), bytes(1999)]) == 2000
            left.append(device.clock.now_s())
        return left, await device.at_server(4)

    left, there = simulate(scenario())
    assert left == pytest.approx([1, 2, 3, 4], abs=NEAR)  # send returns when it has left
    assert [t for t, _ in there] == pytest.approx([4, 5, 6, 7], abs=NEAR)
    assert [data for _, data in there] == [bytes([i]) + bytes(1999) for i in range(4)]


def test_a_server_sees_that_a_long_message_is_coming() -> None:
    async def scenario() -> list[tuple[float, bytes]]:
        device = Device(link(1e5, 0.0), link(1e5, 0.0))
        receiving = asyncio.create_task(device.at_server(5))
        await device.connection.send([bytes(1_000_000)])
        return await receiving

    there = simulate(scenario())
    assert [t for t, _ in there] == pytest.approx([2, 4, 6, 8, 10], abs=0.1)
    assert all(decode(data) == messages.Heartbeat() for _, data in there[:-1])
    assert len(there[-1][1]) == 1_000_000


@given(
    st.lists(st.tuples(st.floats(0, 2), st.integers(1, 5000)), min_size=1, max_size=12),
    st.sampled_from([0.0, 0.2, 2.0]),
    st.sampled_from([0.5, 1.0, 30.0]),
)
@settings(max_examples=examples(40))
def test_whatever_is_sent_arrives_in_order_and_in_time(
    sent: list[tuple[float, int]], latency_s: float, speed: float
) -> None:
    async def scenario() -> tuple[list[float], list[tuple[float, bytes]]]:
        device = Device(link(1000.0, latency_s), link(1000.0, latency_s), speed)
        model = link(1000.0, latency_s)
        taking = asyncio.create_task(device.received(len(sent)))
        expected = []
        for i, (gap_s, nbytes) in enumerate(sent):
            await device.clock.sleep_until(device.clock.now_s() + gap_s)
            expected.append(model.transmit(device.clock.now_s(), nbytes)[2])
            await device.server.send([bytes([i]) * nbytes])
        return expected, await taking

    expected, found = simulate(scenario())
    assert [data for _, data in found] == [bytes([i]) * n for i, (_, n) in enumerate(sent)]
    assert [t for t, _ in found] == pytest.approx(expected, abs=1e-5 * speed)


def test_devices_on_a_line_share_it() -> None:
    async def scenario() -> list[float]:
        shared = Shared(1000.0)
        devices = [Device(link(1e6, 0.0, [shared]), link(1e6, 0.0)) for _ in range(2)]
        for device in devices:
            for _ in range(4):
                await device.server.send([bytes(1000)])
        found = await asyncio.gather(*(device.received(4) for device in devices))
        return [times[-1][0] for times in found]

    assert sorted(simulate(scenario())) == pytest.approx([7, 8], abs=0.1)


def test_a_lost_connection_is_told_after_what_came_before_it() -> None:
    async def scenario() -> tuple[bytes, float]:
        device = Device(link(1000.0, 1.0), link(1000.0, 1.0))
        await device.server.send([bytes(1000)])
        await device.server.close()
        data = await device.connection.receive()
        with pytest.raises(ConnectionLostError):
            await device.connection.receive()
        return data, device.clock.now_s()

    data, at_s = simulate(scenario())
    assert data == bytes(1000)
    assert at_s == pytest.approx(2.0, abs=NEAR)


def test_closing_lets_arrive_what_has_left() -> None:
    async def scenario() -> list[tuple[float, bytes]]:
        device = Device(link(1e6, 0.4), link(1e6, 0.4))
        await device.connection.send([b"farewell"])
        closing = asyncio.create_task(device.connection.close())
        found = await device.at_server(1)
        await closing
        return found

    assert [data for _, data in simulate(scenario())] == [b"farewell"]


def test_observers_see_messages_without_their_payload() -> None:
    seen: list[Activity] = []

    async def scenario() -> None:
        device = Device(link(1000.0, 0.5), link(1000.0, 0.5), observe=seen.append)
        await device.server.send(encode(messages.Put(1, 2, 2, "fp32", bytes(16))))
        await device.received(1)
        await device.connection.send(encode(messages.Heartbeat()))

    simulate(scenario())
    put, beat = seen
    assert isinstance(put, Transfer)
    assert isinstance(beat, Transfer)
    assert (put.device, put.direction, beat.direction) == (7, Direction.DOWN, Direction.UP)
    assert isinstance(put.message, messages.Put)
    assert put.message.payload is None
    assert put.arrives_s == pytest.approx(put.nbytes / 1000 + 0.5)


# --- computing ---


class InlinePool(Pool):
    """Threads that take no time, or some of the simulated time."""

    def __init__(self, takes_s: float = 0.0) -> None:
        self._takes_s = takes_s

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call it, now or later."""
        asyncio.get_running_loop().call_later(self._takes_s, fn)
        return Future()


def order(run: int) -> Compute:
    a, b = (StoredArray(100, 100, DType.FP32, bytes(40_000), 40_000) for _ in range(2))
    return Compute(run, [(a, b)], False, False, 100, 100, DType.FP32, 2 * 10**6)


def answers(
    runs: int, *, takes_s: float = 0.0, backend: Any = None, speed: float = 1.0
) -> tuple[list[tuple[int, float, Outcome]], Lateness, list[Activity]]:
    """When a device of 1 MFLOP/s answers products of 2 MFLOP each."""
    profile = FleetDevice("test", 1e6, 1e6, 1e6, 0.0, 2**30)
    lateness = Lateness()
    seen: list[Activity] = []
    found: list[tuple[int, float, Outcome]] = []

    async def scenario() -> None:
        clock = Clock(speed)
        computer = PacedComputer(
            EmulatedProcessor(profile), backend, InlinePool(takes_s), clock, lateness, seen.append
        )
        everything = asyncio.Event()

        def done(what: Order, outcome: Outcome) -> None:
            found.append((what.run, clock.now_s(), outcome))
            if len(found) == runs:
                everything.set()

        for run in range(runs):
            computer.start(order(run), done)
        await everything.wait()

    simulate(scenario())
    return found, lateness, seen


@pytest.mark.parametrize("backend", [None, NumpyBackend()], ids=["zeros", "numpy"])
@pytest.mark.parametrize("speed", [1.0, 10.0])
def test_answers_come_when_the_modelled_device_has_them(backend: Any, speed: float) -> None:
    found, lateness, seen = answers(3, backend=backend, speed=speed)
    assert [run for run, _, _ in found] == [0, 1, 2]
    assert [t for _, t, _ in found] == pytest.approx([2, 4, 6], abs=1e-5)
    for _, _, outcome in found:
        assert not isinstance(outcome, str)
        payload, seconds = outcome
        assert payload.nbytes == 40_000
        assert seconds == pytest.approx(2.0)  # what the device says it took, not this machine
    assert (lateness.answers, lateness.late) == (3, 0)
    assert all(isinstance(m, Multiplication) for m in seen)


def test_a_machine_that_is_too_slow_is_told_of() -> None:
    found, lateness, _ = answers(3, takes_s=5.0, backend=NumpyBackend())
    assert [t for _, t, _ in found] == pytest.approx([5, 5, 6], abs=1e-5)
    assert (lateness.answers, lateness.late) == (3, 2)
    assert lateness.worst_s == pytest.approx(3.0, abs=1e-5)


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
