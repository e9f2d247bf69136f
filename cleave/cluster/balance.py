"""Decide how many devices move between endpoints, to balance the number of devices per server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

ARRIVES_S: Final = 20.0
"""Seconds within which all devices of a move must arrive.

If devices are still missing after that, the target endpoint counts as unreachable for devices.
"""

SHUNNED_S: Final = 600.0
"""Seconds for which no devices are moved to an unreachable endpoint."""


@dataclass(frozen=True, slots=True)
class Move:
    """A move of devices between two endpoints.

    Attributes:
        source: number of the endpoint that the devices leave.
        target: number of the endpoint that the devices join.
        devices: number of devices to move.
    """

    source: int
    target: int
    devices: int


@dataclass(slots=True)
class Balance:
    """Plans moves that balance the number of devices per endpoint.

    The number of devices at an endpoint includes devices that are joining it.

    Attributes:
        sent: for each target of a pending move, the time of the move, and the number of devices
            that the endpoint has once the move is complete.
        shunned_until_s: for each unreachable endpoint, the time until which no devices are moved
            to it.
    """

    sent: dict[int, tuple[float, int]] = field(default_factory=dict)
    shunned_until_s: dict[int, float] = field(default_factory=dict)

    def sent_fewer(self, move: Move, missing: int) -> None:
        """Record that `missing` devices of a move stayed at the source endpoint.

        Devices stay if they are busy or do not support moves.
        """
        if not missing:
            return
        sent_s, wanted = self.sent[move.target]
        self.sent[move.target] = sent_s, wanted - missing

    def forget(self, endpoint: int) -> None:
        """Discard the state of endpoint number `endpoint`, because it was lost or restarted."""
        self.sent.pop(endpoint, None)
        self.shunned_until_s.pop(endpoint, None)

    def next(self, loads: Sequence[int | None], now_s: float) -> list[Move]:
        """Return the moves to start now. The list is empty while a previous move is pending.

        Args:
            loads: number of devices at each endpoint; None for an endpoint that does not respond.
            now_s: current time, in seconds.
        """
        left = {endpoint: load for endpoint, load in enumerate(loads) if load is not None}
        for endpoint in set(range(len(loads))) - left.keys():
            self.forget(endpoint)
        for endpoint, (sent_s, wanted) in list(self.sent.items()):
            if left[endpoint] >= wanted:
                del self.sent[endpoint]
            elif now_s - sent_s >= ARRIVES_S:
                del self.sent[endpoint]
                self.shunned_until_s[endpoint] = now_s + SHUNNED_S
        if self.sent:
            return []
        endpoints = [n for n in left if self.shunned_until_s.get(n, now_s) <= now_s]
        # An unreachable endpoint may still send devices to other endpoints.
        found: dict[tuple[int, int], int] = {}
        while endpoints:
            source, target = max(left, key=lambda n: left[n]), min(endpoints, key=lambda n: left[n])
            if left[source] - left[target] <= 1:
                break
            left[source] -= 1
            left[target] += 1
            found[source, target] = found.get((source, target), 0) + 1
        for _, target in found:
            self.sent[target] = now_s, left[target]
        return [Move(source, target, count) for (source, target), count in found.items()]
