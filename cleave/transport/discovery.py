"""Announce a server on the local network by multicast DNS, and find announced servers.

Anybody on the network can announce anything, so an announcement proves nothing. It contains no
secret: no join code, no credential and no ID that would make a device send its credential.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from cleave.errors import CleaveError, UsageError, not_installed
from cleave.transport.addresses import bracketed
from cleave.transport.join_url import JoinUrl
from cleave.transport.tls import parse_fingerprint

if TYPE_CHECKING:
    from zeroconf import Zeroconf

SERVICE: Final = "_cleave._tcp.local."
LOOK_S: Final = 3.0  # time for servers to answer

_VERSION: Final = "1"  # version of the announcement's properties
_LABEL_BYTES: Final = (
    50  # maximum length of a service name, without the number that makes it unique
)
_TITLE_BYTES: Final = 200  # maximum length of a title; a property has at most 255 bytes
_CONNECT_S: Final = 1.0  # time for one of a server's addresses to accept a connection


@dataclass(frozen=True, slots=True)
class Announcement:
    """A server's announcement on its network.

    Any machine can announce anything, so a device must not trust an announcement.

    Attributes:
        name: name of the server's machine.
        title: person or project that requests devices; may be empty.
        addresses: the server's IP addresses.
        fingerprint: fingerprint of the server's certificate; empty without TLS or with an
            authority's certificate.
        secure: whether the server uses TLS.
    """

    name: str
    title: str
    addresses: tuple[str, ...]
    port: int
    fingerprint: str
    secure: bool

    def url(self, address: str, code: str = "") -> JoinUrl:
        """Return the join URL at one of the addresses, with a join code."""
        scheme = "wss" if self.secure else "ws"
        place = f"{scheme}://{bracketed(address)}:{self.port}/ws"
        return JoinUrl(place, code, fingerprint=self.fingerprint)


@contextmanager
def announced(what: Announcement, interfaces: Sequence[str] = ()) -> Iterator[None]:
    """Announce a server until the `with` block ends.

    Args:
        interfaces: IP addresses of the interfaces on which to announce; empty for all.

    Raises:
        UsageError: if the package `zeroconf` is not installed.
        CleaveError: if the network does not permit multicast DNS.
    """
    properties = {"v": _VERSION, "tls": str(int(what.secure)), "fp": what.fingerprint}
    properties["title"] = _cut(what.title, _TITLE_BYTES)
    with _zeroconf("--announce", interfaces) as network:
        from zeroconf import NonUniqueNameException, ServiceInfo

        info = ServiceInfo(
            SERVICE,
            f"{_cut(what.name, _LABEL_BYTES)}.{SERVICE}",
            port=what.port,
            properties=properties,
            parsed_addresses=list(what.addresses),
        )
        try:
            network.register_service(info, allow_name_change=True)
        except (OSError, NonUniqueNameException) as error:
            raise CleaveError(
                f"this server cannot be announced ({error or 'its name is taken'}); omit "
                "--announce and give devices the join URL"
            ) from None
        yield


def find_servers(wait_s: float = LOOK_S, interfaces: Sequence[str] = ()) -> list[Announcement]:
    """Return the servers that answer on the local network, sorted by name.

    Args:
        wait_s: time to wait for answers, in seconds.
        interfaces: IP addresses of the interfaces on which to ask; empty for all.

    Raises:
        UsageError: if the package `zeroconf` is not installed.
        CleaveError: if the network does not permit multicast DNS.
    """
    found = []
    with _zeroconf("finding servers", interfaces) as network:
        from zeroconf import ServiceBrowser, ServiceStateChange

        names: set[str] = set()

        def changed(
            zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange
        ) -> None:
            if state_change is ServiceStateChange.Removed:
                names.discard(name)
            else:
                names.add(name)

        browser = ServiceBrowser(network, SERVICE, handlers=[changed])
        threading.Event().wait(wait_s)
        browser.cancel()  # ends the thread that calls `changed`
        for name in sorted(names):
            info = network.get_service_info(SERVICE, name, timeout=1000)
            addresses = tuple(info.parsed_addresses()) if info is not None else ()
            if info is None or info.port is None or not addresses:
                continue
            read = _read(name, info.port, addresses, info.decoded_properties)
            if read is not None:
                found.append(read)
    return found


def answering(what: Announcement) -> str:
    """Return the first of a server's addresses that accepts a connection; empty if none does.

    A machine has addresses that others cannot reach, for example those of virtual networks.
    """
    for address in what.addresses:
        with suppress(OSError), socket.create_connection((address, what.port), _CONNECT_S):
            return address
    return ""


def _read(
    name: str, port: int, addresses: tuple[str, ...], properties: dict[str, str | None]
) -> Announcement | None:
    """Return the announcement in a service's properties; None if their version differs."""
    if properties.get("v") != _VERSION:
        return None
    fingerprint, secure = properties.get("fp") or "", properties.get("tls") == "1"
    if fingerprint:
        try:
            fingerprint = parse_fingerprint(fingerprint)
        except UsageError:
            return None
    if fingerprint and not secure:
        return None
    label = name.removesuffix(f".{SERVICE}")
    title = properties.get("title") or ""
    return Announcement(label, title, addresses, port, fingerprint, secure)


def _cut(text: str, size: int) -> str:
    """Return the start of a text, at most `size` bytes in UTF-8."""
    return text.encode()[:size].decode(errors="ignore")


@contextmanager
def _zeroconf(what: str, interfaces: Sequence[str]) -> Iterator[Zeroconf]:
    """Open multicast DNS on the interfaces. If the package is missing, the error names `what`."""
    try:
        from zeroconf import InterfaceChoice, Zeroconf
    except ImportError:
        raise not_installed(what, "zeroconf", "lan") from None
    try:
        network = Zeroconf(list(interfaces) or InterfaceChoice.All)
    except OSError as error:
        raise CleaveError(
            f"multicast DNS does not work on this machine ({error.strerror}); use the join URL "
            f"that `cleave pair` prints"
        ) from None
    try:
        yield network
    finally:
        network.close()
