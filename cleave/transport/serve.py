"""A fleet that listens: devices join it over WebSockets; the same port answers plain HTTP."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from urllib.parse import quote

from websockets.asyncio.server import ServerConnection
from websockets.asyncio.server import serve as serve_websockets
from websockets.http11 import Request, Response

from cleave.errors import ProtocolError, UsageError
from cleave.fleet.coordinator import Coordinator
from cleave.fleet.fleet import Fleet
from cleave.fleet.verification import Verification
from cleave.planner.plan import Planner
from cleave.planner.planner import TilePlanner
from cleave.protocol import limits, messages
from cleave.protocol.codec import decode, encode
from cleave.protocol.messages import ErrorCode, Message, Role
from cleave.transport.connection import (
    WRITE_LIMIT_BYTES,
    Connection,
    ConnectionLostError,
    WebSocketConnection,
)
from cleave.transport.join import plain_reason
from cleave.transport.live import LiveShell

WEBSOCKET_PATH = "/ws"

OperatorHandler = Callable[[Connection, messages.Hello], Awaitable[None]]


class ServedFleet(Fleet):
    """A fleet of devices that join over the network. Made by `serve`.

    Attributes:
        url: what a device needs to join, its credential included.
        operator_url: likewise for operators.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        credential: str,
        operator_credential: str,
        planner: Planner,
        notify: Callable[[str], None] | None,
        operator: OperatorHandler | None,
        verify: Verification | str | bool,
    ) -> None:
        self._live = LiveShell(Coordinator(credential, verify=verify), notify)
        super().__init__(self._live, planner)
        self._operator = operator
        self._operator_credential = operator_credential
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
        self._live.loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        try:
            server = await serve_websockets(
                self._accept,
                host,
                port,
                process_request=self._answer_http,
                compression=None,
                max_size=limits.MAX_MESSAGE_BYTES,
                ping_interval=None,  # the protocol has heartbeats of its own
                write_limit=WRITE_LIMIT_BYTES,
                open_timeout=limits.HANDSHAKE_S,
            )
        except (OSError, OverflowError) as error:
            self._failure = error
            started.set()
            return
        bound_host, bound_port = server.sockets[0].getsockname()[:2]
        shown = f"[{bound_host}]" if ":" in bound_host else bound_host
        address = f"ws://{shown}:{bound_port}{WEBSOCKET_PATH}"
        self.url = f"{address}#c={quote(self._live.coordinator.credential, safe='')}"
        self.operator_url = f"{address}#c={quote(self._operator_credential, safe='')}"
        watch = asyncio.create_task(self._live.watch())
        started.set()
        await self._stop.wait()
        watch.cancel()
        server.close(close_connections=False)
        await self._live.end_sessions()
        server.close()
        await server.wait_closed()

    async def _accept(self, socket: ServerConnection) -> None:
        connection = WebSocketConnection(socket)
        try:
            async with asyncio.timeout(limits.HANDSHAKE_S):
                first = decode(await connection.receive())
            if isinstance(first, messages.Hello) and first.role is Role.OPERATOR:
                await self._accept_operator(connection, first)
            else:
                await self._live.session(connection, first)
        except ConnectionLostError:
            return
        except TimeoutError:
            await _refuse(connection, ErrorCode.LIMIT, "no hello came in time")
        except ProtocolError as error:
            await _refuse(connection, ErrorCode.PROTOCOL, str(error))

    async def _accept_operator(self, connection: Connection, hello: messages.Hello) -> None:
        expected = self._operator_credential
        if hello.version != limits.VERSION:
            reason = (
                f"this server speaks protocol version {limits.VERSION} and the client speaks "
                f"{hello.version}; install the same version of cleave on both"
            )
            await _refuse(connection, ErrorCode.VERSION, reason)
        elif not secrets.compare_digest(hello.credential.encode(), expected.encode()):
            reason = "the credential is not valid; use the operator's URL that the server printed"
            await _refuse(connection, ErrorCode.CREDENTIAL, reason)
        elif self._operator is None:
            reason = "this server takes no operators: it belongs to a program that trains already"
            await _refuse(connection, ErrorCode.REQUEST, reason)
        else:
            await self._operator(connection, hello)

    def _answer_http(self, socket: ServerConnection, request: Request) -> Response | None:
        path = request.path.split("?")[0]
        if path == WEBSOCKET_PATH:
            return None
        if path == "/healthz":
            return socket.respond(HTTPStatus.OK, "ok\n")
        return socket.respond(HTTPStatus.NOT_FOUND, f"nothing is at {path[:100]}\n")

    def describe_devices(self) -> list[dict[str, object]]:
        """The connected devices, as plain values. Call it in the server's loop."""
        coordinator = self._live.coordinator
        return [
            {
                "device": session.id,
                "name": session.name,
                "state": coordinator.state(session).value,
                "blocks": session.blocks,
                "compute_s": session.compute_s,
            }
            for session in coordinator.sessions.values()
        ]

    def close(self) -> None:
        """Say bye to the devices, stop listening, end the server's thread."""
        super().close()
        loop, stop = self._live.loop, self._stop
        if loop is not None and stop is not None and self._thread.is_alive():
            loop.call_soon_threadsafe(stop.set)
            self._thread.join()


async def _refuse(connection: Connection, code: ErrorCode, reason: str) -> None:
    message: Message = messages.Error(code, reason)
    try:
        await connection.send(encode(message))
        await connection.close()
    except ConnectionLostError:
        return


def serve(
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    credential: str | None = None,
    operator_credential: str | None = None,
    planner: Planner | None = None,
    notify: Callable[[str], None] | None = None,
    operator: OperatorHandler | None = None,
    verify: Verification | str | bool = True,
) -> ServedFleet:
    """Listen for devices in this process, in a thread of its own.

    Args:
        host: the address to listen on; `0.0.0.0` for every network of this machine.
        port: 0 for any free one.
        credential: what devices must know; a random one unless given. It is part of `url`.
        operator_credential: likewise for operators, in `operator_url`.
        planner: who chooses the tiles.
        notify: called with a line when devices come and go, in the server's thread.
        operator: serves operator sessions; refused when None.
        verify: which results to check before they are used (`cleave.verify`), as `cleave serve
            --verify` takes it: True or `auto`, `all`, `sample:P`, False or `off`. A wrong one is
            computed elsewhere, and a device that sends several, or one that is wrong as a whole,
            is quarantined.

    Raises:
        UsageError: when the address cannot be listened on, or `verify` is none of these.

    Example:
        >>> with serve() as fleet:
        ...     fleet.url.startswith("ws://127.0.0.1:")
        True
    """
    return ServedFleet(
        host,
        port,
        credential=secrets.token_urlsafe(24) if credential is None else credential,
        operator_credential=(
            secrets.token_urlsafe(24) if operator_credential is None else operator_credential
        ),
        planner=planner or TilePlanner(),
        notify=notify,
        operator=operator,
        verify=verify,
    )
