"""Refuse excess connections at the listening socket, before TLS, HTTP or an asyncio task.

A `Listener` asks a `ConnectionGate` whether to accept each connection. The socket of an accepted
connection notifies the gate when it closes. On Windows, the proactor event loop bypasses
`Listener.accept`, so connections are not counted, but time limits still apply.
"""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Callable
from typing import Any, Final

from websockets.asyncio.server import ServerConnection
from websockets.frames import CloseCode
from websockets.protocol import State

from cleave.transport.connection import close_in_time
from cleave.transport.connection_limits import (
    ConnectionLimits,
    PendingConnections,
    RateLimit,
    RejectionLog,
    WaitingPlace,
)
from cleave.transport.frame_limits import (
    FRAMES_AT_ONCE,
    AwaitedSizes,
    FrameGate,
    TooMuchError,
    Unfinished,
)

_REFUSALS_AT_ONCE: Final = 128  # refused connections before the event loop serves others
_REST_S: Final = 0.05  # pause after a refusal, because waking the event loop is the main cost
_FAREWELL_S: Final = 1.0  # time for a peer to read the reason before its socket is shut down
_LAST_FRAMES: Final = 256  # maximum number of frames to process after the peer closed
_END_OF_REQUEST: Final = b"\r\n\r\n"
_BROKEN: Final = (CloseCode.PROTOCOL_ERROR, CloseCode.INVALID_DATA, CloseCode.MESSAGE_TOO_BIG)
BACKLOG: Final = 512  # connections that the operating system queues


class PendingSocket(socket.socket):
    """An accepted connection's socket, which reports admission, refusal and closure to the gate."""

    def __init__(
        self, accepted: socket.socket, address: str, ticket: int, gate: ConnectionGate
    ) -> None:
        family, kind, protocol = accepted.family, accepted.type, accepted.proto
        super().__init__(family, kind, protocol, fileno=accepted.detach())
        loop, limit_s = gate.loop, gate.allowed.handshake_s
        self.address = address
        self.deadline_s = loop.time() + limit_s
        self._connection_gate = gate
        self._ticket = ticket
        self._waits = True
        self._settled = False
        self._timer = loop.call_later(limit_s + _FAREWELL_S, lambda: self._shut(self._too_late()))

    def admitted(self) -> None:
        """Mark the hello as accepted. The connection is no longer pending and has no deadline."""
        self._settled = True
        self._stop_waiting()

    def answered(self) -> None:
        """Mark the connection as successful, because its HTTP request got a response."""
        self._settled = True

    def refused(self, reason: str) -> None:
        """Count the connection as failed and log the reason, if its outcome is not yet known."""
        if not self._settled:
            self._settled = True
            self._connection_gate.failed(self.address, reason)

    def close(self) -> None:
        """Close the socket and stop counting the connection as pending."""
        if self.fileno() >= 0:
            self._connection_gate.forget(self)
        late = self._connection_gate.loop.time() >= self.deadline_s
        self.refused(self._too_late() if late else "the client disconnected before it sent hello")
        self._stop_waiting()
        super().close()

    def make_room(self) -> None:
        """Shut the connection down, because a connection from another network replaces it."""
        self._waits = False
        self._timer.cancel()
        self._shut("its network has too many waiting connections, so another network got its place")

    def _shut(self, reason: str) -> None:
        self.refused(reason)
        try:
            self.shutdown(socket.SHUT_RDWR)  # the loop notices the end, even during a handshake
        except OSError:
            return  # the socket is already closed, and the loop will notice

    def _too_late(self) -> str:
        return f"no accepted hello within {self._connection_gate.allowed.handshake_s:g} s"

    def _stop_waiting(self) -> None:
        if self._waits:
            self._waits = False
            self._timer.cancel()
            self._connection_gate.left(self._ticket)


class ConnectionGate:
    """Accepts or refuses new connections. All listening sockets of a server share one gate."""

    def __init__(
        self, allowed: ConnectionLimits, log: RejectionLog, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.allowed = allowed
        self.pending_connections = PendingConnections(allowed)
        self.unfinished = Unfinished(allowed.unfinished_bytes)
        self._failures = RateLimit(loop.time, allowed.failed, 1 / allowed.failed_per_s)
        self.log = log
        self.loop = loop
        self._inside: dict[int, PendingSocket] = {}
        self._waiting: dict[int, PendingSocket] = {}  # ticket -> socket

    def let_in(self, accepted: socket.socket, address: str) -> PendingSocket | None:
        """Return the socket for a new connection; None if the gate refused and closed it."""
        place: WaitingPlace | str = "too many connections from this address failed"
        if not self._failures.wait_s(address):
            place = self.pending_connections.arrive(address)
        if isinstance(place, str):
            accepted.close()
            self.log.refused(address, place)
            return None
        if place.instead_of is not None:
            self._waiting.pop(place.instead_of).make_room()
        pending = self._waiting[place.ticket] = PendingSocket(accepted, address, place.ticket, self)
        self._inside[pending.fileno()] = pending
        # TCP keepalive detects a vanished peer to which the server sends no pings.
        pending.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 20), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):
                pending.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        return pending

    def pending(self, transport: asyncio.BaseTransport) -> PendingSocket | None:
        """Return the `PendingSocket` of a transport; None if the socket is not from this gate."""
        connected: Any = transport.get_extra_info("socket")
        return None if connected is None else self._inside.get(connected.fileno())

    def left(self, ticket: int) -> None:
        """Stop counting the connection with this ticket as pending."""
        self.pending_connections.done(ticket)
        del self._waiting[ticket]

    def failed(self, address: str, reason: str) -> None:
        """Count a failed connection from `address` and log the reason."""
        self._failures.failed(address)
        self.log.refused(address, reason)

    def forget(self, pending: PendingSocket) -> None:
        """Remove a socket that is about to be closed, so that `pending` no longer finds it."""
        self._inside.pop(pending.fileno(), None)


class Listener(socket.socket):
    """A listening socket that accepts only the connections that a `ConnectionGate` allows.

    After it refuses a connection, the listener pauses briefly, so that it can handle the next
    refusals together. The event loop polls an epoll object instead of the socket, so that the
    listener can pause. Without epoll, there is no pause.
    """

    def __init__(self, family: socket.AddressFamily, gate: ConnectionGate) -> None:
        # asyncio sets TCP_NODELAY only on sockets with an explicit protocol.
        super().__init__(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._connection_gate = gate
        self._readiness = select.epoll() if hasattr(select, "epoll") else None
        self._rests = False

    def fileno(self) -> int:
        """Return the file descriptor to poll for new connections; -1 once the socket is closed."""
        if self._readiness is None:
            return super().fileno()
        return -1 if self._readiness.closed else self._readiness.fileno()

    def listen(self, backlog: int = BACKLOG, /) -> None:
        """Start listening. The operating system queues up to `backlog` connections."""
        super().listen(backlog)
        if self._readiness is not None:
            self._readiness.register(super().fileno(), select.EPOLLIN)

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept the next allowed connection; raise BlockingIOError if none is waiting."""
        for _ in range(_REFUSALS_AT_ONCE):
            accepted, address = super().accept()
            pending = self._connection_gate.let_in(accepted, address[0])
            if pending is not None:
                return pending, address
            self._rest()
        raise BlockingIOError

    def _rest(self) -> None:
        if self._readiness is not None and not self._rests:
            self._rests = True
            self._readiness.modify(super().fileno(), 0)
            self._connection_gate.loop.call_later(_REST_S, self._go_on)

    def _go_on(self) -> None:
        self._rests = False
        if self._readiness is not None and not self._readiness.closed:
            self._readiness.modify(super().fileno(), select.EPOLLIN)

    def close(self) -> None:
        """Stop listening and close the socket."""
        if self._readiness is not None:
            self._readiness.close()
        super().close()


class GuardedConnection(ServerConnection):
    """A server's WebSocket connection whose frames are inspected before they are processed.

    A client may send a limited number of bytes before the server accepts its hello. Frames that
    arrive together are processed in batches, between which the event loop serves other connections.

    Attributes:
        cut_because: reason why this side aborted the connection; empty if it was not aborted.
    """

    def __init__(self, gate: ConnectionGate, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.cut_because = ""
        self._connection_gate = gate
        self._pending_socket: PendingSocket | None = None
        self._may_send = gate.allowed.unadmitted_bytes
        self._unadmitted = True
        self._ending = False
        self._frame_gate = FrameGate(self.loop.time())
        self._request = b""  # last bytes of the incomplete HTTP request
        self._open = False  # whether the handshake is over, so that frames may be processed
        self._asked = False  # whether the HTTP request is complete
        self._deaf = False  # whether all further data is ignored
        self._waiting = b""  # received bytes; those before `_at` are processed
        self._at = 0  # index of the first unprocessed byte in `_waiting`
        self._due = False  # whether `_take_more` is scheduled
        self._full = False  # whether the buffer of received messages is full

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Look up the `PendingSocket`. asyncio calls this method after the TLS handshake."""
        self._pending_socket = self._connection_gate.pending(transport)
        super().connection_made(transport)
        self.recv_messages.pause = self._pause
        self.recv_messages.resume = self._resume

    def data_received(self, data: bytes) -> None:
        """Process received bytes. Until the hello is accepted, count them towards a limit."""
        if self._deaf:
            if self.protocol.close_sent is not None:  # the library drops data, but notices the end
                super().data_received(data)
            return
        if self._unadmitted:
            self._may_send -= len(data)
            if self._may_send < 0:
                limit = self._connection_gate.allowed.unadmitted_bytes
                self.cut(f"it sent more than {limit} bytes without an accepted hello")
                return
        if not self._asked:
            data = self._rest_of_request(data)
        if data:
            self._waiting = self._waiting[self._at :] + data if self._waiting else data
            self._at = 0
            self._take_in()

    def _rest_of_request(self, data: bytes) -> bytes:
        """Process the bytes that belong to the HTTP request; return the bytes that follow it."""
        seen = self._request + data
        over = seen.find(_END_OF_REQUEST)
        self._asked = over >= 0
        end = over + len(_END_OF_REQUEST) - len(self._request) if self._asked else len(data)
        self._request = b"" if self._asked else seen[1 - len(_END_OF_REQUEST) :]
        super().data_received(data[:end])
        return data[end:]

    def opened(self) -> None:
        """Start processing frames. The WebSocket handshake is over."""
        self._open = True
        self._take_in()

    def _take_in(self) -> None:
        """Process a batch of frames. If bytes remain, pause reading and schedule another batch."""
        if self._waiting and self._open and not self._full:
            self._take_some()
        if self._full:
            return
        if not self._waiting:
            self.transport.resume_reading()
            return
        self.transport.pause_reading()
        if self._open and not self._due:
            self._due = True
            self.loop.call_soon(self._take_more)

    def _take_some(self) -> None:
        try:
            end = self._frame_gate.passes(self._waiting, self._at, self.loop.time())
        except TooMuchError as error:
            self.cut(str(error))
            return
        whole = end == len(self._waiting)
        data = self._waiting if whole and not self._at else self._waiting[self._at : end]
        self._waiting, self._at = (b"", 0) if whole else (self._waiting, end)
        super().data_received(data)
        self._holds(self._frame_gate.unasked_bytes())
        closing = self.protocol.close_sent
        if closing is not None and closing.code in _BROKEN and not self._ending:
            self.refused(
                "it violated the WebSocket protocol, or announced a message that is too long"
            )

    def _take_last(self) -> None:
        """Process up to `_LAST_FRAMES` frames that arrived before the connection closed."""
        for _ in range(_LAST_FRAMES // FRAMES_AT_ONCE):
            if self._waiting and self._open:
                self._take_some()
        self._hear_no_more()

    def _hear_no_more(self) -> None:
        self._deaf = True
        self._waiting = b""
        self._holds(0)

    def _take_more(self) -> None:
        self._due = False
        self._take_in()

    def _pause(self) -> None:
        """Stop processing frames until the session has consumed buffered messages."""
        self._full = True
        self.transport.pause_reading()

    def _resume(self) -> None:
        self._full = False
        self._take_in()

    def _holds(self, nbytes: int) -> None:
        """Record the size of the incomplete message; above the total limit, abort a connection."""
        too_much = self._connection_gate.unfinished.holds(self, nbytes, self.loop.time())
        if isinstance(too_much, GuardedConnection):
            most = self._connection_gate.unfinished.most_bytes
            too_much.cut(
                f"it left a message incomplete, while {most} bytes of such messages are waiting"
            )

    def eof_received(self) -> None:
        """Process the remaining data when the peer closes the connection."""
        self._take_last()
        super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """Process the remaining data when the connection is lost."""
        self._take_last()
        super().connection_lost(exc)

    def await_results(self, awaited: Callable[[], AwaitedSizes]) -> None:
        """Accept messages large enough for awaited results, whose sizes `awaited` returns."""
        self._frame_gate.awaited = awaited

    @property
    def data_bytes(self) -> int:
        """Return the number of bytes received in all messages, including an incomplete message."""
        return self._frame_gate.data_bytes

    def admitted(self, least_bytes: int) -> None:
        """Mark the hello as accepted. Now only awaited results may be larger than `least_bytes`."""
        self._unadmitted = False
        self._frame_gate.least_bytes = least_bytes
        if self._pending_socket is not None:
            self._pending_socket.admitted()

    def cut(self, reason: str) -> None:
        """Abort the connection, discard the data queued for sending, and log the reason."""
        if self.cut_because:
            return
        self.cut_because = reason
        self._hear_no_more()
        self._log(reason)
        self.transport.abort()

    def dismissed(self) -> None:
        """Ignore further data, and abort the connection after queued data had time to arrive."""
        self._hear_no_more()
        self._end_soon()

    def refused(self, reason: str) -> None:
        """Log the reason for a refusal and abort the connection after sending queued data."""
        if not self.cut_because:
            self._end_soon()
            self._log(reason)

    @property
    def inside(self) -> bool:
        """Return True if the server accepted the client's hello."""
        return not self._unadmitted

    async def close(self, code: int = CloseCode.NORMAL_CLOSURE, reason: str = "") -> None:
        """Close the connection. If the connection was refused, ignore data that still arrives."""
        if not self._ending:
            await close_in_time(self.transport, super().close(code, reason))
            return
        if self.protocol.state is State.OPEN:
            self._hear_no_more()
            self.protocol.fail(code, reason)
            self.send_data()
            self.transport.resume_reading()  # to notice that the peer closes
        await asyncio.shield(self.connection_lost_waiter)

    def _log(self, reason: str) -> None:
        if self._pending_socket is not None and self._unadmitted:
            self._pending_socket.refused(reason)
        else:
            peer = self.remote_address
            self._connection_gate.log.refused(str(peer[0]) if peer else "", reason)

    def answered(self) -> None:
        """Mark the connection as successful, because its HTTP request got a response."""
        self._end_soon()
        if self._pending_socket is not None:
            self._pending_socket.answered()

    def _end_soon(self) -> None:
        """Abort the connection after `_FAREWELL_S` seconds, so that queued data can be sent."""
        if not self._ending:
            self._ending = True
            deadline_s = self.loop.time() + self.time_left_s
            self.loop.call_later(_FAREWELL_S, self._end, deadline_s)

    def _end(self, deadline_s: float) -> None:
        """Abort the connection once all queued data is sent, or at the latest at `deadline_s`."""
        if self.transport.get_write_buffer_size() and self.loop.time() < deadline_s:
            self.loop.call_later(_FAREWELL_S, self._end, deadline_s)
        else:
            self.transport.abort()

    @property
    def time_left_s(self) -> float:
        """Return the seconds left to accept the hello; `handshake_s` if it is already accepted."""
        if self._pending_socket is None or not self._unadmitted:
            return self._connection_gate.allowed.handshake_s
        return max(0.0, self._pending_socket.deadline_s - self.loop.time())


def listen(host: str, port: int, gate: ConnectionGate) -> list[Listener]:
    """Bind one `Listener` to each IP address of a host and return the listeners.

    Args:
        host: host name or IP address; empty for all addresses of this machine.
        port: port to use on all addresses; 0 for any free port.

    Raises:
        OSError: if a listener cannot be bound to an address.
        OverflowError: if the port is out of range.
    """
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    listeners: list[Listener] = []
    try:
        for family, address in dict.fromkeys((entry[0], entry[4]) for entry in found):
            try:
                listener = Listener(family, gate)
            except OSError:
                if (family, address) == (found[-1][0], found[-1][4]) and not listeners:
                    raise
                continue  # a host name may have an address whose family is unsupported
            listeners.append(listener)
            if hasattr(socket, "SO_REUSEADDR") and hasattr(socket, "AF_UNIX"):  # not on Windows
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind((address[0], port, *address[2:]))
            port = port or int(listener.getsockname()[1])
    except BaseException:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def allow_many_connections() -> None:
    """Raise this process's limit on open files to the maximum that the system allows."""
    try:
        import resource
    except ImportError:  # Windows has no such module and no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def open_files_limit() -> int | None:
    """Return the maximum number of open files and sockets of this process; None if unlimited."""
    try:
        import resource
    except ImportError:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft
