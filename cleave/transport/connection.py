"""Connections that carry whole messages as bytes: over a WebSocket, or in memory for tests."""

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
"""What a connection buffers before a sender waits: so that a link has the next message at hand."""

_JOIN_BELOW_BYTES: Final = 65536
"""Smaller messages go as one frame: a copy is cheaper than a frame."""


class ConnectionLostError(Exception):
    """The other side is gone; the text says why, as far as that is known."""


class CutError(ConnectionLostError):
    """This side cut the connection because the other sent more than it may; the text says what."""


class Connection(Protocol):
    """A connection that carries messages in order."""

    async def send(self, parts: Sequence[Buffer]) -> int:
        """Send one message, given in parts; return its size in bytes."""
        ...

    async def receive(self) -> bytes:
        """Wait for the next message and return it.

        Raises:
            ConnectionLostError: when there will be no more.
            ProtocolError: when the message is text or too large.
        """
        ...

    async def answers(self, within_s: float) -> bool:
        """Ask the other side for a sign of life, without a message; return whether it came in time.

        Raises:
            ConnectionLostError: when the connection is known to be lost.
        """
        ...

    async def close(self) -> None:
        """End the connection; closing twice does nothing."""
        ...


class Accepted(Connection, Protocol):
    """A server's connection to a device."""

    def await_results(self, awaited: Callable[[], AwaitedSizes]) -> None:
        """Allow messages as long as the awaited results; `awaited` returns their sizes."""
        ...

    def dismiss(self) -> None:
        """Ignore what the other side still sends: it was told why its session ends."""
        ...


@runtime_checkable
class Guarded(Protocol):
    """A WebSocket that inspects everything it receives; see `GuardedConnection`."""

    cut_because: str

    def await_results(self, awaited: Callable[[], AwaitedSizes]) -> None: ...

    def dismissed(self) -> None: ...


class WebSocketConnection:
    """A connection whose messages are binary WebSocket messages.

    Header and payload of a large message are sent as two frames, which the receiver has to join.
    With `spare_receiver` they are joined before they are sent.

    Args:
        socket: the WebSocket.
        spare_receiver: always join here; for devices, because a server has many of them.
    """

    def __init__(self, socket: WebSocket, *, spare_receiver: bool = False) -> None:
        self._socket = socket
        self._join_below = math.inf if spare_receiver else _JOIN_BELOW_BYTES

    async def send(self, parts: Sequence[Buffer]) -> int:
        """See `Connection.send`."""
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
        """See `Connection.receive`."""
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
        """See `Connection.answers`."""
        try:
            async with asyncio.timeout(within_s):
                await (await self._socket.ping())
        except TimeoutError:
            return False
        except ConnectionClosed as error:
            raise ConnectionLostError(_reason(error)) from None
        return True

    def await_results(self, awaited: Callable[[], AwaitedSizes]) -> None:
        """See `Accepted.await_results`; without effect on a socket that is not guarded."""
        if isinstance(self._socket, Guarded):
            self._socket.await_results(awaited)

    def dismiss(self) -> None:
        """See `Accepted.dismiss`; without effect on a socket that is not guarded."""
        if isinstance(self._socket, Guarded):
            self._socket.dismissed()

    async def close(self) -> None:
        """See `Connection.close`."""
        await close_in_time(self._socket.transport, self._socket.close())


async def close_in_time(transport: asyncio.Transport, closing: Coroutine[Any, Any, None]) -> None:
    """Close a WebSocket, and cut it where the other side neither reads nor closes it.

    Args:
        transport: the WebSocket's.
        closing: does the closing handshake.
    """
    task = asyncio.ensure_future(closing)
    try:
        while True:
            waiting_bytes = transport.get_write_buffer_size()
            if (await asyncio.wait({task}, timeout=limits.CLOSE_S))[0]:
                break
            if not 0 < transport.get_write_buffer_size() < waiting_bytes:
                transport.abort()  # which ends the handshake
    finally:
        if not task.done():
            task.cancel()
    task.result()


def _reason(error: ConnectionClosed) -> str:
    if error.rcvd is not None and error.rcvd.reason:
        return error.rcvd.reason
    return "the connection was closed" if error.rcvd is not None else "the connection broke"


class MemoryConnection:
    """One end of an in-memory link. It carries the same bytes as a WebSocket."""

    def __init__(
        self, inbox: asyncio.Queue[bytes | None], outbox: asyncio.Queue[bytes | None]
    ) -> None:
        self._inbox = inbox
        self._outbox = outbox
        self._closed = False

    async def send(self, parts: Sequence[Buffer]) -> int:
        """See `Connection.send`."""
        if self._closed:
            raise ConnectionLostError("the connection was closed")
        data = b"".join(parts)
        await self._outbox.put(data)
        return len(data)

    async def receive(self) -> bytes:
        """See `Connection.receive`."""
        data = None if self._closed else await self._inbox.get()
        if data is None:
            self._closed = True
            raise ConnectionLostError("the connection was closed")
        return data

    async def answers(self, within_s: float) -> bool:
        """See `Connection.answers`."""
        if self._closed:
            raise ConnectionLostError("the connection was closed")
        return True

    def await_results(self, awaited: Callable[[], AwaitedSizes]) -> None:
        """See `Accepted.await_results`; here messages may have any length."""

    def dismiss(self) -> None:
        """See `Accepted.dismiss`."""

    async def close(self) -> None:
        """See `Connection.close`."""
        if not self._closed:
            self._closed = True
            await self._outbox.put(None)
            await self._inbox.put(None)


def memory_link() -> tuple[MemoryConnection, MemoryConnection]:
    """Make an in-memory link and return both ends."""
    there: asyncio.Queue[bytes | None] = asyncio.Queue()
    back: asyncio.Queue[bytes | None] = asyncio.Queue()
    return MemoryConnection(back, there), MemoryConnection(there, back)
