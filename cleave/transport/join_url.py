"""Join URLs: a server's address, a credential, and which server is meant."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from cleave.errors import UsageError
from cleave.transport.addresses import bracketed
from cleave.transport.tls import parse_fingerprint

JOIN_PATH: Final = "/join"
"""The path of the page that makes a browser a device."""


@dataclass(frozen=True, slots=True)
class JoinUrl:
    """Holds a join URL in parts: the address, and the fragment's fields, which are never sent.

    Attributes:
        address: the URL without its fragment.
        credential: a credential, or a join code.
        server: the server's id; empty where the URL does not tell.
        fingerprint: of the only certificate that is accepted; empty to verify it as usual.
    """

    address: str
    credential: str
    server: str = ""
    fingerprint: str = ""

    @property
    def text(self) -> str:
        """Return the URL, with its secret."""
        server = f"&s={quote(self.server, safe='')}" if self.server else ""
        pin = f"&fp={self.fingerprint}" if self.fingerprint else ""
        return f"{self.address}#c={quote(self.credential, safe='')}{server}{pin}"

    def page(self, path: str) -> str:
        """Return the URL of a page of the server for browsers, with the same secret."""
        parts = urlsplit(self.text)
        scheme = "https" if parts.scheme == "wss" else "http"
        return parts._replace(scheme=scheme, path=path).geturl()

    def at(self, host: str) -> JoinUrl:
        """Return the URL of the same server with another of its host names or addresses."""
        parts = urlsplit(self.address)
        port = f":{parts.port}" if parts.port is not None else ""
        address = parts._replace(netloc=f"{bracketed(host)}{port}").geturl()
        return replace(self, address=address)


def parse_join_url(url: str) -> JoinUrl:
    """Read `http://HOST:PORT/join#c=CREDENTIAL` or `ws://HOST:PORT/ws#c=CREDENTIAL`.

    With TLS these are `https://` and `wss://`, and may name a certificate (`&fp=FINGERPRINT`).

    Raises:
        UsageError: when it is not a join URL.
    """
    try:
        parts = urlsplit(url)
        wrong = not parts.hostname or parts.port == 0
    except ValueError:  # a port that is no number, half an IPv6 address
        wrong = True
    page = not wrong and parts.scheme in ("http", "https") and parts.path.endswith(JOIN_PATH)
    if wrong or not (page or parts.scheme in ("ws", "wss")):
        shown = url.partition("#")[0]  # the rest is secret
        raise UsageError(
            f"{shown!r} is no join URL; use the one that `cleave serve` prints, like "
            f"http://192.168.1.20:8765{JOIN_PATH}#c=..."
        )
    secure = parts.scheme in ("https", "wss")
    fields = dict(part.partition("=")[::2] for part in parts.fragment.split("&"))
    credential = unquote(fields.get("c", ""))
    fingerprint = parse_fingerprint(unquote(fields["fp"])) if fields.get("fp") else ""
    if fingerprint and not secure:
        raise UsageError(
            f"the join URL names a certificate, and {parts.scheme}:// shows none; use the URL that "
            f"`cleave serve` prints, with https:// or wss://"
        )
    path = parts.path.removesuffix(JOIN_PATH) + "/ws" if page else parts.path
    path = "/ws" if path in ("", "/") else path
    return JoinUrl(
        urlunsplit(("wss" if secure else "ws", parts.netloc, path, "", "")),
        credential,
        server=unquote(fields.get("s", "")),
        fingerprint=fingerprint,
    )
