"""Plain HTTP on the fleet's port: what is asked and what is answered, without a socket."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from websockets.datastructures import Headers

_OF_PROXIES = ("Forwarded", "X-Forwarded-For", "X-Real-IP", "Via")

NO_SNIFFING = ("X-Content-Type-Options", "nosniff")


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request for something that is no WebSocket.

    Attributes:
        path: without its query, as it was sent: nothing is decoded.
        secure: whether it came over TLS.
        address: where it comes from.
        host: as the client wrote it; empty where it wrote none, or several.
        accept_encoding, authorization: likewise.
        forwarded: whether a proxy says that it asks for somebody else.
        trusted: whether it comes from a browser that counts the address as secure, as it does with
            loopback and with somebody else's TLS before this server: only there it says what for.
    """

    path: str
    secure: bool = False
    address: str = ""
    host: str = ""
    accept_encoding: str = ""
    authorization: str = ""
    forwarded: bool = False
    trusted: bool = False


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """An answer; its length is added when it is sent."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes

    @classmethod
    def text(cls, status: int, text: str) -> HttpAnswer:
        """Some words."""
        headers = (("Content-Type", "text/plain; charset=utf-8"), NO_SNIFFING)
        return cls(status, headers, text.encode())

    def having(self, *headers: tuple[str, str]) -> HttpAnswer:
        """The same, with more headers."""
        return replace(self, headers=(*self.headers, *headers))


HttpHandler: TypeAlias = Callable[[HttpRequest], HttpAnswer | None]
"""Answers a GET; None where nothing has that path. Called in the server's loop."""


def read_request(path: str, headers: Headers, address: str, *, secure: bool) -> HttpRequest:
    """A request out of what the WebSocket library read."""

    def only(name: str) -> str:
        values = headers.get_all(name)
        return values[0] if len(values) == 1 else ""

    return HttpRequest(
        path.partition("?")[0],
        secure,
        address,
        only("Host"),
        ",".join(headers.get_all("Accept-Encoding")),
        only("Authorization"),
        any(name in headers for name in _OF_PROXIES),
        "Sec-Fetch-Dest" in headers,
    )
