"""Who may wait at the door: connections that have not said an acceptable hello yet.

They cost the server something and are owed nothing, so they are few, from each address and in all.
Admitted devices are not counted here: a thousand of them may share an address. Pure: sockets and
clocks are the listener's.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from dataclasses import dataclass, replace
from typing import Final

from cleave.protocol import limits

_IPV6_HOME: Final = 64  # the network that one home or machine gets, and may take any address of
_SPARE_DESCRIPTORS: Final = 128  # of the process: logs, checkpoints, datasets


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What a server allows; the defaults are in `cleave.protocol.limits`.

    Attributes:
        handshake_s: from the first packet to an accepted hello, TLS and HTTP included.
        unadmitted_bytes: all that a connection may send until then.
        waiting_per_address, waiting: connections whose hello is not accepted yet.
        devices, operators: most of each at once.
    """

    handshake_s: float = limits.HANDSHAKE_S
    unadmitted_bytes: int = limits.MAX_UNADMITTED_BYTES
    waiting_per_address: int = limits.MAX_WAITING_PER_ADDRESS
    waiting: int = limits.MAX_WAITING
    devices: int = limits.MAX_DEVICES
    operators: int = limits.MAX_OPERATORS

    def within(self, descriptors: int) -> ConnectionLimits:
        """The same, for a process that may have so many files and connections open.

        Without this, strangers could use them up, and a checkpoint could not be written.
        """
        usable = max(4, descriptors - _SPARE_DESCRIPTORS)
        waiting = min(self.waiting, usable // 4)
        operators = min(self.operators, usable // 4)
        devices = min(self.devices, usable - waiting - operators)
        return replace(self, waiting=waiting, operators=operators, devices=devices)


class Door:
    """Counts the connections that wait.

    Args:
        allowed: how many may.
    """

    def __init__(self, allowed: ConnectionLimits) -> None:
        self.allowed = allowed
        self.waiting = 0
        self._waiting: Counter[str] = Counter()

    def knock(self, address: str) -> str:
        """A connection came from an address; why it is turned away, or nothing: it waits now."""
        home = home_of(address)
        if self._waiting[home] >= self.allowed.waiting_per_address:
            return f"{self._waiting[home]} connections from there wait already"
        if self.waiting >= self.allowed.waiting:
            return f"{self.waiting} connections wait already"
        self._waiting[home] += 1
        self.waiting += 1
        return ""

    def done(self, address: str) -> None:
        """A connection that waited is admitted, or has gone."""
        home = home_of(address)
        self.waiting -= 1
        self._waiting[home] -= 1
        if not self._waiting[home]:
            del self._waiting[home]


def home_of(address: str) -> str:
    """What an address is counted as: itself, or its network where one machine has many.

    Args:
        address: an IP address, with a zone or not.
    """
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(ip, ipaddress.IPv4Address):
        return str(ip)
    if ip.ipv4_mapped is not None:
        return str(ip.ipv4_mapped)
    return str(ipaddress.ip_network((ip, _IPV6_HOME), strict=False))
