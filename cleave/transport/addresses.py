"""Determine the host names, IP addresses and web origins of a server."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from typing import Final
from urllib.parse import SplitResult, quote, urlsplit

from cleave.errors import UsageError

LOOPBACK_NAMES: Final = ("localhost", "127.0.0.1", "::1")
_DEFAULT_PORTS: Final = {"http": 80, "https": 443, "ws": 80, "wss": 443}
_WEBSOCKET_SCHEMES: Final = {"ws": "ws", "wss": "wss", "http": "ws", "https": "wss"}
# Addresses reserved for documentation. No packet is sent: the system only picks a source address.
_ELSEWHERE: Final = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach a server that listens on `host`."""
    if not host:
        return False
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return False  # listening on this host will fail and report the reason
    return all(map(is_loopback_address, found))


def is_loopback_address(address: str) -> bool:
    """Return True if `address` is a valid loopback IP address."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def is_everywhere(host: str) -> bool:
    """Return True if a server that listens on `host` listens on all addresses of this machine."""
    return host in ("", "0.0.0.0", "::")


def outside_address(family: socket.AddressFamily = socket.AF_INET) -> str:
    """Return this machine's IP address on the network; an empty string if it has no network."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_ELSEWHERE[family], 9))
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def reachable_host(host: str) -> str:
    """Return the host name or address to put into the URLs of a server that listens on `host`."""
    if not is_everywhere(host):
        return host
    if host == "::":
        return outside_address(socket.AF_INET6) or "::1"
    return outside_address() or "127.0.0.1"


def own_names(host: str, interfaces: Iterable[str]) -> tuple[str, ...]:
    """Return the host names and IP addresses of a server that listens on `host`.

    `interfaces` are the IP addresses of this machine.
    """
    if is_everywhere(host):
        names = [*LOOPBACK_NAMES, socket.gethostname(), reachable_host(host), *interfaces]
    elif is_loopback(host):
        names = [*LOOPBACK_NAMES, host]
    else:
        names = [host]
    return tuple(dict.fromkeys(name.lower() for name in names if name))


def interface_addresses() -> tuple[str, ...]:
    """Return this machine's IP addresses, except link-local addresses. Requires `ifaddr`."""
    import ifaddr

    found = []
    for adapter in ifaddr.get_adapters():
        for entry in adapter.ips:
            address = entry.ip if isinstance(entry.ip, str) else entry.ip[0]
            if not ipaddress.ip_address(address).is_link_local:
                found.append(address)
    return tuple(dict.fromkeys(found))


def outside_addresses(host: str) -> tuple[str, ...]:
    """Return the IP addresses at which other machines reach a server that listens on `host`.

    The address on the default route comes first. Requires `ifaddr` if `host` stands for all
    addresses.
    """
    if is_everywhere(host):
        found = [reachable_host(host), *interface_addresses()]
    else:
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(host, None)]
    return tuple(dict.fromkeys(each for each in found if not is_loopback_address(each)))


def bracketed(host: str) -> str:
    """Return a host in URL syntax, with brackets around an IPv6 address."""
    return f"[{host}]" if ":" in host else host


def origins(names: Iterable[str], port: int, *, secure: bool) -> frozenset[str]:
    """Return the origins of a server's own pages, in the format of the `Origin` header."""
    scheme = "https" if secure else "http"
    found = set()
    for name in names:
        found.add(f"{scheme}://{bracketed(name)}:{port}")
        if port == _DEFAULT_PORTS[scheme]:
            found.add(f"{scheme}://{bracketed(name)}")
    return frozenset(found)


def parse_origin(text: str) -> str:
    """Normalize a web origin to the format of the `Origin` header; raise UsageError if invalid."""
    parts = _bare_url(text)
    if parts is None or "*" in text:
        raise UsageError(
            f"{text!r} is not an origin; use the page's scheme, host and port, such as "
            "https://example.org or http://192.168.1.20:8000"
        )
    return f"{parts.scheme}://{_without_default_port(parts)}"


def parse_public_url(text: str) -> str:
    """Return a server's public address as `wss://HOST[:PORT]` or `ws://HOST[:PORT]`.

    `https://` and `http://` are read as `wss://` and `ws://`.

    Raises:
        UsageError: if `text` is not such an address, or has a path, a user name or a fragment.
    """
    parts = _bare_url(text)
    if parts is None or parts.scheme not in _WEBSOCKET_SCHEMES:
        raise UsageError(
            f"--public-url is {text!r}; use a scheme, host and port, such as wss://example.org:8765"
        )
    return f"{_WEBSOCKET_SCHEMES[parts.scheme]}://{_without_default_port(parts)}"


def _bare_url(text: str) -> SplitResult | None:
    """Return a URL's parts in lower case; None unless it has only scheme, host and any port."""
    try:
        parts = urlsplit(text.strip().lower())
        wrong = not parts.scheme or not parts.hostname or "@" in parts.netloc or parts.port == 0
    except ValueError:  # invalid port, or incomplete IPv6 address
        return None
    wrong = wrong or parts.path not in ("", "/") or bool(parts.query or parts.fragment)
    return None if wrong else parts


def _without_default_port(parts: SplitResult) -> str:
    return parts.netloc.removesuffix(f":{_DEFAULT_PORTS.get(parts.scheme, '')}")


def app_link(page_url: str) -> str:
    """Return a link that makes the Android app join the server whose page is at `page_url`."""
    return f"cleave://join?url={quote(page_url, safe='')}"
