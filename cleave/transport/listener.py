"""Listening sockets that turn strangers away before TLS, HTTP or a task is spent on them.

The event loop accepts connections from a socket. Here that socket asks the door first, and what it
hands over tells the door when it is closed, whatever stage it was in. Windows' proactor loop does
not accept through the socket: there connections are not counted, the time limits hold all the same.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any, Final

from websockets.asyncio.server import ServerConnection
from websockets.frames import CloseCode

from cleave.transport.door import ConnectionLimits, Door
from cleave.transport.refusals import RefusalLog

_REFUSALS_AT_ONCE: Final = 64  # before the loop looks at its other connections
_FAREWELL_S: Final = 1.0  # to tell a late one why, before the socket is shut
_BROKEN: Final = (CloseCode.PROTOCOL_ERROR, CloseCode.INVALID_DATA, CloseCode.MESSAGE_TOO_BIG)
BACKLOG: Final = 512
"""Connections that the system holds until the loop takes them."""


class Visitor(socket.socket):
    """A connection that the door let in, from its first packet until it is closed.

    Attributes:
        address: where it comes from.
        deadline_s: the loop's time at which its hello must have been accepted.
    """

    def __init__(self, accepted: socket.socket, address: str, entrance: Entrance) -> None:
        family, kind, protocol = accepted.family, accepted.type, accepted.proto
        super().__init__(family, kind, protocol, fileno=accepted.detach())
        loop, limit_s = entrance.loop, entrance.allowed.handshake_s
        self.address = address
        self.deadline_s = loop.time() + limit_s
        self._entrance = entrance
        self._waits = True
        self._settled = False
        self._timer = loop.call_later(limit_s + _FAREWELL_S, self._expire)

    def admitted(self) -> None:
        """Its hello is accepted: from now on the limits of a session hold."""
        self._settled = True
        self._stop_waiting()

    def answered(self) -> None:
        """It was given what it asked for, and is no session."""
        self._settled = True

    def refused(self, reason: str) -> None:
        """It is turned away; the first reason is logged."""
        if not self._settled:
            self._settled = True
            self._entrance.log.refused(self.address, reason)

    def close(self) -> None:
        """Close the socket; the door need not count it any longer."""
        if self.fileno() >= 0:
            self._entrance.forget(self)
        late = self._entrance.loop.time() >= self.deadline_s
        self.refused(self._too_late() if late else "it went before it said hello")
        self._stop_waiting()
        super().close()

    def _expire(self) -> None:
        self.refused(self._too_late())
        try:
            self.shutdown(socket.SHUT_RDWR)  # the loop sees its end, at whatever stage it is
        except OSError:
            return  # it has gone already, and the loop is about to see that

    def _too_late(self) -> str:
        return f"no accepted hello within {self._entrance.allowed.handshake_s:g} s"

    def _stop_waiting(self) -> None:
        if self._waits:
            self._waits = False
            self._timer.cancel()
            self._entrance.door.done(self.address)


class Entrance:
    """Where connections come in, over however many listening sockets.

    Args:
        allowed: who may wait, and how long.
        log: is told of those that are turned away.
        loop: the event loop that serves them.
    """

    def __init__(
        self, allowed: ConnectionLimits, log: RefusalLog, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.allowed = allowed
        self.door = Door(allowed)
        self.log = log
        self.loop = loop
        self._inside: dict[int, Visitor] = {}

    def let_in(self, accepted: socket.socket, address: str) -> Visitor | None:
        """The connection as a visitor; None when it was turned away, and closed."""
        reason = self.door.knock(address)
        if reason:
            accepted.close()
            self.log.refused(address, reason)
            return None
        visitor = Visitor(accepted, address, self)
        self._inside[visitor.fileno()] = visitor
        # Who has vanished without a word, and is not asked for signs of life, is noticed.
        visitor.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 20), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):
                visitor.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        return visitor

    def visitor(self, transport: asyncio.BaseTransport) -> Visitor | None:
        """Whose connection a transport is."""
        connected: Any = transport.get_extra_info("socket")
        return None if connected is None else self._inside.get(connected.fileno())

    def forget(self, visitor: Visitor) -> None:
        """A visitor's socket is about to be closed."""
        self._inside.pop(visitor.fileno(), None)


class Listener(socket.socket):
    """A listening socket that asks the door about each connection.

    Args:
        family: of its addresses.
        entrance: where it leads.
    """

    def __init__(self, family: socket.AddressFamily, entrance: Entrance) -> None:
        # The protocol is named since asyncio sends small messages at once only where it is.
        super().__init__(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._entrance = entrance

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection that may come in.

        Raises:
            BlockingIOError: when there is none, or enough were turned away for now.
        """
        for _ in range(_REFUSALS_AT_ONCE):
            accepted, address = super().accept()
            visitor = self._entrance.let_in(accepted, address[0])
            if visitor is not None:
                return visitor, address
        raise BlockingIOError


class GuardedConnection(ServerConnection):
    """A WebSocket connection that may send little until its hello is accepted."""

    def __init__(self, entrance: Entrance, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._entrance = entrance
        self._visitor: Visitor | None = None
        self._may_send = entrance.allowed.unadmitted_bytes
        self._unadmitted = True
        self._ending = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is there, its TLS handshake done."""
        self._visitor = self._entrance.visitor(transport)
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Bytes came. Until the hello is accepted they are counted, whatever frames they are of."""
        if self._unadmitted:
            self._may_send -= len(data)
        if self._unadmitted and self._may_send < 0:
            limit = self._entrance.allowed.unadmitted_bytes
            self.refused(f"it sent more than {limit} bytes without an accepted hello")
            self.transport.abort()
        else:
            super().data_received(data)
            closing = self.protocol.close_sent
            if closing is not None and closing.code in _BROKEN:
                self.refused("it broke the WebSocket protocol, or announced too long a message")

    def admitted(self) -> None:
        """The hello is accepted."""
        self._unadmitted = False
        if self._visitor is not None:
            self._visitor.admitted()

    def refused(self, reason: str) -> None:
        """The connection is turned away for a reason, which is logged."""
        self._end_soon()
        if self._visitor is not None:
            self._visitor.refused(reason)
        else:
            self._entrance.log.refused(str(self.remote_address[0]), reason)

    def answered(self) -> None:
        """It was an HTTP request, and is answered."""
        self._end_soon()
        if self._visitor is not None:
            self._visitor.answered()

    def _end_soon(self) -> None:
        """Time for a last word; a stranger's goodbye is not waited for."""
        if not self._ending:
            self._ending = True
            deadline_s = self.loop.time() + self.time_left_s
            self.loop.call_later(_FAREWELL_S, self._end, deadline_s)

    def _end(self, deadline_s: float) -> None:
        """Shut the connection, unless a page is still on its way to a slow peer.

        That one has as long as any stranger: until its deadline.
        """
        if self.transport.get_write_buffer_size() and self.loop.time() < deadline_s:
            self.loop.call_later(_FAREWELL_S, self._end, deadline_s)
        else:
            self.transport.abort()

    @property
    def time_left_s(self) -> float:
        """How long its hello may still take."""
        if self._visitor is None:
            return self._entrance.allowed.handshake_s
        return max(0.0, self._visitor.deadline_s - self.loop.time())


def listen(host: str, port: int, entrance: Entrance) -> list[Listener]:
    """Bind the addresses of a host.

    Args:
        host: a name or address; empty for all.
        port: 0 for a free one, the same for all addresses.
        entrance: where the sockets lead.

    Raises:
        OSError: when one cannot be listened on.
        OverflowError: when the port is none.
    """
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    listeners: list[Listener] = []
    try:
        for family, address in dict.fromkeys((entry[0], entry[4]) for entry in found):
            try:
                listener = Listener(family, entrance)
            except OSError:
                if (family, address) == (found[-1][0], found[-1][4]) and not listeners:
                    raise
                continue  # a name may have an address of a kind that this machine does not know
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
    """Raise this process's limit of open files as far as it may itself; for commands."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def open_files_limit() -> int | None:
    """How many files and connections this process may have open; None for any number."""
    try:
        import resource
    except ImportError:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft
