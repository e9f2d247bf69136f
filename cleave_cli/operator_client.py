"""A client through which commands such as `cleave jobs` send operator requests to a server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any
from urllib.parse import urlsplit

from cleave.errors import CleaveError, UsageError
from cleave.protocol import features, limits, messages
from cleave.protocol.codec import decode, encode
from cleave.protocol.messages import Message, Role
from cleave.transport.connection import ConnectionLostError, WebSocketConnection, open_connection
from cleave.transport.join_url import JoinUrl, parse_join_url, read_url


def parse_operator_url(text: str) -> JoinUrl:
    """Parse an operator URL, or `@FILE` with such a URL.

    Raises:
        UsageError: if the file is unreadable, or the URL is not an operator URL.
    """
    # This imports the store, which other clients do not need.
    from cleave.server.access import read_code

    url = read_url(text)
    parts = urlsplit(url)
    shown = url.partition("#")[0]  # the fragment contains a credential
    try:
        target = parse_join_url(url)
    except UsageError:
        target = None
    if target is None:
        fault = "is not an operator URL"
    elif parts.scheme in ("http", "https") or read_code(target.credential):
        fault = "is a join URL, which is for devices"
    elif not target.credential:
        fault = "lacks the operator's token"
    else:
        return target
    raise UsageError(
        f"{shown!r} {fault}; use --server '@FILE', where FILE is the server's operator.url, whose "
        "path `cleave serve` prints"
    )


def _gone(error: ConnectionLostError) -> CleaveError:
    return CleaveError(f"lost the connection to the server ({error}); is it still running?")


class OperatorClient:
    """A client that sends operator requests to a server. Create it with `connect`."""

    def __init__(self, connection: WebSocketConnection) -> None:
        self._connection = connection
        self._ids = count(1)

    @classmethod
    @asynccontextmanager
    async def connect(cls, url: str) -> AsyncIterator[OperatorClient]:
        """Open a session at an operator URL or @FILE, until the `async with` block ends.

        Jobs on the server continue. Raise CleaveError if the server refuses.
        """
        target = parse_operator_url(url)
        client = cls(await open_connection(target))
        hello = messages.Hello(
            role=Role.OPERATOR,
            credential=target.credential,
            versions=(limits.VERSION,),
            features=features.ALL,
        )
        try:
            await client._send(hello)
            await client._receive()
            yield client
        finally:
            await client._connection.close()

    async def request(self, action: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Send a request, such as `submit`, and return the reply's data.

        Raises:
            CleaveError: if the server refuses the request or the connection is lost.
        """
        for name, value in arguments.items():
            if isinstance(value, int) and not -(2**63) <= value < 2**63:
                raise UsageError(f"{name} must be below {2**63:,}, not {value}")
        number = next(self._ids)
        await self._send(messages.Request(number, action, arguments))
        while True:
            reply = await self._receive()
            if isinstance(reply, messages.Reply) and reply.id == number:
                break
        if not reply.ok:
            kind = UsageError if reply.data.get("exit_code") == 2 else CleaveError
            raise kind(str(reply.data.get("text", "the server refused")))
        return reply.data

    async def records(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the records of the submitted or attached job until the job ends."""
        while True:
            message = await self._receive()
            if isinstance(message, messages.JobRecord):
                yield message.record
                if message.record.get("event") in ("end", "failed", "stopped"):
                    return

    async def _send(self, message: Message) -> None:
        try:
            await self._connection.send(encode(message))
        except ConnectionLostError as error:
            raise _gone(error) from None

    async def _receive(self) -> Message:
        try:
            message = decode(await self._connection.receive())
        except ConnectionLostError as error:
            raise _gone(error) from None
        if isinstance(message, messages.Error):
            raise CleaveError(f"the server refused: {message.message}")
        return message
