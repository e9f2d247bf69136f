"""A server that says nothing: asked whether it is there, and left when it is not."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import Any, cast

import pytest
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve

from cleave.device.compute_thread import ComputeThread
from cleave.device.session import DeviceSession, device_hello
from cleave.machine.backends import NumpyBackend
from cleave.protocol import messages
from cleave.protocol.codec import Buffer, encode
from cleave.transport.connection import ClientSocket, ConnectionLostError, WebSocketConnection
from tests.memory_link import MemoryConnection, memory_link

PATIENCE_S = 30


class Asked:
    """A link whose other end answers a few times, and then no more."""

    def __init__(self, link: MemoryConnection, answers: int) -> None:
        self._link = link
        self.left = answers

    async def send(self, parts: Sequence[Buffer]) -> int:
        return await self._link.send(parts)

    async def receive(self) -> bytes:
        return await self._link.receive()

    async def answers(self, within_s: float) -> bool:
        self.left -= 1
        return self.left >= 0

    async def close(self) -> None:
        await self._link.close()


def test_a_server_that_answers_is_waited_for_and_one_that_does_not_is_left() -> None:
    async def scenario() -> tuple[str, int]:
        near, far = memory_link()
        link = Asked(far, 3)
        said = device_hello(credential="", name="test", memory_bytes=10**9)
        computer = ComputeThread(NumpyBackend())
        session = DeviceSession(link, computer, said, silence_s=0.01)
        await near.send([b"".join(encode(messages.Welcome(7, heartbeat_s=1000.0)))])
        async with asyncio.timeout(PATIENCE_S):
            return await session.run(), link.left

    assert asyncio.run(scenario()) == ("the server no longer answers", -1)


def test_over_a_socket() -> None:
    async def scenario() -> list[bool]:
        there: list[ServerConnection] = []

        async def handler(connection: ServerConnection) -> None:
            there.append(connection)
            await connection.wait_closed()

        async with serve(handler, "127.0.0.1", 0, close_timeout=0.1) as server:
            port = server.sockets[0].getsockname()[1]
            uri = f"ws://127.0.0.1:{port}"
            async with connect(uri, ping_interval=None, close_timeout=0.1) as socket:
                connection = WebSocketConnection(socket)
                answers = [await connection.answers(PATIENCE_S)]
                there[0].transport.pause_reading()  # as if its machine had vanished
                answers.append(await connection.answers(0.05))
                there[0].transport.abort()
                with pytest.raises(ConnectionLostError):
                    await connection.answers(PATIENCE_S)
                return answers

    assert asyncio.run(scenario()) == [True, False]


@pytest.mark.skipif(not hasattr(socket, "TCP_NOTSENT_LOWAT"), reason="the system has no limit")
def test_a_long_message_does_not_wait_in_the_systems_buffer() -> None:
    """There, its progress could not be seen, and a slow uplink looked like a dead server."""

    async def scenario() -> int:
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
        slow.bind(("127.0.0.1", 0))
        ended = asyncio.Event()

        async def handler(connection: ServerConnection) -> None:
            connection.transport.pause_reading()
            await ended.wait()
            connection.transport.abort()

        async with serve(handler, sock=slow, close_timeout=0.1):
            uri = f"ws://127.0.0.1:{slow.getsockname()[1]}/"
            options: dict[str, Any] = {"create_connection": ClientSocket, "compression": None}
            async with connect(uri, **options) as client:
                sending = asyncio.create_task(client.send(bytes(4 * 2**20)))
                await asyncio.wait({sending}, timeout=0.1)
                waiting = client.transport.get_write_buffer_size()
                ended.set()
                await asyncio.gather(sending, return_exceptions=True)
                return waiting

    assert asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S)) > 3 * 2**20


class Busy(ClientSocket):
    """A socket that carries pieces of long messages, and then, or never, the pong behind them."""

    def __init__(self, received: int, sent: int, *, pong: bool) -> None:
        self._pieces, self._sent, self._pong = max(received, sent), sent, pong
        self._receives = received > 0
        self._answer: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self.transport = cast(asyncio.Transport, self)

    async def ping(self, data: Any = None) -> asyncio.Future[float]:
        return self._answer

    async def send(self, *args: Any, **options: Any) -> None:
        pass

    @property
    def received_bytes(self) -> int:
        self._pieces -= 1
        if self._pieces == 0 and self._pong:
            self._answer.set_result(0.0)
        return max(0, self._pieces) if self._receives else 0

    @received_bytes.setter
    def received_bytes(self, value: int) -> None: ...

    def get_write_buffer_size(self) -> int:
        return min(self._sent, max(0, self._pieces) + 1)


@pytest.mark.parametrize("pong", [True, False])
@pytest.mark.parametrize(("received", "sent"), [(20, 0), (0, 20), (20, 20), (0, 0)])
def test_long_messages_before_the_pong_are_waited_for(received: int, sent: int, pong: bool) -> None:
    """Devices left when they received an LM head of 154 MB, or sent 100 MB, over a slow link."""

    async def scenario() -> bool:
        connection = WebSocketConnection(Busy(received, sent, pong=pong))
        await connection.send([bytes(sent)])
        return await connection.answers(0.001)

    assert asyncio.run(scenario()) is (pong and received + sent > 0)


def test_a_ping_that_cannot_leave_is_no_answer() -> None:
    class Stuck(Busy):
        async def ping(self, data: Any = None) -> asyncio.Future[float]:
            await asyncio.Event().wait()
            raise AssertionError

    async def scenario() -> bool:
        return await WebSocketConnection(Stuck(0, 0, pong=False)).answers(0.001)

    assert not asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_what_a_vanished_peers_system_still_takes_is_no_sign_of_life() -> None:
    async def scenario() -> bool:
        connection = WebSocketConnection(Busy(0, 0, pong=False))

        async def heartbeats() -> None:
            while True:
                await connection.send([b"heartbeat"])
                await asyncio.sleep(0)

        beating = asyncio.create_task(heartbeats())
        try:
            return await connection.answers(0.01)
        finally:
            beating.cancel()

    assert not asyncio.run(scenario())


class CannotSend(Asked):
    """A link whose sending fails in a way that nobody foresaw."""

    async def send(self, parts: Sequence[Buffer]) -> int:
        raise RuntimeError("no sending")


def test_what_goes_wrong_beside_receiving_ends_the_session() -> None:
    async def scenario() -> str:
        _, far = memory_link()
        said = device_hello(credential="", name="test", memory_bytes=10**9)
        session = DeviceSession(CannotSend(far, 0), ComputeThread(NumpyBackend()), said)
        async with asyncio.timeout(PATIENCE_S):
            return await session.run()

    with pytest.raises(RuntimeError, match="no sending"):
        asyncio.run(scenario())
