"""The proxy: what it does to messages between a client and a server that answers what it gets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from tests.faults.plan import Direction, Fault, Loss, Script, Seen
from tests.faults.proxy import Proxy, Setting

Client = Callable[[ClientConnection, Proxy], Awaitable[None]]


def up(seen: Seen) -> bool:
    return seen.direction is Direction.UP


def through(script: Script, client: Client, setting: Setting | None = None) -> Proxy:
    """Run a client behind a proxy; the server sends back whatever comes."""

    async def echo(socket: ServerConnection) -> None:
        async for data in socket:
            await socket.send(data)

    async def run() -> Proxy:
        async with serve(echo, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            target = f"ws://127.0.0.1:{port}/ws#c=key"
            # A thread of its own: starting and leaving wait for it, and it needs this loop.
            proxy = Proxy(target, lambda slot, connection: script, setting or Setting())
            await asyncio.to_thread(proxy.__enter__)
            try:
                assert proxy.url(3).endswith("/3#c=key")
                async with connect(proxy.url(3).partition("#")[0]) as socket:
                    await client(socket, proxy)
            finally:
                await asyncio.to_thread(proxy.__exit__, None, None, None)
        return proxy

    return asyncio.run(run())


MESSAGES = [b"one", b"two", b"three"]

AFTER: dict[Fault, list[bytes]] = {
    Fault.DROP: [b"two", b"three"],
    Fault.DELAY: [b"one", b"two", b"three"],
    Fault.DUPLICATE: [b"one", b"one", b"two", b"three"],
    Fault.REORDER: [b"two", b"one", b"three"],
}


@pytest.mark.parametrize(("fault", "expected"), AFTER.items(), ids=[f.value for f in AFTER])
def test_what_befalls_one_message(fault: Fault, expected: list[bytes]) -> None:
    async def client(socket: ClientConnection, proxy: Proxy) -> None:
        for message in MESSAGES:
            await socket.send(message)
        assert [await socket.recv() for _ in expected] == expected

    proxy = through(Script([(fault, up)]), client)
    assert [(h.slot, h.seen.index, h.fault) for h in proxy.happened] == [(3, 0, fault)]


def test_a_message_that_nothing_overtakes_is_not_held_for_ever() -> None:
    async def client(socket: ClientConnection, proxy: Proxy) -> None:
        await socket.send(b"one")
        assert await socket.recv() == b"one"

    through(Script([(Fault.REORDER, up)]), client)


@pytest.mark.parametrize("fault", [Fault.TRUNCATE, Fault.CORRUPT_HEADER])
def test_damage(fault: Fault) -> None:
    async def client(socket: ClientConnection, proxy: Proxy) -> None:
        await socket.send(bytes(100))
        assert await socket.recv() != bytes(100)

    through(Script([(fault, up)]), client)


def test_a_cut_ends_the_connection() -> None:
    async def client(socket: ClientConnection, proxy: Proxy) -> None:
        await socket.send(b"one")
        with pytest.raises(ConnectionClosed):
            await socket.recv()

    through(Script([(Fault.CUT, up)]), client)


def test_after_silence_nothing_passes() -> None:
    async def client(socket: ClientConnection, proxy: Proxy) -> None:
        await socket.send(b"one")
        assert await socket.recv() == b"one"
        await socket.send(b"two")
        await socket.ping()
        while proxy.passed[3] < 3:  # "one" there and back, and "two"
            await asyncio.sleep(0)

    script = Script([(Fault.SILENCE, lambda seen: seen.index == 1)])
    proxy = through(script, client)
    assert proxy.passed[3] == 3
    assert proxy.counts() == {Fault.SILENCE: 1}


def test_losses_are_set_off_by_the_count_of_messages() -> None:
    struck: list[tuple[int, Fault]] = []

    async def client(socket: ClientConnection, proxy: Proxy) -> None:
        proxy.on_process = lambda slot, fault: struck.append((slot, fault))
        proxy.arm(Loss(3, Fault.KILL, 3))
        for message in MESSAGES:
            await socket.send(message)
            assert await socket.recv() == message

    proxy = through(Script([]), client)
    assert struck == [(3, Fault.KILL)]
    assert proxy.counts() == {Fault.KILL: 1}
