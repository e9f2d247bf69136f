"""Measuring a link: what the PS finds reaches the device, and nothing else does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

import cleave
from cleave.device.session import device_hello
from cleave.errors import CleaveError, UsageError
from cleave.protocol import messages
from cleave.protocol.codec import decode, encode
from cleave.protocol.messages import ErrorCode, Measured, Message
from cleave.scheduler.sessions.session_manager import SessionManager
from cleave.server.runtime import LiveRuntime
from profiles.measuring.link import MEMORY_BYTES, measure_connection, measure_link, summarise
from tests.memory_link import memory_link

HELLO = device_hello(credential="", name="t", memory_bytes=MEMORY_BYTES)


def test_a_link_is_measured_by_the_server_and_the_device_is_gone_afterwards() -> None:
    async def both() -> tuple[Measured, SessionManager]:
        here, there = memory_link()
        manager = SessionManager()
        runtime = LiveRuntime(manager)
        serving = asyncio.create_task(runtime.session(there))
        rates = await measure_connection(here, HELLO)
        await serving
        return rates, manager

    rates, manager = asyncio.run(both())
    assert rates.downlink_bytes_per_s > 1e6
    assert rates.uplink_bytes_per_s > 1e6
    assert 0 < rates.latency_s < 1
    assert not manager.sessions
    assert manager.epoch == 0  # the fleet was never changed


def test_over_a_socket_as_often_as_asked() -> None:
    seen = []
    with cleave.serve() as server:
        found = asyncio.run(measure_link(server.url, 3, lambda done, _: seen.append(done)))
        assert server.fleet.device_count == 0
    assert len(found) == 3
    assert seen == [1, 2, 3]


async def _pump(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, bytes_per_s: float, latency_s: float
) -> None:
    """One direction of a slow link: bytes follow one another and arrive a latency later."""
    clock = asyncio.get_running_loop().time
    under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def arrive() -> None:
        while True:
            at_s, data = await under_way.get()
            await asyncio.sleep(at_s - clock())
            writer.write(data)
            await writer.drain()

    arriving, free_s = asyncio.create_task(arrive()), clock()
    try:
        while data := await reader.read(8192):
            # Sleep lasts longer than asked; what it oversleeps is caught up.
            free_s = max(free_s, clock() - 0.02) + len(data) / bytes_per_s
            await asyncio.sleep(free_s - clock())
            under_way.put_nowait((clock() + latency_s, data))
    finally:
        arriving.cancel()


@pytest.mark.slow
def test_directions_are_told_apart_on_a_slow_link() -> None:
    async def run(url: str) -> Measured:
        host, port = url.split("//")[1].split("/")[0].split(":")

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            onward, back = await asyncio.open_connection(host, int(port))
            up = asyncio.create_task(_pump(reader, back, 2e6, 0.01))
            await _pump(onward, writer, 8e6, 0.01)
            up.cancel()
            for end in (writer, back):
                end.close()

        async with await asyncio.start_server(relay, "127.0.0.1", 0) as proxy:
            slow = proxy.sockets[0].getsockname()[1]
            (found,) = await measure_link(url.replace(port, str(slow)), 1)
        return found

    with cleave.serve() as server:
        found = asyncio.run(run(server.url))
    assert found.downlink_bytes_per_s == pytest.approx(8e6, rel=0.25)
    assert found.uplink_bytes_per_s == pytest.approx(2e6, rel=0.25)
    assert 0.009 < found.latency_s < 0.05


def _answered_by(*answers: Message) -> str:
    """The error after a server that says these things."""

    async def run() -> None:
        here, there = memory_link()

        async def server() -> None:
            hello = decode(await there.receive())
            assert isinstance(hello, messages.Hello)
            assert hello.measure
            for answer in answers:
                await there.send(encode(answer))
            await there.close()

        serving = asyncio.create_task(server())
        await measure_connection(here, HELLO)
        await serving

    with pytest.raises(CleaveError) as caught:
        asyncio.run(run())
    return str(caught.value)


@pytest.mark.parametrize(
    ("answers", "text"),
    [
        ([messages.Error(ErrorCode.CREDENTIAL, "wrong key")], "wrong key"),
        ([messages.Welcome(1), messages.Bye("closing")], "closing"),
        ([messages.Welcome(1), messages.Put(1, 1, 1, "fp32", bytes(4))], "same version"),
        ([messages.Heartbeat()], "heartbeat"),
        ([], "lost"),
        ([messages.Welcome(1)], "lost"),
    ],
    ids=["refused", "bye", "work", "nonsense", "gone", "gone later"],
)
def test_servers_that_do_not_measure(answers: Sequence[Message], text: str) -> None:
    assert text in _answered_by(*answers)


def test_bad_requests() -> None:
    with pytest.raises(UsageError, match="0 times"):
        asyncio.run(measure_link("ws://127.0.0.1:1/ws", 0))
    with pytest.raises(UsageError, match="join URL"):
        asyncio.run(measure_link("http://127.0.0.1:1/"))
    with pytest.raises(CleaveError, match="no server answers"):
        asyncio.run(measure_link("ws://127.0.0.1:1/ws"))


def test_the_spread_of_measurements() -> None:
    link = summarise([Measured(1e6 * i, 2e6 * i, 0.001 * i) for i in range(1, 12)], "here")
    assert link.downlink_bytes_per_s.p10 == pytest.approx(2e6)
    assert link.uplink_bytes_per_s.p50 == pytest.approx(12e6)
    assert link.round_trip_s.p90 == pytest.approx(0.02)
    assert link.source == "here"
