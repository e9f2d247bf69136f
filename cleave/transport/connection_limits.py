"""Limit pending connections and failed attempts per address, and log refusals.

A connection is pending until the server accepts its hello. Unknown clients can open connections, so
pending connections are limited per address and in total. At the total limit, a new connection
replaces the oldest connection of the network with the most pending connections, unless the new
connection's own network has the same number. As a result, slow clients cannot block a fast client.
"""

from __future__ import annotations

import ipaddress
import logging
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from itertools import count
from typing import Any, Final

from cleave.protocol import limits

_IPV6_HOME: Final = 64  # prefix length of one home or machine, which may use any of the addresses
_IPV6_NETWORK: Final = 48  # prefix length of one customer or site, which may have many /64 networks
_SPARE_DESCRIPTORS: Final = 128  # descriptors reserved for logs, checkpoints and datasets


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits on a server's connections. `cleave.protocol.limits` defines the default values.

    Attributes:
        handshake_s: maximum time in seconds from accepting a connection to accepting its hello,
            including the TLS and HTTP handshakes.
        unadmitted_bytes: number of bytes that a client may send before its hello is accepted.
        waiting_per_address, waiting: maximum number of pending connections, per address and in
            total.
        failed, failed_per_s: burst and sustained rate of failed connections allowed per address.
        unfinished_bytes: maximum total size in bytes of incomplete messages, except task results.
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
        """Return these limits, reduced to fit `descriptors` file descriptors with some to spare."""
        usable = max(4, descriptors - _SPARE_DESCRIPTORS)
        waiting = min(self.waiting, usable // 4)
        operators = min(self.operators, usable // 4)
        devices = min(self.devices, usable - waiting - operators)
        return replace(self, waiting=waiting, operators=operators, devices=devices)


@dataclass(frozen=True, slots=True)
class WaitingPlace:
    """The place of a new pending connection.

    Attributes:
        instead_of: ticket of the connection to close in exchange; None if a place was free.
    """

    ticket: int
    instead_of: int | None = None


class PendingConnections:
    """Counts pending connections and decides whether to accept another one."""

    def __init__(self, allowed: ConnectionLimits) -> None:
        self.allowed = allowed
        self._tickets = count()
        self._places: dict[int, tuple[str, str]] = {}  # ticket -> (home, network)
        self._homes: Counter[str] = Counter()
        self._networks: dict[str, dict[int, None]] = {}  # network -> its tickets, oldest first

    @property
    def waiting(self) -> int:
        """Return the number of pending connections."""
        return len(self._places)

    def arrive(self, address: str) -> WaitingPlace | str:
        """Register a new pending connection; return its place, or the reason for refusing it."""
        home, network = home_of(address), network_of(address)
        if self._homes[home] >= self.allowed.waiting_per_address:
            return f"{self._homes[home]} connections from this address are already waiting"
        instead_of = None
        if self.waiting >= self.allowed.waiting:
            instead_of = self._oldest_of_most(network)
            if instead_of is None:
                return f"{self.waiting} connections are already waiting"
            self.done(instead_of)
        ticket = next(self._tickets)
        self._places[ticket] = home, network
        self._homes[home] += 1
        self._networks.setdefault(network, {})[ticket] = None
        return WaitingPlace(ticket, instead_of)

    def _oldest_of_most(self, network: str) -> int | None:
        """Return the oldest ticket of the network with the most tickets.

        Return None if `network` itself has the same number of tickets.
        """
        most = max(self._networks.values(), key=lambda places: (len(places), -next(iter(places))))
        if len(most) <= len(self._networks.get(network, ())):
            return None
        return next(iter(most))

    def done(self, ticket: int) -> None:
        """Stop counting a pending connection, because it was admitted or closed."""
        home, network = self._places.pop(ticket)
        self._homes[home] -= 1
        if not self._homes[home]:
            del self._homes[home]
        del self._networks[network][ticket]
        if not self._networks[network]:
            del self._networks[network]


def home_of(address: str) -> str:
    """Return the group that shares an address's limits: its IPv4 address or IPv6 /64 network."""
    return _within(address, _IPV6_HOME)


def network_of(address: str) -> str:
    """Return the network of an address: the IPv4 address itself, or the IPv6 /48 network."""
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


BURST: Final = 10  # failed attempts that an address may make in quick succession
REFILL_S: Final = 6.0  # seconds after which an address may make one more failed attempt
MAX_ADDRESSES: Final = 10_000  # tracked at most; the address that failed longest ago is dropped


@dataclass(slots=True)
class _Bucket:
    tokens: float
    at_s: float


class RateLimit:
    """Limits the rate of failed attempts with one token bucket per address.

    Each failed attempt costs one token. One token is restored every `refill_s` seconds.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        burst: int = BURST,
        refill_s: float = REFILL_S,
        max_addresses: int = MAX_ADDRESSES,
    ) -> None:
        self._clock = clock
        self._burst = burst
        self._refill_s = refill_s
        self._max_addresses = max_addresses
        self._buckets: dict[str, _Bucket] = {}  # oldest failure first

    def wait_s(self, address: str) -> float:
        """Return the time in seconds until `address` may try again; 0 if it may try now."""
        bucket = self._buckets.get(home_of(address))
        if bucket is None:
            return 0.0
        return max(0.0, (1.0 - self._tokens(bucket)) * self._refill_s)

    def failed(self, address: str) -> None:
        """Count a failed attempt from `address`."""
        who = home_of(address)
        now_s = self._clock()
        bucket = self._buckets.pop(who, None)
        tokens = self._tokens(bucket) if bucket is not None else float(self._burst)
        self._buckets[who] = _Bucket(max(0.0, tokens - 1.0), now_s)
        if len(self._buckets) > self._max_addresses:
            del self._buckets[next(iter(self._buckets))]

    def _tokens(self, bucket: _Bucket) -> float:
        back = (self._clock() - bucket.at_s) / self._refill_s
        return min(float(self._burst), bucket.tokens + back)


_logger = logging.getLogger(__name__)

LINES: Final = 10  # refusals with their own log line per window
WINDOW_S: Final = 60.0  # length of a window, at whose end the other refusals are summarized


class RejectionLog:
    """Logs refused connections. Reasons must not quote text from unknown clients.

    In each window of `WINDOW_S` seconds, up to `lines` refusals with different addresses or reasons
    are logged one by one, and the others are summarized.
    """

    def __init__(
        self,
        now: Callable[[], datetime],
        call_later: Callable[[float, Callable[[], None]], Any],
        lines: int = LINES,
    ) -> None:
        self._now = now
        self._call_later = call_later
        self._lines = lines
        self._left = 0
        self._open = False
        self._told: set[tuple[str, str]] = set()  # addresses and reasons with a line of their own
        self._untold: Counter[str] = Counter()

    def refused(self, address: str, reason: str) -> None:
        """Log a refused connection, or count it for the summary of the current window."""
        if not self._open:
            self._open, self._left = True, self._lines
            self._call_later(WINDOW_S, self.flush)
        kind = _without_numbers(reason.replace(address, "there"))
        if self._left and (address, kind) not in self._told:
            self._left -= 1
            self._told.add((address, kind))
            self._write(f"{address}: {reason}")
        else:
            self._untold[kind] += 1

    def flush(self) -> None:
        """Log a summary of the counted refusals and end the current window."""
        self._open = False
        self._told.clear()
        if self._untold:
            reasons = "; ".join(
                f"{'once' if n == 1 else f'{n:,} times'}: {what}"
                for what, n in self._untold.most_common(5)
            )
            total = sum(self._untold.values())
            self._untold.clear()
            self._write(f"{total:,} more ({reasons})")

    def _write(self, what: str) -> None:
        _logger.warning("%s refused %s", f"{self._now():%Y-%m-%d %H:%M:%S}", what)


@lru_cache(maxsize=64)  # in a flood of refusals, most reasons are equal
def _without_numbers(reason: str) -> str:
    return re.sub(r"\d+", "…", reason)
