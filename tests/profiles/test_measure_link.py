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
    with pytest.raises(UsageError, match="must be 1 or more, not 0"):
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
