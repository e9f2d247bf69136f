"""Data classes for plain HTTP requests and responses on the server's port."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from websockets.datastructures import Headers

_OF_PROXIES = ("Forwarded", "X-Forwarded-For", "X-Real-IP", "Via")

NO_SNIFFING = ("X-Content-Type-Options", "nosniff")


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """An HTTP request that does not open a WebSocket. Missing headers are empty strings.

    Attributes:
        path: path of the URL without the query, percent-encoded as the client sent it.
        host: value of the `Host` header; empty unless the client sent exactly one `Host` header.
        forwarded: whether the request has a header that proxies add.
        trusted: whether the client sent `Sec-Fetch-Dest`. A browser sends this header only to an
            address that it regards as secure, such as loopback or a proxy that terminates TLS.
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
    """An HTTP response. The server adds `Content-Length` when it sends the response."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes

    @classmethod
    def text(cls, status: int, text: str) -> HttpAnswer:
        """Create a plain-text response with an HTTP status code."""
        headers = (("Content-Type", "text/plain; charset=utf-8"), NO_SNIFFING)
        return cls(status, headers, text.encode())

    def having(self, *headers: tuple[str, str]) -> HttpAnswer:
        """Return a copy of this response with additional headers."""
        return replace(self, headers=(*self.headers, *headers))


HttpHandler: TypeAlias = Callable[[HttpRequest], HttpAnswer | None]
"""Returns the response to a GET or HEAD request; None for an unknown path.

The server calls the handler in its event loop.
"""


def read_request(path: str, headers: Headers, address: str, *, secure: bool) -> HttpRequest:
    """Create an `HttpRequest` from a URL path with an optional query, and the parsed headers."""

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
