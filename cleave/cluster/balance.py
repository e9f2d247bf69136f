"""Which devices are sent from which door to which, so that all servers have about as many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

ARRIVES_S: Final = 20.0
"""Devices that were sent to a door are there by then, or cannot reach it."""

SHUNNED_S: Final = 600.0
"""So long is nobody sent to a door that those before did not reach."""


@dataclass(frozen=True, slots=True)
class Move:
    """Sends devices from one door to another."""

    source: int
    target: int
    devices: int


@dataclass(slots=True)
class Balance:
    """Decides from how many devices each door has, joining ones among them.

    Attributes:
        sent: by door, when devices were sent there, and how many it should have then.
        shunned_until_s: by door.
    """

    sent: dict[int, tuple[float, int]] = field(default_factory=dict)
    shunned_until_s: dict[int, float] = field(default_factory=dict)

    def sent_fewer(self, move: Move, missing: int) -> None:
        """Note that so many devices of a move stay where they are: they work, or cannot move."""
        if not missing:
            return
        sent_s, wanted = self.sent[move.target]
        self.sent[move.target] = sent_s, wanted - missing

    def forget(self, door: int) -> None:
        """Note that a door is lost, or starts again: nobody is on the way there any more."""
        self.sent.pop(door, None)
        self.shunned_until_s.pop(door, None)

    def next(self, loads: Sequence[int | None], now_s: float) -> list[Move]:
        """Return what is to be moved now; nothing while devices are on their way.

        Args:
            loads: devices of each door; None for one that does not answer.
            now_s: the time.
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
        # A door that is shunned may still send devices to others.
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
