"""Limits on pending connections: those whose hello is not accepted yet.

Places are limited per address and in total, because strangers may take them. When all are taken, a
connection from another network replaces the oldest one of the network with most places. So slow
strangers, from any number of addresses, cannot keep out a quick client. Admitted devices do not
count, since many may share an address. Pure: the listener has the sockets and clocks.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count
from typing import Final

from cleave.protocol import limits

_IPV6_HOME: Final = 64  # network of one home or machine, which may use any of its addresses
_IPV6_NETWORK: Final = 48  # network of one customer or site, with many homes
_SPARE_DESCRIPTORS: Final = 128  # for other files: logs, checkpoints, datasets


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits on a server's connections; defaults are in `cleave.protocol.limits`.

    Attributes:
        handshake_s: seconds from the first packet to an accepted hello, including TLS and HTTP.
        unadmitted_bytes: maximum bytes that a connection may send before its hello is accepted.
        waiting_per_address, waiting: maximum pending connections, per address and in total.
        failed, failed_per_s: maximum failed connections per address, at once and per second.
        devices, operators: maximum connected devices and operators.
        unfinished_bytes: maximum total size of incomplete messages, without task results.
    """

    handshake_s: float = limits.HANDSHAKE_S
    unadmitted_bytes: int = limits.MAX_UNADMITTED_BYTES
    waiting_per_address: int = limits.MAX_WAITING_PER_ADDRESS
    waiting: int = limits.MAX_WAITING
    failed: int = limits.MAX_FAILED
    failed_per_s: float = limits.FAILED_PER_S
    devices: int = limits.MAX_DEVICES
    operators: int = limits.MAX_OPERATORS
    unfinished_bytes: int = limits.MAX_UNFINISHED_BYTES

    def within(self, descriptors: int) -> ConnectionLimits:
        """Return these limits, lowered for a process with this many file descriptors.

        Otherwise strangers could exhaust the descriptors, so that no checkpoint could be written.
        """
        usable = max(4, descriptors - _SPARE_DESCRIPTORS)
        waiting = min(self.waiting, usable // 4)
        operators = min(self.operators, usable // 4)
        devices = min(self.devices, usable - waiting - operators)
        return replace(self, waiting=waiting, operators=operators, devices=devices)


@dataclass(frozen=True, slots=True)
class WaitingPlace:
    """The place of a pending connection.

    Attributes:
        ticket: identifies the place.
        instead_of: ticket of the connection to close for it; None for none.
    """

    ticket: int
    instead_of: int | None = None


class PendingConnections:
    """The places of pending connections.

    Args:
        allowed: limits on the places.
    """

    def __init__(self, allowed: ConnectionLimits) -> None:
        self.allowed = allowed
        self._tickets = count()
        self._places: dict[int, tuple[str, str]] = {}  # home and network of each
        self._homes: Counter[str] = Counter()
        self._networks: dict[str, dict[int, None]] = {}  # their tickets, oldest first

    @property
    def waiting(self) -> int:
        """Return the number of pending connections."""
        return len(self._places)

    def arrive(self, address: str) -> WaitingPlace | str:
        """Return the place of a new connection from this address, or the reason to refuse it."""
        home, network = home_of(address), network_of(address)
        if self._homes[home] >= self.allowed.waiting_per_address:
            return f"{self._homes[home]} connections from there wait already"
        instead_of = None
        if self.waiting >= self.allowed.waiting:
            instead_of = self._oldest_of_most(network)
            if instead_of is None:
                return f"{self.waiting} connections wait already"
            self.done(instead_of)
        ticket = next(self._tickets)
        self._places[ticket] = home, network
        self._homes[home] += 1
        self._networks.setdefault(network, {})[ticket] = None
        return WaitingPlace(ticket, instead_of)

    def _oldest_of_most(self, network: str) -> int | None:
        """Return the oldest ticket of the largest network; None if this one is as large."""
        most = max(self._networks.values(), key=lambda places: (len(places), -next(iter(places))))
        if len(most) <= len(self._networks.get(network, ())):
            return None
        return next(iter(most))

    def done(self, ticket: int) -> None:
        """Free the place of a connection that was admitted or closed."""
        home, network = self._places.pop(ticket)
        self._homes[home] -= 1
        if not self._homes[home]:
            del self._homes[home]
        del self._networks[network][ticket]
        if not self._networks[network]:
            del self._networks[network]


def home_of(address: str) -> str:
    """Return the key by which an address is counted: itself, or its /64 network for IPv6.

    Args:
        address: IP address, with or without a zone.
    """
    return _within(address, _IPV6_HOME)


def network_of(address: str) -> str:
    """Return the network by which places are shared: for IPv6 the /48 network.

    A single stranger may own many /64 networks in it.
    """
    return _within(address, _IPV6_NETWORK)


@lru_cache(maxsize=1024)  # called several times per connection
def _within(address: str, prefix: int) -> str:
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(ip, ipaddress.IPv4Address):
        return str(ip)
    if ip.ipv4_mapped is not None:
        return str(ip.ipv4_mapped)
    return str(ipaddress.ip_network((int(ip), prefix), strict=False))
