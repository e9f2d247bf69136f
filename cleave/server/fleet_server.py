"""A parameter server that devices join over WebSockets. It serves HTTP on the same port."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from http import HTTPStatus
from typing import Any, Final, Self, cast
from urllib.parse import urlsplit

from websockets.asyncio.server import ServerConnection
from websockets.asyncio.server import serve as serve_websockets
from websockets.datastructures import Headers
from websockets.http11 import Request, Response

from cleave.errors import ProtocolError, UsageError
from cleave.fleet.fleet import Fleet
from cleave.planner.coding import CodingPolicy
from cleave.planner.plan import Planner, PsRates
from cleave.planner.tiles.planner import TilePlanner
from cleave.protocol import limits, messages
from cleave.protocol.codec import decode, encode
from cleave.protocol.messages import ErrorCode, Role
from cleave.scheduler.counters import StepProgress
from cleave.scheduler.sessions.admission import (
    AccessLevel,
    Authenticator,
    Refusal,
    SharedSecretAuth,
    clean_text,
)
from cleave.scheduler.sessions.joining import FULL_RETRY_S, other_version
from cleave.scheduler.sessions.result_judging import Verification
from cleave.scheduler.sessions.session import EventListener, Session
from cleave.scheduler.sessions.session_manager import SessionManager
from cleave.scheduler.stages.resident import KeptState
from cleave.scheduler.stages.runs import StagesOn
from cleave.server.runtime import LiveRuntime, Numbering
from cleave.transport import listener
from cleave.transport.addresses import bracketed, is_loopback_address, origins, parse_origin
from cleave.transport.connection import (
    WRITE_LIMIT_BYTES,
    Connection,
    ConnectionLostError,
    CutError,
    WebSocketConnection,
)
from cleave.transport.connection_limits import ConnectionLimits, RejectionLog
from cleave.transport.http import HttpAnswer, HttpHandler, HttpRequest, read_request
from cleave.transport.join_url import JOIN_PATH, JoinUrl, plain_reason
from cleave.transport.listener import GuardedConnection
from cleave.transport.tls import Security, expose

WEBSOCKET_PATH = "/ws"
RELAY: Final = "relay"  # stands for the IP address of a client that may be behind a relay

_MAX_REASON: Final = 200  # maximum length of the logged reason for a session's end, in characters

_WHY: Final = {
    ErrorCode.CREDENTIAL: "wrong credential",
    ErrorCode.VERSION: "unsupported protocol version",
    ErrorCode.PROTOCOL: "its first message was not a valid hello",
    ErrorCode.QUARANTINED: "the device is in quarantine",
}
"""For each error code, the reason that the server logs. The server never logs a client's text.

`LIMIT` has no entry: the server logs the message of the refusal, which the server itself wrote.
"""

OperatorHandler = Callable[[Connection, messages.Hello, AccessLevel], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Settings of a server, such as its address and the rules for admitting devices.

    Attributes:
        host: address to listen on; `0.0.0.0` for all network interfaces.
        port: port to listen on; 0 for any free port.
        credential: secret that devices must send; random by default. `Server.url` contains it.
        operator_credential: secret that operators must send; random by default.
            `Server.operator_url` contains it.
        viewer_credential: secret in `Server.dashboard_url`. `auth` decides what viewers may do.
        planner: divides each GEMM into tiles.
        operator: handles the sessions of operators and viewers; if None, the server refuses both.
        pages: handles HTTP requests for paths other than `/healthz`; if None, the status is 404.
        events: called in the server's thread with every event of the fleet.
        verify: which results the PS checks before it uses them, as for `cleave serve --verify`:
            True or `auto`, `all`, `sample:P`, False or `off`. The PS reissues a task with a wrong
            result to another device. It quarantines a device that sends several wrong results, or
            one entirely wrong result.
        auth: decides which devices and operators are admitted. By default, clients must send the
            credentials above. With `auth`, the credentials above are used only in the URLs.
        security: TLS settings, and which web pages may connect from browsers. By default, a server
            on loopback uses no TLS. Other servers create a certificate and put its fingerprint into
            `Server.url`.
        allowed: limits on the number of connections and on the duration of a handshake.
        stages_on: which devices may train whole layers, as for `cleave serve --stages-on`: `own` or
            `any`. Without `auth`, every device that sends `credential` counts as `own`.
        coding: on which links payloads are compressed, as for `cleave serve --coding`: `auto` (slow
            links), `on` or `off`.
        card: rates of the server's network card, which all devices share; None if unlimited.
        numbering: the session numbers that this server assigns to devices.
        kept: records of trained state that devices may still hold when they return. An earlier
            process of this server must have recorded them in a run that this server resumes
            immediately.
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
    kept: Sequence[KeptState] = ()


class Server:
    """A parameter server that runs in a thread of this process. Create it with `serve`.

    The server is a context manager, which closes the server when the `with` block ends.

    Attributes:
        fleet: the connected devices, for use by training code.
        live: the fleet's runtime, for code that reads its state in the server's event loop.
        address: WebSocket URL of the server, without a credential. With `Security.public_url`, the
            relay's URL.
        url: join URL for devices, including the device credential.
        page_url: URL of the join page for browsers, including the device credential.
        operator_url: URL for operators, including the operator credential. It does not lead through
            the relay of `Security.public_url`.
        dashboard_url: dashboard URL for viewers; empty if no viewer credential is configured.
        fingerprint: fingerprint of the only certificate that clients accept; empty if clients
            verify the certificate as usual, or without TLS.
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
            kept=config.kept,
        )
        self.live = LiveRuntime(manager, config.events, config.numbering)
        self.fleet = Fleet(self.live, config.planner)
        self.fingerprint = exposure.fingerprint
        self._exposure = exposure
        self._allowed = allowed
        self._origins = frozenset(parse_origin(o) for o in config.security.allow_origins)
        self._present = dict.fromkeys(AccessLevel, 0)
        self._config = config
        self._stop: asyncio.Event | None = None
        self._failure: BaseException | None = None
        started = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._main(started)), name="cleave-server", daemon=True
        )
        self._thread.start()
        started.wait()
        if self._failure is not None:
            raise UsageError(
                f"cannot listen on {config.host}:{config.port} ({plain_reason(self._failure)}); "
                f"choose another --port, or stop the program that uses it"
            )

    async def _main(self, started: threading.Event) -> None:
        """Listen for connections and serve sessions until the server is closed."""
        loop = self.live.loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        log = RejectionLog(lambda: datetime.now().astimezone(), loop.call_later)
        gate = listener.ConnectionGate(self._allowed, log, loop)
        context = self._exposure.context
        secured: dict[str, Any] = {} if context is None else {"ssl": context}
        try:
            sockets = listener.listen(self._config.host, self._config.port, gate)
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
        """Set the URL attributes and the allowed origins, now that the port is known."""
        shown, secure = self._exposure, self._exposure.context is not None
        scheme = "wss" if secure else "ws"
        direct = f"{scheme}://{bracketed(shown.host)}:{port}"
        self.address = f"{shown.public or direct}{WEBSOCKET_PATH}"
        self._direct_address = f"{direct}{WEBSOCKET_PATH}"
        self.url = self.join_url(self._config.credential)
        self.page_url = self.join_page_url(self._config.credential)
        self.operator_url = JoinUrl(
            self._direct_address, self._config.operator_credential, fingerprint=shown.fingerprint
        ).text
        viewer = JoinUrl(self.address, self._config.viewer_credential)
        self.dashboard_url = viewer.page("/") if viewer.credential else ""
        self._origins |= origins(shown.names, port, secure=secure)
        if shown.public:
            self._origins |= {parse_origin(shown.public.replace("ws", "http", 1))}

    async def _accept(self, socket: ServerConnection) -> None:
        """Read the client's `hello` within a time limit, then serve its session."""
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
                await self.live.session(connection, first, self._peer(socket), answered)
        except CutError:
            auth.failed(self._peer(socket))
        except ConnectionLostError:
            return
        except TimeoutError:
            late = messages.Error(ErrorCode.LIMIT, "no hello arrived in time")
            await _refuse(socket, connection, late)
        except ProtocolError as broken:
            if auth.failed(self._peer(socket)):
                await _refuse(socket, connection, messages.Error(ErrorCode.PROTOCOL, str(broken)))
            else:  # during a flood, aborting without a response costs least
                socket.cut("it sent no valid hello, after too many failed attempts")

    async def _accept_operator(
        self, socket: GuardedConnection, connection: Connection, hello: messages.Hello
    ) -> None:
        """Admit or refuse an operator or viewer, and serve the session of an admitted client."""
        auth = self.live.manager.auth
        version, operator = limits.VERSION, self._config.operator
        if hello.version != version:
            error = messages.Error(ErrorCode.VERSION, other_version(hello), versions=(version,))
            return await _refuse(socket, connection, error)
        verdict = auth.admit_operator(hello.credential, self._peer(socket))
        if isinstance(verdict, Refusal):
            error = messages.Error(verdict.code, verdict.reason, verdict.retry_after_s)
            return await _refuse(socket, connection, error)
        if self._present[verdict] >= self._allowed.operators:
            reason = f"this server has {self._allowed.operators} {verdict.value}s, the maximum"
            error = messages.Error(ErrorCode.LIMIT, reason, FULL_RETRY_S)
            return await _refuse(socket, connection, error)
        if operator is None:
            reason = (
                "this server does not accept operators, because a program controls its training"
            )
            return await _refuse(socket, connection, messages.Error(ErrorCode.REQUEST, reason))
        socket.admitted(limits.MAX_HEADER_BYTES)  # operators send no arrays
        self._present[verdict] += 1
        try:
            return await operator(connection, hello, verdict)
        finally:
            self._present[verdict] -= 1

    def _answer_http(self, socket: ServerConnection, request: Request) -> Response | None:
        """Return the response to a plain HTTP request; None to continue a WebSocket handshake."""
        assert isinstance(socket, GuardedConnection)
        shown = self._exposure
        # A relay that terminates TLS passes on plain HTTP.
        relayed = shown.public.startswith("wss:") and (
            request.headers.get_all("Host") == [urlsplit(shown.public).netloc]
        )
        secure = shown.context is not None or relayed
        asked = read_request(request.path, request.headers, self._peer(socket), secure=secure)
        if asked.path != WEBSOCKET_PATH:
            return self._answer_plain(socket, request.method, asked)
        stated = request.headers.get_all("Origin")  # only browsers send it
        if any(origin.lower() not in self._origins for origin in stated):
            socket.refused("a web page of another origin, which --allow-origin could permit")
            return socket.respond(
                HTTPStatus.FORBIDDEN, "web pages of this origin are not allowed to connect\n"
            )
        return None

    def _answer_plain(self, socket: GuardedConnection, method: str, asked: HttpRequest) -> Response:
        """Return the response to an HTTP request for a page or for `/healthz`."""
        if method not in ("GET", "HEAD"):
            socket.refused("it sent a request with a method other than GET")
            answer = HttpAnswer.text(HTTPStatus.METHOD_NOT_ALLOWED, "GET or HEAD\n")
            return _response(answer.having(("Allow", "GET, HEAD")))
        found = HttpAnswer.text(HTTPStatus.OK, "ok\n") if asked.path == "/healthz" else None
        if found is None and self._config.pages is not None:
            found = self._config.pages(asked)
        if found is None:
            socket.refused("it requested a path that does not exist")
            return _response(HttpAnswer.text(HTTPStatus.NOT_FOUND, "not found\n"))
        socket.answered()
        return _response(found, head=method == "HEAD")

    def join_url(self, credential: str) -> str:
        """Return the join URL for devices. `credential` may be a join code."""
        return self._joining(credential).text

    def direct_join_url(self, credential: str) -> str:
        """Return the join URL for a device on this machine, which does not lead through a relay."""
        return replace(self._joining(credential), address=self._direct_address).text

    def join_page_url(self, credential: str) -> str:
        """Return the URL of the join page for browsers, which `cleave join` also accepts."""
        return self._joining(credential).page(JOIN_PATH)

    def _joining(self, credential: str) -> JoinUrl:
        server = self.live.manager.auth.server
        return JoinUrl(self.address, credential, server, self.fingerprint)

    def end_identity(self, identity: int, code: ErrorCode, reason: str) -> None:
        """End a device's sessions and send it the reason. Call this in the server's event loop."""
        live = self.live
        live.execute(live.manager.refuse_identity(identity, code, reason, live.now()))

    def mark_own(self, identity: int, own: bool) -> None:
        """Set whether the operator owns a device. Call this in the server's event loop."""
        self.live.execute(self.live.manager.mark_own(identity, own, self.live.now()))

    def credit(self) -> None:
        """Report the devices' work to the authenticator. Call this in the server's event loop."""
        self.live.manager.credit(self.live.now())

    def progress(self) -> StepProgress | None:
        """Return the current step's progress; None if unknown. Call this in the event loop."""
        return self.live.progress()

    def describe_devices(self) -> list[dict[str, object]]:
        """Describe each connected device as a JSON object. Call this in the server's event loop."""
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
                "rates": _rates(session),
            }
            for session in manager.sessions.values()
        ]

    def _peer(self, socket: ServerConnection) -> str:
        """Return the IP address of a connection's peer, or `RELAY` if the peer may be a relay.

        A relay such as an SSH tunnel may end on this machine, so that unknown clients connect from
        loopback. Their connections must not count as connections of local programs.
        """
        peer = socket.remote_address
        address = str(peer[0]) if peer else ""
        return RELAY if self._exposure.public and is_loopback_address(address) else address

    def close(self) -> None:
        """Send a `bye` to every device, stop listening, and end the server's thread. Idempotent."""
        self.fleet.close()
        loop, stop = self.live.loop, self._stop
        if loop is not None and stop is not None and self._thread.is_alive():
            loop.call_soon_threadsafe(stop.set)
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _response(answer: HttpAnswer, *, head: bool = False) -> Response:
    """Convert an answer to a response that closes the connection. If `head`, omit the body."""
    length = str(len(answer.body))
    headers = Headers([*answer.headers, ("Content-Length", length), ("Connection", "close")])
    body = b"" if head else answer.body
    return Response(answer.status, HTTPStatus(answer.status).phrase, headers, body)


def _answered(socket: GuardedConnection, refusal: messages.Error | None, name: str = "") -> None:
    """Record that a connection's `hello` was accepted, or why its session was refused or ended."""
    if refusal is None:
        socket.admitted(limits.MAX_DEVICE_HEADER_BYTES)
    elif socket.inside:
        said = clean_text(refusal.message, _MAX_REASON)
        socket.refused(f"the session of {name} ended ({refusal.code.value}): {said}")
    elif refusal.code is ErrorCode.LIMIT:
        socket.refused(refusal.message)  # safe to log: this server wrote the message
    else:
        socket.refused(_WHY.get(refusal.code, refusal.code.value))


async def _refuse(
    socket: GuardedConnection, connection: Connection, message: messages.Error
) -> None:
    """Respond to a `hello` with an error message, and close the connection."""
    _answered(socket, message)
    try:
        await connection.send(encode(message))
        await connection.close()
    except ConnectionLostError:
        return


def _unexpected(record: logging.LogRecord) -> bool:
    """Return whether a record reports an unexpected error. If it does, reword the record."""
    error = record.exc_info[1] if record.exc_info else None
    while isinstance(error, BaseExceptionGroup):  # from a task group
        error = error.exceptions[0]
    # Unknown clients cause failed handshakes, which the rejection log already contains.
    if error is None or record.msg == "opening handshake failed":
        return False
    record.msg, record.args = "unexpected %s in a session: %s", (type(error).__name__, error)
    return True


_websockets_logger = logging.getLogger(f"{__name__}.websockets")
"""Logger for the WebSocket library, restricted to unexpected errors.

Without the restriction, the library would log a traceback for every invalid request and, at level
DEBUG, all credentials.
"""

_websockets_logger.setLevel(logging.ERROR)
_websockets_logger.addFilter(_unexpected)


def serve(config: ServerConfig | None = None, **changes: Any) -> Server:
    """Start a server in a thread of this process and return it once it listens for devices.

    Args:
        config: settings; by default, the server listens on loopback and any free port.
        changes: values for `ServerConfig` fields, which override the values in `config`.

    Raises:
        UsageError: if the server cannot listen on the address, if a package or file for TLS is
            missing, or if `verify`, `stages_on` or `coding` has an unknown value.

    Example:
        >>> with serve(port=0) as server:
        ...     server.url.startswith("ws://127.0.0.1:"), server.fleet.device_count
        (True, 0)
    """
    return Server(replace(config or ServerConfig(), **changes))


def _rates(session: Session) -> dict[str, float]:
    """Return the speed and the link that plans assume of a device; empty until it is measured."""
    if session.rates is None or session.probe is not None:
        return {}
    names = ("flops_per_s", "downlink_bytes_per_s", "uplink_bytes_per_s")
    return {name: getattr(session.rates, name) for name in names}
