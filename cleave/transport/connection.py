"""Connections that exchange messages (byte strings) over WebSockets."""

from __future__ import annotations

import asyncio
import math
import socket as sockets
import ssl
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, cast, runtime_checkable

from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.connection import Connection as WebSocket
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI

from cleave.errors import CleaveError, ProtocolError
from cleave.protocol import limits
from cleave.protocol.codec import Buffer
from cleave.transport.frame_limits import AwaitedSizes
from cleave.transport.join_url import JoinUrl, plain_reason
from cleave.transport.tls import WrongCertificateError, pinning

WRITE_LIMIT_BYTES: Final = 2**20  # queued bytes above which `send` waits
# Number of unsent bytes above which the operating system accepts no more. The default is several
# MB, behind which a ping would wait for more than a minute on the slowest uplinks.
_UNSENT_BYTES: Final = 2**17
_JOIN_BELOW_BYTES: Final = 65536  # joined into one frame: a copy costs less than a second frame


class ConnectionLostError(Exception):
    """The connection to the peer was lost. The message gives the reason, if known."""


class CutError(ConnectionLostError):
    """This side aborted the connection. The message names the limit that the peer exceeded."""


class Connection(Protocol):
    """A connection that delivers messages in order."""

    async def send(self, parts: Sequence[Buffer]) -> int:
        """Send the concatenation of `parts` as one message; return the message's size in bytes."""

    async def receive(self) -> bytes:
        """Wait for the next message and return it.

        Raises:
            ConnectionLostError: if no more messages can arrive.
            ProtocolError: if the message is text or too large.
        """

    async def answers(self, within_s: float) -> bool:
        """Ping the peer; return True if it answers, False if the connection stalls.

        A connection stalls if no data is transferred in either direction for `within_s` seconds. On
        a slow link, the ping may wait a long time behind a message from this side, and the pong
        behind a message from the peer.
        """

    async def close(self) -> None:
        """Close the connection. Idempotent."""


class Accepted(Connection, Protocol):
    """A server's connection to a device."""

    @property
    def data_bytes(self) -> int:
        """Return the number of bytes received in all messages, including an incomplete message."""

    def await_results(self, awaited: Callable[[], AwaitedSizes]) -> None:
        """Accept messages as large as awaited results. `awaited` returns the results' sizes."""

    def dismiss(self) -> None:
        """Ignore further messages from a device that has been told why its session is ending."""


@runtime_checkable
class Guarded(Protocol):
    """Interface for a WebSocket that inspects all received data. See `GuardedConnection`."""

    cut_because: str

    @property
    def data_bytes(self) -> int: ...

    def await_results(self, awaited: Callable[[], AwaitedSizes]) -> None: ...

    def dismissed(self) -> None: ...


class ClientSocket(ClientConnection):
    """A client's WebSocket that counts received bytes, including those of incomplete messages."""

    received_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        if (option := getattr(sockets, "TCP_NOTSENT_LOWAT", None)) is not None:  # not on Windows
            link = transport.get_extra_info("socket")
            link.setsockopt(sockets.IPPROTO_TCP, option, _UNSENT_BYTES)

    def data_received(self, data: bytes) -> None:
        self.received_bytes += len(data)
        super().data_received(data)


@dataclass(frozen=True, slots=True)
class _Moved:
    """Numbers of bytes received, waiting in this process, and passed to the operating system.

    The system accepts a few bytes even if the peer has vanished. While bytes wait in this process,
    the system's send buffer is full, and the system accepts more only after the peer receives some.
    """

    received_bytes: int
    waiting_bytes: int
    left_bytes: int


class WebSocketConnection:
    """A connection that sends and receives binary WebSocket messages.

    A large message is sent as two frames (header and payload), which the receiver concatenates.
    With `spare_receiver`, each message is one frame. Devices use this option because a server with
    many connections should not spend time on concatenation.
    """

    def __init__(self, socket: WebSocket, *, spare_receiver: bool = False) -> None:
        self._socket = socket
        self._guarded = socket if isinstance(socket, Guarded) else None
        self._sent_bytes = 0
        self._join_below = math.inf if spare_receiver else _JOIN_BELOW_BYTES

    async def send(self, parts: Sequence[Buffer]) -> int:
        size = sum(len(part) for part in parts)
        self._sent_bytes += size
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
        try:
            data = await self._socket.recv()
        except ConnectionClosed as error:
            if self._guarded is not None and self._guarded.cut_because:
                raise CutError(self._guarded.cut_because) from None
            if error.sent is not None and error.sent.code == 1009:
                raise ProtocolError(
                    f"a received message was too long: {error.sent.reason}"
                ) from None
            raise ConnectionLostError(_reason(error)) from None
        if isinstance(data, str):
            raise ProtocolError("messages must be binary, but a text message arrived")
        return data

    async def answers(self, within_s: float) -> bool:
        # The ping itself may wait until earlier messages have left.
        answered = asyncio.ensure_future(self._answered())
        try:
            while True:
                before = self._moved()
                try:
                    async with asyncio.timeout(within_s):
                        await asyncio.shield(answered)
                    return True
                except TimeoutError:
                    now = self._moved()
                    sends = before.waiting_bytes > 0 and now.left_bytes > before.left_bytes
                    if not sends and now.received_bytes == before.received_bytes:
                        return False
        except ConnectionClosed as error:
            raise ConnectionLostError(_reason(error)) from None
        finally:
            answered.cancel()

    async def _answered(self) -> None:
        await (await self._socket.ping())

    def _moved(self) -> _Moved:
        received = self._socket.received_bytes if isinstance(self._socket, ClientSocket) else 0
        waiting = self._socket.transport.get_write_buffer_size()
        return _Moved(received, waiting, self._sent_bytes - waiting)

    @property
    def data_bytes(self) -> int:
        """Return the number of bytes received in all messages; 0 if the socket is not `Guarded`."""
        return self._guarded.data_bytes if self._guarded is not None else 0

    def await_results(self, awaited: Callable[[], AwaitedSizes]) -> None:
        """Accept messages large enough for awaited results, if the socket is `Guarded`."""
        if self._guarded is not None:
            self._guarded.await_results(awaited)

    def dismiss(self) -> None:
        """Ignore further messages, if the socket is `Guarded`."""
        if self._guarded is not None:
            self._guarded.dismissed()

    async def close(self) -> None:
        await close_in_time(self._socket.transport, self._socket.close())


async def close_in_time(transport: asyncio.Transport, closing: Coroutine[Any, Any, None]) -> None:
    """Close a WebSocket. Abort it if the peer neither reads data nor answers the closing frame."""
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


async def open_connection(target: JoinUrl, memory_bytes: int | None = None) -> WebSocketConnection:
    """Connect to a server. Send no data if the certificate does not match the URL's fingerprint.

    Args:
        memory_bytes: memory budget in bytes that a device declares in its `hello`. The budget also
            limits the size of received messages. None for an operator.

    Raises:
        CleaveError: if no WebSocket server responds, or the server's certificate is not accepted.
    """
    address = target.address
    most_bytes = limits.MAX_MESSAGE_BYTES
    if memory_bytes is not None:
        most_bytes = min(most_bytes, limits.MAX_HEADER_BYTES + memory_bytes)
    secured: dict[str, Any] = {"ssl": pinning(target.fingerprint)} if target.fingerprint else {}
    try:
        socket = await connect(
            address,
            compression=None,
            max_size=most_bytes,
            ping_interval=None,
            write_limit=WRITE_LIMIT_BYTES,
            open_timeout=limits.HANDSHAKE_S,
            proxy=None,
            create_connection=ClientSocket,
            **secured,
        )
    except WrongCertificateError as error:
        raise CleaveError(
            f"{address} presents a different certificate ({error.shown}) from the one in the join "
            f"URL ({target.fingerprint}); if the server made a new one, use the URL that it prints "
            "now; otherwise, the connection may be intercepted"
        ) from None
    except ssl.SSLCertVerificationError as error:
        raise CleaveError(
            f"the certificate of {address} is not trusted ({error.verify_message}); use the "
            f"whole join URL that the server prints, with its &fp=..."
        ) from None
    except ssl.SSLError as error:
        raise CleaveError(
            f"{address} does not use TLS ({error.reason or error}); try ws:// instead of wss://"
        ) from None
    except (OSError, TimeoutError) as error:
        or_plain = ", or try ws:// instead of wss://" if address.startswith("wss:") else ""
        if isinstance(error, ConnectionResetError | ConnectionAbortedError):
            raise CleaveError(
                f"{address} closes the connection; if a tunnel, relay or proxy listens there, "
                f"check that it leads to a running server{or_plain}"
            ) from None
        raise CleaveError(
            f"no server answers at {address} ({plain_reason(error)}); "
            f"check that `cleave serve` runs there, and the address and port{or_plain}"
        ) from None
    except (InvalidHandshake, InvalidURI) as error:
        hint = "" if address.startswith("wss:") else " (a server with TLS has a wss:// URL)"
        raise CleaveError(
            f"{address} refused this client, or is not a Cleave server: {error}{hint}"
        ) from None
    return WebSocketConnection(socket, spare_receiver=True)
