"""Join URLs, which contain a server's address, a credential and a certificate fingerprint."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from socket import gaierror
from typing import Final
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from cleave.errors import UsageError
from cleave.files import private_file
from cleave.transport.addresses import bracketed
from cleave.transport.tls import parse_fingerprint

SERVER_ID_LENGTH: Final = 10
JOIN_PATH: Final = "/join"  # path of the page that a browser opens to join as a device


@dataclass(frozen=True, slots=True)
class JoinUrl:
    """A parsed join URL.

    All fields except `address` are in the URL's fragment, which browsers do not send to servers.

    Attributes:
        address: WebSocket URL of the server, without a fragment.
        server: ID of the server; empty if the URL does not contain an ID.
        fingerprint: fingerprint of the only certificate to accept; empty to verify the certificate
            against the system's trusted CAs.
    """

    address: str
    credential: str
    server: str = ""
    fingerprint: str = ""

    @property
    def text(self) -> str:
        """Return the complete URL, including the credential."""
        server = f"&s={quote(self.server, safe='')}" if self.server else ""
        pin = f"&fp={self.fingerprint}" if self.fingerprint else ""
        return f"{self.address}#c={quote(self.credential, safe='')}{server}{pin}"

    def page(self, path: str) -> str:
        """Return the URL of the server's web page at `path`, with the same fragment."""
        parts = urlsplit(self.text)
        scheme = "https" if parts.scheme == "wss" else "http"
        return parts._replace(scheme=scheme, path=path).geturl()

    def at(self, host: str) -> JoinUrl:
        """Return this URL with `host`, another name or IP address of the same server."""
        parts = urlsplit(self.address)
        port = f":{parts.port}" if parts.port is not None else ""
        address = parts._replace(netloc=f"{bracketed(host)}{port}").geturl()
        return replace(self, address=address)


def parse_join_url(url: str) -> JoinUrl:
    """Parse `http://HOST:PORT/join#c=CREDENTIAL` or `ws://HOST:PORT/ws#c=CREDENTIAL`.

    With TLS, the schemes are `https://` and `wss://`, and the fragment may contain the
    certificate's fingerprint (`&fp=FINGERPRINT`).

    Raises:
        UsageError: if `url` is not a join URL.
    """
    try:
        parts = urlsplit(url)
        wrong = not parts.hostname or parts.port == 0
    except ValueError:  # invalid port, or incomplete IPv6 address
        wrong = True
    page = not wrong and parts.scheme in ("http", "https") and parts.path.endswith(JOIN_PATH)
    if wrong or not (page or parts.scheme in ("ws", "wss")):
        shown = url.partition("#")[0]  # the fragment contains the credential
        raise UsageError(
            f"{shown!r} is not a join URL; use the URL that `cleave serve` prints, such as "
            f"http://192.168.1.20:8765{JOIN_PATH}#c=..."
        )
    secure = parts.scheme in ("https", "wss")
    fields = dict(part.partition("=")[::2] for part in parts.fragment.split("&"))
    credential = unquote(fields.get("c", ""))
    fingerprint = parse_fingerprint(unquote(fields["fp"])) if fields.get("fp") else ""
    if fingerprint and not secure:
        raise UsageError(
            f"the join URL contains a certificate fingerprint, but {parts.scheme}:// does not use "
            f"certificates; use the URL that `cleave serve` prints, with https:// or wss://"
        )
    server = unquote(fields.get("s", ""))
    if "s" in fields and len(server) != SERVER_ID_LENGTH:
        raise UsageError(
            f"the join URL is incomplete: its s= must have {SERVER_ID_LENGTH} characters, which "
            f"identify the server, not {len(server)}; copy the whole URL"
        )
    path = parts.path.removesuffix(JOIN_PATH) + "/ws" if page else parts.path
    path = "/ws" if path in ("", "/") else path
    return JoinUrl(
        urlunsplit(("wss" if secure else "ws", parts.netloc, path, "", "")),
        credential,
        server=server,
        fingerprint=fingerprint,
    )


_COMMAND: Final = re.compile(r"cleave join '([^']+)'")


def plain_reason(error: BaseException) -> str:
    """Return the operating system's message for an error, without Python's additions."""
    if isinstance(error, gaierror) and error.strerror:
        return error.strerror.lower()
    number = getattr(error, "errno", None)
    return os.strerror(number).lower() if number else str(error) or "no answer"


@contextmanager
def url_file(url: str) -> Iterator[str]:
    """Yield `@FILE` for a private file that contains `url`, for use on command lines."""
    with private_file(url.encode(), "cleave-join-") as path:
        yield f"@{path}"


def read_url(text: str) -> str:
    """Return the join URL given by a command-line argument, which is a URL or `@FILE`.

    The file may also contain the whole `cleave join` command that `cleave pair` prints.

    Raises:
        UsageError: if the file is unreadable or contains no URL. The error message omits the
            file's content, which may be some other secret.
    """
    if not text.startswith("@"):
        return text
    path = Path(text[1:]).expanduser()
    try:
        text = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"the URL cannot be read from {path} ({plain_reason(error)}); write it there, or pass "
            "the URL itself"
        ) from None
    command = _COMMAND.search(text)
    found = command[1] if command else text
    if "://" not in found:
        raise UsageError(
            f"{path} contains no URL; use a file with the output of `cleave pair` or `cleave serve`"
        )
    return found
