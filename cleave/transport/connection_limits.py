"""Who may wait at the door: connections that have not said an acceptable hello yet.

They cost the server something and are owed nothing, so they are few, from each address and in all.
Where all places are taken, somebody from elsewhere gets the place of those who have most: slow
strangers, from however many addresses, keep nobody out who is quick. Admitted devices are not
counted here: a thousand of them may share an address. Pure: sockets and clocks are the listener's.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from dataclasses import dataclass, replace
from itertools import count
from typing import Final

from cleave.protocol import limits

_IPV6_HOME: Final = 64  # the network that one home or machine gets, and may take any address of
_IPV6_NETWORK: Final = 48  # what one customer or site may get, with many homes in it
_SPARE_DESCRIPTORS: Final = 128  # of the process: logs, checkpoints, datasets


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What a server allows; the defaults are in `cleave.protocol.limits`.

    Attributes:
        handshake_s: from the first packet to an accepted hello, TLS and HTTP included.
        unadmitted_bytes: all that a connection may send until then.
        waiting_per_address, waiting: connections whose hello is not accepted yet.
        devices, operators: most of each at once.
        unfinished_bytes: of messages that are not complete and no results of work, over all.
    """

    handshake_s: float = limits.HANDSHAKE_S
    unadmitted_bytes: int = limits.MAX_UNADMITTED_BYTES
    waiting_per_address: int = limits.MAX_WAITING_PER_ADDRESS
    waiting: int = limits.MAX_WAITING
    devices: int = limits.MAX_DEVICES
    operators: int = limits.MAX_OPERATORS
    unfinished_bytes: int = limits.MAX_UNFINISHED_BYTES

    def within(self, descriptors: int) -> ConnectionLimits:
        """The same, for a process that may have so many files and connections open.

        Without this, strangers could use them up, and a checkpoint could not be written.
        """
        usable = max(4, descriptors - _SPARE_DESCRIPTORS)
        waiting = min(self.waiting, usable // 4)
        operators = min(self.operators, usable // 4)
        devices = min(self.devices, usable - waiting - operators)
        return replace(self, waiting=waiting, operators=operators, devices=devices)


@dataclass(frozen=True, slots=True)
class WaitingPlace:
    """A connection may wait.

    Attributes:
        ticket: names its place.
        instead_of: the ticket of a connection that has to go for it; None for none.
    """

    ticket: int
    instead_of: int | None = None


class PendingConnections:
    """Gives places to connections that wait.

    Args:
        allowed: how many there are.
    """

    def __init__(self, allowed: ConnectionLimits) -> None:
        self.allowed = allowed
        self._tickets = count()
        self._places: dict[int, tuple[str, str]] = {}  # home and network of each
        self._homes: Counter[str] = Counter()
        self._networks: dict[str, dict[int, None]] = {}  # their tickets, oldest first

    @property
    def waiting(self) -> int:
        """How many connections wait."""
        return len(self._places)

    def arrive(self, address: str) -> WaitingPlace | str:
        """A connection came from an address: its place, or why it is turned away."""
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
        """Who waits longest in the network with most places, if it has more than this one."""
        most = max(self._networks.values(), key=lambda places: (len(places), -next(iter(places))))
        if len(most) <= len(self._networks.get(network, ())):
            return None
        return next(iter(most))

    def done(self, ticket: int) -> None:
        """A connection that waited is admitted, or has gone."""
        home, network = self._places.pop(ticket)
        self._homes[home] -= 1
        if not self._homes[home]:
            del self._homes[home]
        del self._networks[network][ticket]
        if not self._networks[network]:
            del self._networks[network]


def home_of(address: str) -> str:
    """What an address is counted as: itself, or its network where one machine has many.

    Args:
        address: an IP address, with a zone or not.
    """
    return _within(address, _IPV6_HOME)


def network_of(address: str) -> str:
    """Whom a place is given to when all are taken: many homes may be one stranger's."""
    return _within(address, _IPV6_NETWORK)


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
