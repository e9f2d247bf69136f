"""Plain HTTP on the fleet's port: requests and answers, without a socket."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from websockets.datastructures import Headers

_OF_PROXIES = ("Forwarded", "X-Forwarded-For", "X-Real-IP", "Via")

NO_SNIFFING = ("X-Content-Type-Options", "nosniff")


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A plain HTTP request, not one for a WebSocket.

    Attributes:
        path: the path without its query, as it was sent: nothing is decoded.
        secure: whether it came over TLS.
        address: the address that it comes from.
        host: the `Host` header; empty if the client sent none, or several.
        accept_encoding, authorization: the headers of these names; empty if the client sent none.
        forwarded: whether a proxy's header says that it was forwarded.
        trusted: whether a browser sent it that regards the address as secure, as with loopback or
            with TLS of a proxy before this server. Only then it sends `Sec-Fetch-Dest`.
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
    """An answer; `Content-Length` is added when it is sent."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes

    @classmethod
    def text(cls, status: int, text: str) -> HttpAnswer:
        """Make an answer of plain text."""
        headers = (("Content-Type", "text/plain; charset=utf-8"), NO_SNIFFING)
        return cls(status, headers, text.encode())

    def having(self, *headers: tuple[str, str]) -> HttpAnswer:
        """Return this answer with more headers."""
        return replace(self, headers=(*self.headers, *headers))


HttpHandler: TypeAlias = Callable[[HttpRequest], HttpAnswer | None]
"""Answers a GET; None where nothing has that path. Called in the server's loop."""


def read_request(path: str, headers: Headers, address: str, *, secure: bool) -> HttpRequest:
    """Make a request from what the WebSocket library read."""

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
