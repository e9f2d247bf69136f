"""Decide which devices move between endpoints, so that all servers have about equally many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

ARRIVES_S: Final = 20.0
"""Seconds within which moved devices must arrive; later ones cannot reach the endpoint."""

SHUNNED_S: Final = 600.0
"""Seconds for which an unreachable endpoint gets no devices."""


@dataclass(frozen=True, slots=True)
class Move:
    """A move of devices from one endpoint to another."""

    source: int
    target: int
    devices: int


@dataclass(slots=True)
class Balance:
    """Plans moves from each endpoint's number of devices, including joining ones.

    Attributes:
        sent: per target endpoint, the time of the move and the number of devices expected after it.
        shunned_until_s: per unreachable endpoint, the time until which it gets no devices.
    """

    sent: dict[int, tuple[float, int]] = field(default_factory=dict)
    shunned_until_s: dict[int, float] = field(default_factory=dict)

    def sent_fewer(self, move: Move, missing: int) -> None:
        """Record that `missing` devices of a move stayed, because they are busy or cannot move."""
        if not missing:
            return
        sent_s, wanted = self.sent[move.target]
        self.sent[move.target] = sent_s, wanted - missing

    def forget(self, door: int) -> None:
        """Discard the pending moves to an endpoint that is lost or restarts."""
        self.sent.pop(door, None)
        self.shunned_until_s.pop(door, None)

    def next(self, loads: Sequence[int | None], now_s: float) -> list[Move]:
        """Return the moves to make now; empty while moved devices are in transit.

        Args:
            loads: number of devices at each endpoint; None for one that does not answer.
            now_s: current time, in seconds.
        """
        left = {door: load for door, load in enumerate(loads) if load is not None}
        for door in set(range(len(loads))) - left.keys():
            self.forget(door)
        for door, (sent_s, wanted) in list(self.sent.items()):
            if left[door] >= wanted:
                del self.sent[door]
            elif now_s - sent_s >= ARRIVES_S:
                del self.sent[door]
                self.shunned_until_s[door] = now_s + SHUNNED_S
        if self.sent:
            return []
        doors = [n for n in left if self.shunned_until_s.get(n, now_s) <= now_s]
        # A shunned endpoint may still send devices to others.
        found: dict[tuple[int, int], int] = {}
        while doors:
            source, target = max(left, key=lambda n: left[n]), min(doors, key=lambda n: left[n])
            if left[source] - left[target] <= 1:
                break
            left[source] -= 1
            left[target] += 1
            found[source, target] = found.get((source, target), 0) + 1
        for _, target in found:
            self.sent[target] = now_s, left[target]
        return [Move(source, target, count) for (source, target), count in found.items()]
