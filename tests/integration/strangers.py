"""Clients that say to a real server what they like, and whether its fleet works all the same."""

from __future__ import annotations

import socket
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from websockets.sync.client import ClientConnection, connect

from cleave.device.session import device_hello
from cleave.fleet.fleet import Fleet
from cleave.protocol import messages
from cleave.protocol.codec import decode, encode
from cleave.protocol.messages import Role
from cleave.server.fleet_server import Server
from cleave.transport.join_url import parse_join_url
from tests.fleet.products import submit
from tests.integration.processes import PATIENCE_S


def multiplies(fleet: Fleet) -> None:
    a, b = np.eye(40, 30), np.ones((30, 20))
    np.testing.assert_array_equal(submit(fleet, a, b).result().array, a @ b)


def hello(credential: str, role: Role = Role.DEVICE, **changes: Any) -> bytes:
    message = device_hello(credential=credential, name="test", memory_bytes=10**8)
    message.role = role
    for name, value in changes.items():
        setattr(message, name, value)
    return b"".join(encode(message))


def raw(server: Server) -> socket.socket:
    """A TCP connection to a server."""
    parts = urlsplit(server.url)
    assert parts.port is not None
    return socket.create_connection((parts.hostname, parts.port), PATIENCE_S)


def is_cut(connection: socket.socket) -> bool:
    """Whether the server ends a connection; waits for it."""
    try:
        while connection.recv(65536):
            pass
    except ConnectionError:
        return True
    return True


def opened(server: Server, **options: Any) -> ClientConnection:
    address = parse_join_url(server.url).address
    connection: ClientConnection = connect(address, compression=None, max_size=None, **options)
    return connection


def heard(connection: ClientConnection) -> messages.Message:
    data = connection.recv(PATIENCE_S)
    assert isinstance(data, bytes)
    return decode(data)


def upgrade() -> bytes:
    return (
        b"GET /ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
