"""A side that closes waits a moment for the other, and takes no longer message than was agreed."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from websockets.asyncio.server import ServerConnection, serve

import cleave
from cleave.device.compute_thread import ComputeThread
from cleave.device.session import DeviceSession, RefusedError, device_hello
from cleave.errors import CleaveError, ProtocolError
from cleave.machine.backends import NumpyBackend
from cleave.protocol import limits, messages
from cleave.protocol.codec import decode, encode
from cleave.protocol.messages import ByeCode, Error, ErrorCode, Message
from cleave.transport.connection import open_connection
from cleave.transport.join_url import JoinUrl, parse_join_url
from tests.memory_link import memory_link

PATIENCE_S = 60.0
SOON_S = 6.0  # the library alone waits for 10
MEMORY_BYTES = limits.MIN_DEVICE_MEMORY_BYTES
GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


@pytest.fixture
def _closes_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let both sides wait 0.1 s, not 2 s, for a peer that does not close its connection."""
    monkeypatch.setattr(limits, "CLOSE_S", 0.1)


def frame(payload: bytes) -> bytes:
    """A binary frame of a server: its mask is left out."""
    assert len(payload) < 126
    return bytes([0x82, len(payload)]) + payload


@asynccontextmanager
async def deaf_server(*said: Message) -> AsyncIterator[JoinUrl]:
    """A server that says something once it is greeted, and answers no close."""

    async def greeted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        key = request.partition(b"Sec-WebSocket-Key: ")[2].partition(b"\r\n")[0]
        accept = base64.b64encode(hashlib.sha1(key + GUID).digest())
        writer.write(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n"
            b"Connection: Upgrade\r\nSec-WebSocket-Accept: " + accept + b"\r\n\r\n"
        )
        for message in said:
            writer.write(frame(b"".join(encode(message))))
        while await reader.read(65536):
            pass
        writer.close()

    server = await asyncio.start_server(greeted, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with server:
        yield JoinUrl(f"ws://{host}:{port}/ws", "")


def session_on(connection: object) -> DeviceSession:
    hello = device_hello(credential="", name="box", memory_bytes=MEMORY_BYTES)
    return DeviceSession(connection, ComputeThread(NumpyBackend()), hello)  # type: ignore[arg-type]


@pytest.mark.usefixtures("_closes_soon")
@pytest.mark.parametrize(
    "said",
    [
        pytest.param([Error(ErrorCode.LIMIT, "full")], id="refused"),
        pytest.param([messages.Welcome(1), Error(ErrorCode.LIMIT, "full")], id="error"),
        pytest.param([messages.Welcome(1), messages.Bye("", ByeCode.CLOSING)], id="bye"),
        pytest.param([messages.Welcome(1), messages.Welcome(1)], id="our error"),
        pytest.param([messages.Drop((1,))], id="before its welcome"),
    ],
)
def test_a_device_does_not_wait_long_for_a_server_that_does_not_close(said: list[Message]) -> None:
    async def scenario() -> None:
        async with deaf_server(*said) as url:
            connection = await open_connection(url)
            async with asyncio.timeout(SOON_S):
                try:
                    await session_on(connection).run()
                except CleaveError:
                    return

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


async def greet(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection as a client makes it, which does nothing by itself."""
    host, _, port = url.partition("://")[2].partition("/")[0].rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    key = base64.b64encode(os.urandom(16)).decode()
    writer.write(
        f"GET /ws HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
    )
    assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
    return reader, writer


def masked(message: Message) -> bytes:
    payload = b"".join(encode(message))
    assert 126 <= len(payload) < 65536
    return bytes([0x82, 0x80 | 126]) + len(payload).to_bytes(2, "big") + bytes(4) + payload


@pytest.mark.usefixtures("_closes_soon")
def test_a_server_does_not_wait_long_for_a_device_that_does_not_close() -> None:
    """It is told `bye`, since the server ends, and answers nothing."""

    async def scenario() -> None:
        server = cleave.serve(verify=False)
        try:
            target = parse_join_url(server.url)
            reader, writer = await greet(target.address)
            hello = device_hello(
                credential=target.credential, name="box", memory_bytes=MEMORY_BYTES,
                downlink_bytes_per_s=1e6, uplink_bytes_per_s=1e6,
            )  # fmt: skip
            writer.write(masked(hello))
            assert b"welcome" in await reader.read(100)
            closing = asyncio.create_task(asyncio.to_thread(server.close))
            async with asyncio.timeout(SOON_S):
                while await reader.read(65536):
                    pass
                await closing
            writer.close()
        finally:
            server.close()

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


@pytest.mark.parametrize("over", [0, 1])
def test_a_device_takes_messages_as_long_as_its_memory_allows(over: int) -> None:
    heard: list[Message] = []
    codes: list[int | None] = []

    async def serving(socket: ServerConnection) -> None:
        heard.append(decode(await socket.recv(decode=False)))
        await socket.send(b"".join(encode(messages.Welcome(1))))
        await socket.send(bytes(limits.MAX_HEADER_BYTES + MEMORY_BYTES + over))
        try:
            while True:
                heard.append(decode(await socket.recv(decode=False)))
        finally:
            codes.append(socket.protocol.close_rcvd.code if socket.protocol.close_rcvd else None)

    async def scenario() -> None:
        async with serve(serving, "127.0.0.1", 0, compression=None) as server:
            host, port = next(iter(server.sockets)).getsockname()
            url = JoinUrl(f"ws://{host}:{port}/ws", "")
            session = session_on(await open_connection(url, MEMORY_BYTES))
            with pytest.raises(ProtocolError):
                await session.run()

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))
    errors = [message for message in heard if isinstance(message, Error)]
    assert (codes, len(errors)) == (([1009], 0) if over else ([1000], 1))


@pytest.mark.parametrize(
    "early", [messages.Put(1, 1, 1, "fp32", bytes(4)), messages.Cancel((1,)), messages.Drop((1,)),
              messages.CodeResults(), messages.Measured(1.0, 1.0, 1.0)],
    ids=lambda message: message.TYPE,
)  # fmt: skip
def test_work_before_the_welcome_breaks_the_protocol(early: Message) -> None:
    async def scenario() -> Message:
        near, far = memory_link()
        hello = device_hello(credential="", name="box", memory_bytes=MEMORY_BYTES, graphs=True)
        hello.measure = True
        await near.send(encode(early))
        with pytest.raises(ProtocolError, match="before its welcome") as caught:
            await DeviceSession(far, ComputeThread(NumpyBackend()), hello).run()
        assert not isinstance(caught.value, RefusedError)
        await near.receive()  # the hello
        return decode(await near.receive())

    told = asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))
    assert isinstance(told, Error)
    assert told.code is ErrorCode.PROTOCOL
