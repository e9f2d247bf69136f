"""Connections that carry whole messages as bytes, over a WebSocket or in memory (for tests)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, Protocol, runtime_checkable

from websockets.asyncio.connection import Connection as WebSocket
from websockets.exceptions import ConnectionClosed

from cleave.errors import ProtocolError
from cleave.protocol import limits
from cleave.protocol.codec import Buffer
from cleave.transport.frame_limits import AwaitedSizes

WRITE_LIMIT_BYTES: Final = 2**20
"""Bytes that a connection buffers before a sender waits, so that the link stays busy."""

_JOIN_BELOW_BYTES: Final = 65536
"""Smaller messages are sent as one frame: a copy is cheaper than a frame."""


class ConnectionLostError(Exception):
    """The other side is gone; the text gives the reason, if known."""


class CutError(ConnectionLostError):
    """This side cut the connection because the other sent too much; the text says what."""


class Connection(Protocol):
    """A connection that carries messages in order."""

    async def send(self, parts: Sequence[Buffer]) -> int:
        """Send one message, given in parts; return its size in bytes."""
        ...

    async def receive(self) -> bytes:
        """Wait for the next message and return it.

        Raises:
            ConnectionLostError: when no more messages can arrive.
            ProtocolError: when the message is text or too large.
        """
        ...

    async def answers(self, within_s: float) -> bool:
        """Ping the other side; return whether it answered in time.

        Raises:
            ConnectionLostError: when the connection is known to be lost.
        """
        ...

    async def close(self) -> None:
        """Close the connection. Idempotent."""
        ...


class Accepted(Connection, Protocol):
    """A server's connection to a device."""

    def await_results(self, awaited: Callable[[], AwaitedSizes]) -> None:
        """Allow messages up to the size of the awaited results, which `awaited` returns."""
        ...

    def dismiss(self) -> None:
        """Ignore further messages: the other side was told why its session ends."""
        ...


@runtime_checkable
class Guarded(Protocol):
    """A WebSocket that inspects all received data; see `GuardedConnection`."""

    cut_because: str

    def await_results(self, awaited: Callable[[], AwaitedSizes]) -> None: ...

    def dismissed(self) -> None: ...


class WebSocketConnection:
    """A connection whose messages are binary WebSocket messages.

    A large message is sent as two frames (header and payload), which the receiver joins. With
    `spare_receiver`, they are joined before sending.

    Args:
        socket: the WebSocket.
        spare_receiver: always join here; for devices, because a server has many of them.
    """

    def __init__(self, socket: WebSocket, *, spare_receiver: bool = False) -> None:
        self._socket = socket
        self._join_below = math.inf if spare_receiver else _JOIN_BELOW_BYTES

    async def send(self, parts: Sequence[Buffer]) -> int:
        """Send one message, given in parts; return its size in bytes."""
        size = sum(len(part) for part in parts)
        try:
            if len(parts) == 1:
                await self._socket.send(parts[0])
            elif size < self._join_below:
                await self._socket.send(b"".join(parts))
            else:
                await self._socket.send(parts)
        except ConnectionClosed as error:
            raise ConnectionLostError(_reason(error)) from None
        return size

    async def receive(self) -> bytes:
        """Wait for the next message and return it."""
        try:
            data = await self._socket.recv()
        except ConnectionClosed as error:
            if isinstance(self._socket, Guarded) and self._socket.cut_because:
                raise CutError(self._socket.cut_because) from None
            if error.sent is not None and error.sent.code == 1009:
                raise ProtocolError(f"a message was too long: {error.sent.reason}") from None
            raise ConnectionLostError(_reason(error)) from None
        if isinstance(data, str):
            raise ProtocolError("a message is binary, and this one was text")
        return data

    async def answers(self, within_s: float) -> bool:
        """Ping the other side; return whether it answered in time."""
        try:
            async with asyncio.timeout(within_s):
                await (await self._socket.ping())
        except TimeoutError:
            return False
        except ConnectionClosed as error:
            raise ConnectionLostError(_reason(error)) from None
        return True

    def await_results(self, awaited: Callable[[], AwaitedSizes]) -> None:
        """Allow messages up to the awaited sizes. No effect on an unguarded socket."""
        if isinstance(self._socket, Guarded):
            self._socket.await_results(awaited)

    def dismiss(self) -> None:
        """Ignore further messages. No effect on an unguarded socket."""
        if isinstance(self._socket, Guarded):
            self._socket.dismissed()

    async def close(self) -> None:
        """Close the connection."""
        await close_in_time(self._socket.transport, self._socket.close())


async def close_in_time(transport: asyncio.Transport, closing: Coroutine[Any, Any, None]) -> None:
    """Close a WebSocket; abort it if the other side neither reads nor closes.

    Args:
        transport: transport of the WebSocket.
        closing: coroutine of the closing handshake.
    """
    task = asyncio.ensure_future(closing)
    try:
        while True:
            waiting_bytes = transport.get_write_buffer_size()
            if (await asyncio.wait({task}, timeout=limits.CLOSE_S))[0]:
                break
            if not 0 < transport.get_write_buffer_size() < waiting_bytes:
                transport.abort()  # this ends the closing handshake
    finally:
        if not task.done():
            task.cancel()
    task.result()


def _reason(error: ConnectionClosed) -> str:
    if error.rcvd is not None and error.rcvd.reason:
        return error.rcvd.reason
    return "the connection was closed" if error.rcvd is not None else "the connection broke"


class MemoryConnection:
    """One end of an in-memory link, with the same bytes as a WebSocket."""

    def __init__(
        self, inbox: asyncio.Queue[bytes | None], outbox: asyncio.Queue[bytes | None]
    ) -> None:
        self._inbox = inbox
        self._outbox = outbox
        self._closed = False

    async def send(self, parts: Sequence[Buffer]) -> int:
        """Send one message, given in parts; return its size in bytes."""
        if self._closed:
            raise ConnectionLostError("the connection was closed")
        data = b"".join(parts)
        await self._outbox.put(data)
        return len(data)

    async def receive(self) -> bytes:
        """Wait for the next message and return it."""
        data = None if self._closed else await self._inbox.get()
        if data is None:
            self._closed = True
            raise ConnectionLostError("the connection was closed")
        return data

    async def answers(self, within_s: float) -> bool:
        """Return True: the other end always answers."""
        if self._closed:
            raise ConnectionLostError("the connection was closed")
        return True

    def await_results(self, awaited: Callable[[], AwaitedSizes]) -> None:
        """Do nothing: messages may have any length here."""

    def dismiss(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Close both directions of the link."""
        if not self._closed:
            self._closed = True
            await self._outbox.put(None)
            await self._inbox.put(None)


def memory_link() -> tuple[MemoryConnection, MemoryConnection]:
    """Create an in-memory link and return both ends."""
    there: asyncio.Queue[bytes | None] = asyncio.Queue()
    back: asyncio.Queue[bytes | None] = asyncio.Queue()
    return MemoryConnection(back, there), MemoryConnection(there, back)
