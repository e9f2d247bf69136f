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
    """A plain HTTP request (not a WebSocket request).

    Attributes:
        path: path without its query, as sent: nothing is decoded.
        secure: whether it arrived over TLS.
        address: remote address.
        host: the `Host` header; empty if the client sent none, or several.
        accept_encoding, authorization: headers of these names; empty if not sent.
        forwarded: whether a proxy header marks the request as forwarded.
        trusted: whether the browser regards the address as secure: loopback, or TLS that a proxy
            terminates. Only then does it send `Sec-Fetch-Dest`.
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
    """An answer; `Content-Length` is added on sending."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes

    @classmethod
    def text(cls, status: int, text: str) -> HttpAnswer:
        """Create a plain-text answer."""
        headers = (("Content-Type", "text/plain; charset=utf-8"), NO_SNIFFING)
        return cls(status, headers, text.encode())

    def having(self, *headers: tuple[str, str]) -> HttpAnswer:
        """Return this answer with added headers."""
        return replace(self, headers=(*self.headers, *headers))


HttpHandler: TypeAlias = Callable[[HttpRequest], HttpAnswer | None]
"""Answers a GET, or returns None for an unknown path. Called in the server's loop."""


def read_request(path: str, headers: Headers, address: str, *, secure: bool) -> HttpRequest:
    """Create a request from what the WebSocket library parsed."""

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
