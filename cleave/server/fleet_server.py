"""A server that devices join over WebSockets, with plain HTTP on the same port."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from http import HTTPStatus
from types import TracebackType
from typing import Any, Final, Self, cast

from websockets.asyncio.server import ServerConnection
from websockets.asyncio.server import serve as serve_websockets
from websockets.datastructures import Headers
from websockets.http11 import Request, Response

from cleave.errors import ProtocolError, UsageError
from cleave.fleet.counters import StepProgress
from cleave.fleet.fleet import Fleet
from cleave.planner.coding import CodingPolicy
from cleave.planner.plan import Planner, PsRates
from cleave.planner.tiles.planner import TilePlanner
from cleave.protocol import limits, messages
from cleave.protocol.codec import decode, encode
from cleave.protocol.messages import ErrorCode, Role
from cleave.scheduler.fleet_events import EventListener
from cleave.scheduler.sessions.admission import (
    AccessLevel,
    Authenticator,
    Refusal,
    SharedSecretAuth,
    clean_text,
)
from cleave.scheduler.sessions.handshake import FULL_RETRY_S, other_version
from cleave.scheduler.sessions.session_manager import SessionManager
from cleave.scheduler.stages.runs import StagesOn
from cleave.scheduler.tiles.check_policy import Verification
from cleave.server.runtime import LiveRuntime, Numbering
from cleave.transport import listener
from cleave.transport.addresses import bracketed, origins, parse_origin
from cleave.transport.connect import plain_reason
from cleave.transport.connection import (
    WRITE_LIMIT_BYTES,
    Connection,
    ConnectionLostError,
    CutError,
    WebSocketConnection,
)
from cleave.transport.connection_limits import ConnectionLimits
from cleave.transport.http import HttpAnswer, HttpHandler, HttpRequest, read_request
from cleave.transport.join_url import JOIN_PATH, JoinUrl
from cleave.transport.listener import GuardedConnection
from cleave.transport.rejection_log import RejectionLog
from cleave.transport.tls import Security, expose

WEBSOCKET_PATH = "/ws"

_MAX_REASON: Final = 200  # characters of the reason why a session ended

_WHY: Final = {
    ErrorCode.CREDENTIAL: "wrong credential",
    ErrorCode.VERSION: "another version of the protocol",
    ErrorCode.PROTOCOL: "its first message was no acceptable hello",
    ErrorCode.QUARANTINED: "it is in quarantine",
}
"""Logged reason per error code, never the client's own text. `LIMIT` refusals log their message."""

OperatorHandler = Callable[[Connection, messages.Hello, AccessLevel], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Configures how a server listens, and which devices and operators it admits.

    Attributes:
        host: address to listen on; `0.0.0.0` for every network of this machine.
        port: port to listen on; 0 for any free one.
        credential: secret that devices must show; random by default. It is part of `url`.
        operator_credential: secret that operators must show; part of `operator_url`.
        viewer_credential: secret in `dashboard_url`; `auth` decides what it permits.
        planner: chooses the tiles.
        operator: handles operators' sessions; if None, operators are refused.
        pages: answers plain HTTP requests other than `/healthz`; if None, they get 404.
        events: called in the server's thread with every event of the fleet.
        verify: which results to check before use (`cleave.verify`), as for `cleave serve --verify`:
            True or `auto`, `all`, `sample:P`, False or `off`. A wrong result is computed on another
            device. A device that sends several, or one that is wrong as a whole, is quarantined.
        auth: decides which devices and operators are admitted. By default they must show the
            credentials above. If given, those credentials only appear in the URLs.
        security: TLS, and which web pages may connect from browsers. By default loopback has no
            TLS. Elsewhere the server makes a certificate, whose fingerprint is in `url`.
        allowed: limits on the number of connections and the duration of a handshake.
        stages_on: which devices may train whole layers, as for `cleave serve --stages-on`: `own` or
            `any`. Devices that show `credential` are own, unless `auth` is given and decides.
        coding: on which links payloads are compressed, as for `cleave serve --coding`: `auto` (slow
            links), `on` or `off`.
        card: rates of the network card that devices share; None for no limit.
        numbering: numbers the devices' sessions.
    """

    host: str = "127.0.0.1"
    port: int = 0
    credential: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    operator_credential: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    viewer_credential: str = ""
    planner: Planner = field(default_factory=TilePlanner)
    operator: OperatorHandler | None = None
    pages: HttpHandler | None = None
    events: EventListener | None = None
    verify: Verification | str | bool = True
    auth: Authenticator | None = None
    security: Security = field(default_factory=Security)
    allowed: ConnectionLimits = field(default_factory=ConnectionLimits)
    stages_on: StagesOn | str = StagesOn.OWN
    coding: CodingPolicy | str = CodingPolicy.AUTO
    card: PsRates | None = None
    numbering: Numbering = field(default_factory=Numbering)


class Server:
    """Runs a parameter server in this process. Create it with `serve`; leaving its block closes it.

    Attributes:
        fleet: the connected devices, as training code uses them.
        live: the fleet's runtime, for code that reads its state in the server's loop.
        address: listening address: `url` without the credential.
        url: join URL for devices, including the credential.
        page_url: join page for browsers, including the credential.
        operator_url: URL for operators, including their credential.
        dashboard_url: dashboard URL for viewers; empty if viewers have no credential.
        fingerprint: certificate fingerprint that clients pin; empty if they do not pin one.
    """

    def __init__(self, config: ServerConfig) -> None:
        auth = config.auth or SharedSecretAuth(config.credential, config.operator_credential)
        descriptors = listener.open_files_limit()
        allowed = config.allowed if descriptors is None else config.allowed.within(descriptors)
        exposure = expose(config.host, config.security, datetime.now(UTC))
        manager = SessionManager(
            verify=config.verify,
            auth=auth,
            max_devices=allowed.devices,
            stages_on=config.stages_on,
            coding=config.coding,
            card=config.card,
        )
        self.live = LiveRuntime(manager, config.events, config.numbering)
        self.fleet = Fleet(self.live, config.planner)
        self.fingerprint = exposure.fingerprint
        self._exposure = exposure
        self._allowed = allowed
        self._origins = frozenset(parse_origin(o) for o in config.security.allow_origins)
        self._present = dict.fromkeys(AccessLevel, 0)
        self._operator = config.operator
        self._pages = config.pages
        self._credential = config.credential
        self._operator_credential = config.operator_credential
        self._viewer_credential = config.viewer_credential
        host, port = config.host, config.port
        self._stop: asyncio.Event | None = None
        self._failure: BaseException | None = None
        started = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._main(host, port, started)),
            name="cleave-server",
            daemon=True,
        )
        self._thread.start()
        started.wait()
        if self._failure is not None:
            raise UsageError(
                f"cannot listen on {host}:{port} ({plain_reason(self._failure)}); "
                f"choose another --port, or stop what uses it"
            )

    async def _main(self, host: str, port: int, started: threading.Event) -> None:
        """Listen and serve in the server's thread until the server is closed."""
        loop = self.live.loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        log = RejectionLog(lambda: datetime.now().astimezone(), loop.call_later)
        gate = listener.ConnectionGate(self._allowed, log, loop)
        context = self._exposure.context
        secured: dict[str, Any] = {} if context is None else {"ssl": context}
        try:
            sockets = listener.listen(host, port, gate)
            servers = [
                await serve_websockets(
                    self._accept,
                    sock=socket,
                    backlog=listener.BACKLOG,
                    process_request=self._answer_http,
                    compression=None,
                    max_size=limits.MAX_MESSAGE_BYTES,
                    ping_interval=None,  # the protocol has its own heartbeats
                    write_limit=WRITE_LIMIT_BYTES,
                    open_timeout=self._allowed.handshake_s,
                    server_header=None,
                    logger=_websockets_logger,
                    create_connection=cast(
                        type[ServerConnection], partial(GuardedConnection, gate)
                    ),
                    **secured,
                )
                for socket in sockets
            ]
        except (OSError, OverflowError) as error:
            self._failure = error
            started.set()
            return
        self._announce_addresses(int(sockets[0].getsockname()[1]))
        watch = asyncio.create_task(self.live.watch())
        started.set()
        await self._stop.wait()
        watch.cancel()
        for server in servers:
            server.close(close_connections=False)
        await self.live.end_sessions()
        for server in servers:
            server.close()
        for server in servers:
            await server.wait_closed()
        log.flush()

    def _announce_addresses(self, port: int) -> None:
        """Set the URLs once the port is known."""
        shown, secure = self._exposure, self._exposure.context is not None
        scheme = "wss" if secure else "ws"
        self.address = f"{scheme}://{bracketed(shown.host)}:{port}{WEBSOCKET_PATH}"
        self.url = self.join_url(self._credential)
        self.page_url = self.join_page_url(self._credential)
        self.operator_url = JoinUrl(
            self.address, self._operator_credential, fingerprint=shown.fingerprint
        ).text
        viewer = JoinUrl(self.address, self._viewer_credential)
        self.dashboard_url = viewer.page("/") if viewer.credential else ""
        self._origins |= origins(shown.names, port, secure=secure)

    async def _accept(self, socket: ServerConnection) -> None:
        """Read the hello within a time limit, then serve the device's or operator's session."""
        assert isinstance(socket, GuardedConnection)
        connection = WebSocketConnection(socket)
        socket.opened()
        auth = self.live.manager.auth
        try:
            async with asyncio.timeout(socket.time_left_s):
                first = decode(await connection.receive())
            if isinstance(first, messages.Hello) and first.role is Role.OPERATOR:
                await self._accept_operator(socket, connection, first)
            else:
                answered = partial(_answered, socket)
                await self.live.session(connection, first, _address(socket), answered)
        except CutError:
            auth.failed(_address(socket))
        except ConnectionLostError:
            return
        except TimeoutError:
            late = messages.Error(ErrorCode.LIMIT, "no hello came in time")
            await _refuse(socket, connection, late)
        except ProtocolError as broken:
            if auth.failed(_address(socket)):
                await _refuse(socket, connection, messages.Error(ErrorCode.PROTOCOL, str(broken)))
            else:  # in a flood, a silent cut costs least
                socket.cut("it sent no acceptable hello, after too many failed attempts")

    async def _accept_operator(
        self, socket: GuardedConnection, connection: Connection, hello: messages.Hello
    ) -> None:
        """Refuse an operator or viewer, or serve its session."""
        auth = self.live.manager.auth
        if hello.version != limits.VERSION:
            error = messages.Error(
                ErrorCode.VERSION, other_version(hello), versions=(limits.VERSION,)
            )
            await _refuse(socket, connection, error)
            return
        verdict = auth.admit_operator(hello.credential, _address(socket))
        if isinstance(verdict, Refusal):
            error = messages.Error(verdict.code, verdict.reason, verdict.retry_after_s)
            await _refuse(socket, connection, error)
        elif self._present[verdict] >= self._allowed.operators:
            reason = f"this server takes {self._allowed.operators} {verdict.value}s and has them"
            error = messages.Error(ErrorCode.LIMIT, reason, FULL_RETRY_S)
            await _refuse(socket, connection, error)
        elif self._operator is None:
            reason = "this server takes no operators: it belongs to a program that trains already"
            await _refuse(socket, connection, messages.Error(ErrorCode.REQUEST, reason))
        else:
            socket.admitted(limits.MAX_HEADER_BYTES)  # operators send no arrays
            self._present[verdict] += 1
            try:
                await self._operator(connection, hello, verdict)
            finally:
                self._present[verdict] -= 1

    def _answer_http(self, socket: ServerConnection, request: Request) -> Response | None:
        """Answer a plain HTTP request; return None for a WebSocket request."""
        assert isinstance(socket, GuardedConnection)
        secure = self._exposure.context is not None
        asked = read_request(request.path, request.headers, _address(socket), secure=secure)
        if asked.path != WEBSOCKET_PATH:
            return self._answer_plain(socket, request.method, asked)
        stated = request.headers.get_all("Origin")  # only browsers send it
        if any(origin.lower() not in self._origins for origin in stated):
            socket.refused("a web page of another origin, which --allow-origin would allow")
            return socket.respond(HTTPStatus.FORBIDDEN, "pages of this origin may not connect\n")
        return None

    def _answer_plain(self, socket: GuardedConnection, method: str, asked: HttpRequest) -> Response:
        """Answer a plain HTTP request."""
        if method not in ("GET", "HEAD"):
            socket.refused("it asked with another method than GET")
            answer = HttpAnswer.text(HTTPStatus.METHOD_NOT_ALLOWED, "GET or HEAD\n")
            return _response(answer.having(("Allow", "GET, HEAD")))
        found = HttpAnswer.text(HTTPStatus.OK, "ok\n") if asked.path == "/healthz" else None
        if found is None and self._pages is not None:
            found = self._pages(asked)
        if found is None:
            socket.refused("it asked for a path that does not exist")
            return _response(HttpAnswer.text(HTTPStatus.NOT_FOUND, "nothing is here\n"))
        socket.answered()
        return _response(found, head=method == "HEAD")

    def join_url(self, credential: str) -> str:
        """Return the join URL for devices with this credential or join code."""
        return self._joining(credential).text

    def join_page_url(self, credential: str) -> str:
        """Return the join page's URL with this credential. `cleave join` accepts it too."""
        return self._joining(credential).page(JOIN_PATH)

    def _joining(self, credential: str) -> JoinUrl:
        """Return the join URL with a credential."""
        server = self.live.manager.auth.server
        return JoinUrl(self.address, credential, server, self.fingerprint)

    def end_identity(self, identity: int, code: ErrorCode, reason: str) -> None:
        """End a device's sessions and tell it why. Call this in the server's loop."""
        self.live.end_identity(identity, code, reason)

    def mark_own(self, identity: int, own: bool) -> None:
        """Set whether a device belongs to the operator. Call this in the server's loop."""
        self.live.mark_own(identity, own)

    def credit(self) -> None:
        """Report the devices' work so far to the authenticator. Call this in the server's loop."""
        self.live.credit()

    def progress(self) -> StepProgress | None:
        """Return the current step's progress, if any. Call this in the server's loop."""
        return self.live.progress()

    def describe_devices(self) -> list[dict[str, object]]:
        """Return the connected devices as plain values. Call this in the server's loop."""
        manager = self.live.manager
        return [
            {
                "device": session.id,
                "identity": session.identity,
                "own": session.own,
                "name": session.name,
                "state": manager.state(session).value,
                "reason": session.reason,
                "blocks": session.counters.blocks,
                "compute_s": session.counters.compute_s,
                "failures": session.counters.failures,
                "failure": session.setbacks.last,
            }
            for session in manager.sessions.values()
        ]

    def close(self) -> None:
        """Send every device a `bye`, stop listening, and end the server's thread. Idempotent."""
        self.fleet.close()
        loop, stop = self.live.loop, self._stop
        if loop is not None and stop is not None and self._thread.is_alive():
            loop.call_soon_threadsafe(stop.set)
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _address(socket: ServerConnection) -> str:
    """Return the remote address of a connection."""
    peer = socket.remote_address
    return str(peer[0]) if peer else ""


def _response(answer: HttpAnswer, *, head: bool = False) -> Response:
    """Convert an answer for the WebSocket library; the connection closes after it."""
    length = str(len(answer.body))
    headers = Headers([*answer.headers, ("Content-Length", length), ("Connection", "close")])
    body = b"" if head else answer.body
    return Response(answer.status, HTTPStatus(answer.status).phrase, headers, body)


def _answered(socket: GuardedConnection, refusal: messages.Error | None, name: str = "") -> None:
    """Record the answer to a hello, or the reason why an admitted device's session ended."""
    if refusal is None:
        socket.admitted(limits.MAX_DEVICE_HEADER_BYTES)
    elif socket.inside:
        said = clean_text(refusal.message, _MAX_REASON)
        socket.refused(f"the session of {name} ended ({refusal.code.value}): {said}")
    elif refusal.code is ErrorCode.LIMIT:
        socket.refused(refusal.message)  # written by this server, with numbers
    else:
        socket.refused(_WHY.get(refusal.code, refusal.code.value))


async def _refuse(
    socket: GuardedConnection, connection: Connection, message: messages.Error
) -> None:
    """Answer a hello with an error and close the connection."""
    _answered(socket, message)
    try:
        await connection.send(encode(message))
        await connection.close()
    except ConnectionLostError:
        return


def _unexpected(record: logging.LogRecord) -> bool:
    """Keep only the server's own unexpected errors, and reword them."""
    error = record.exc_info[1] if record.exc_info else None
    while isinstance(error, BaseExceptionGroup):  # from a task group
        error = error.exceptions[0]
    # Strangers cause failed handshakes; the rejection log already has them.
    if error is None or record.msg == "opening handshake failed":
        return False
    record.msg, record.args = "unexpected %s in a session: %s", (type(error).__name__, error)
    return True


_websockets_logger = logging.getLogger(f"{__name__}.websockets")
"""Logger of the WebSocket library, limited to unexpected errors.

Otherwise it logs a traceback for every stray request and, at level DEBUG, all credentials.
"""

_websockets_logger.setLevel(logging.ERROR)
_websockets_logger.addFilter(_unexpected)


def serve(config: ServerConfig | None = None, **changes: Any) -> Server:
    """Listen for devices in a thread of this process and return the server.

    Args:
        config: how to listen; by default on loopback and any free port.
        changes: `ServerConfig` fields to override.

    Raises:
        UsageError: when the address cannot be listened on, something that TLS needs is missing, or
            `verify`, `stages_on` or `coding` has an unknown value.

    Example:
        >>> with serve(port=0) as server:
        ...     server.url.startswith("ws://127.0.0.1:"), server.fleet.device_count
        (True, 0)
    """
    return Server(replace(config or ServerConfig(), **changes))
