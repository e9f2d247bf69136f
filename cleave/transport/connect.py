"""Open connections to a server. Devices and operators use this module."""

from __future__ import annotations

import os
import ssl
from socket import gaierror
from typing import Any

from websockets.asyncio.client import connect
from websockets.exceptions import InvalidHandshake, InvalidURI

from cleave.errors import CleaveError
from cleave.protocol import limits
from cleave.transport.connection import (
    WRITE_LIMIT_BYTES,
    WebSocketConnection,
)
from cleave.transport.join_url import JoinUrl
from cleave.transport.tls import WrongCertificateError, pinning


def plain_reason(error: BaseException) -> str:
    """Return the operating system's text for an error, without Python's additions."""
    if isinstance(error, gaierror) and error.strerror:
        return error.strerror.lower()
    number = getattr(error, "errno", None)
    return os.strerror(number).lower() if number else str(error) or "no answer"


async def open_connection(target: JoinUrl, memory_bytes: int | None = None) -> WebSocketConnection:
    """Connect to a server.

    If `target` has a fingerprint, no data is sent to a server with a different certificate.

    Args:
        target: join URL of the server.
        memory_bytes: memory in bytes that a device offers in its `hello`. It also limits the size
            of received messages. None for an operator.

    Raises:
        CleaveError: when no WebSocket server responds, or the server's certificate is not accepted.
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
            **secured,
        )
    except WrongCertificateError as error:
        raise CleaveError(
            f"{address} shows another certificate ({error.shown}) than the join URL names "
            f"({target.fingerprint}); if the server made a new one, use the URL that it prints "
            f"now, else something stands between you and it"
        ) from None
    except ssl.SSLCertVerificationError as error:
        raise CleaveError(
            f"the certificate of {address} is not trusted ({error.verify_message}); use the "
            f"whole join URL that the server prints, with its &fp=..."
        ) from None
    except ssl.SSLError as error:
        raise CleaveError(
            f"{address} does not answer in TLS ({error.reason or error}); is it wss://, or ws://?"
        ) from None
    except (OSError, TimeoutError) as error:
        or_plain = ", or is it ws://?" if address.startswith("wss:") else ""
        raise CleaveError(
            f"no server answers at {address} ({plain_reason(error)}); "
            f"start one with `cleave serve`, or check address and port{or_plain}"
        ) from None
    except (InvalidHandshake, InvalidURI) as error:
        hint = "" if address.startswith("wss:") else " (a server with TLS has a wss:// URL)"
        raise CleaveError(
            f"{address} does not let this client in, or is no Cleave server: {error}{hint}"
        ) from None
    return WebSocketConnection(socket, spare_receiver=True)
