"""Real-time devices by the clock of a simulated event loop: no test waits for real."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import Executor as Pool
from concurrent.futures import Future
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave.arrays import DType
from cleave.device.compute_thread import Outcome
from cleave.device.core import Order
from cleave.machine.backends import NumpyBackend
from cleave.machine.multiplication import Compute, StoredArray
from cleave.protocol import messages
from cleave.protocol.codec import encode
from cleave.transport.connection import ConnectionLostError, memory_link
from emulator.activity import Activity, Direction, Multiplication, Transfer
from emulator.compute import EmulatedProcessor
from emulator.links import Link, Shared
from emulator.realtime import Clock, Lateness, PacedComputer, PacedConnection
from profiles.fleet_device import FleetDevice
from tests.examples import examples

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


@pytest.mark.parametrize("speed", [1.0, 20.0, 0.1])
def test_messages_arrive_when_the_model_says_so(speed: float) -> None:
    async def scenario() -> list[tuple[float, bytes]]:
        device = Device(link(1000.0, 0.5), link(1000.0, 0.5), speed)
        for i in range(5):
            await device.server.send([bytes([i]) * 1000])
        return await device.received(5)

    found = simulate(scenario())
    assert [data for _, data in found] == [bytes([i]) * 1000 for i in range(5)]
    # One second each; the latency once, not five times.
    assert [t for t, _ in found] == pytest.approx([1.5, 2.5, 3.5, 4.5, 5.5], abs=NEAR)


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
