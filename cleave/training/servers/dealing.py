"""Division of each batch's sequences among several servers, in proportion to their speeds.

A server's speed is a forecast until its own steps have been measured. Measured speeds include the
fixed cost of a step. So repeated division converges on parts that take equally long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from cleave.training.data.batches import Batch

_WORTH: Final = 0.1
"""Fraction of a step's time that a new division must save, as a new part needs a new plan."""

_NEWEST: Final = 0.5
"""Weight of the newest step in the moving average of a server's speed."""


def deal(rows: int, speeds: Sequence[float]) -> list[int]:
    """Return how many rows each server computes.

    Args:
        rows: number of rows in the batch.
        speeds: speeds of the servers in any unit; if all are 0 they count as equal.
    """
    total = sum(speeds)
    if not total:
        return deal(rows, [1.0] * len(speeds))
    shares = [rows * speed / total for speed in speeds]
    dealt = [int(share) for share in shares]
    # Each remaining row goes to the server that would finish it first.
    able = [rank for rank, speed in enumerate(speeds) if speed]
    for _ in range(rows - sum(dealt)):
        dealt[min(able, key=lambda rank: (dealt[rank] + 1) / speeds[rank])] += 1
    return dealt


_TRUST: Final = 1.05
"""Factor by which the speed of a server without rows is raised in each step."""


@dataclass(slots=True)
class Pace:
    """Measures the speed of one server relative to its fleet's capacity.

    Attributes:
        rows_per_s: rows per second and unit of capacity; 0 while unknown.
    """

    rows_per_s: float = 0.0

    def took(self, rows: int, seconds: float, capacity: float) -> None:
        """Record a step; one without rows raises the speed slightly, to retry the server."""
        if not rows and capacity > 0:
            self.rows_per_s *= _TRUST
        if not (rows and seconds > 0 and capacity > 0):
            return
        shown = rows / seconds / capacity
        old = self.rows_per_s or shown
        self.rows_per_s = (1 - _NEWEST) * old + _NEWEST * shown


@dataclass(slots=True)
class Dealer:
    """Divides rows, and keeps the previous division while a new one would gain little.

    Attributes:
        dealt: rows of each server in the last step.
    """

    dealt: list[int] = field(default_factory=list)

    def next(self, rows: int, speeds: Sequence[float]) -> list[int]:
        """Return how many rows each server computes in the next step."""
        new = deal(rows, speeds)
        kept = self.dealt
        if sum(kept) != rows or _step_s(new, speeds) < (1 - _WORTH) * _step_s(kept, speeds):
            self.dealt = new
        return self.dealt


def _step_s(dealt: Sequence[int], speeds: Sequence[float]) -> float:
    """Return how many seconds the slowest server takes."""
    pairs = [(rows, speed) for rows, speed in zip(dealt, speeds, strict=True) if rows]
    return max((rows / speed if speed else float("inf") for rows, speed in pairs), default=0.0)


def part_of(batches: Sequence[Batch], dealt: Sequence[int], rank: int) -> list[Batch]:
    """Return one server's rows of a step as micro-batches.

    Args:
        batches: all micro-batches of the step, of equal size.
        dealt: number of rows of each server.
        rank: rank of the server.
    """
    first = sum(dealt[:rank])
    past = first + dealt[rank]
    size = len(batches[0].ids)
    found = []
    for number, batch in enumerate(batches):
        rows = slice(max(first - number * size, 0), max(past - number * size, 0))
        if len(batch.ids[rows]):
            positions = None if batch.positions is None else batch.positions[rows]
            found.append(Batch(batch.ids[rows], batch.labels[rows], positions))
    return found
