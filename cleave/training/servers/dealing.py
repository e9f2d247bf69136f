"""Deals the sequences of each batch to several servers, in proportion to what their fleets do.

A server's speed is what its fleet is predicted to do, until its own steps have shown it. Speeds
that a step shows are those of the whole: where most of a step is the same for any number of
sequences, dealing by them converges on parts that take equally long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from cleave.training.data.batches import Batch

_WORTH: Final = 0.1
"""Sequences are dealt anew for a step that is shorter by this share: a new part is planned anew."""

_NEWEST: Final = 0.5
"""What the newest step counts in the speed that a server has shown."""


def deal(rows: int, speeds: Sequence[float]) -> list[int]:
    """Return how many of the rows each server does.

    Args:
        rows: of the batch.
        speeds: of the servers, in any unit; where all are 0 they are taken as equal.
    """
    total = sum(speeds)
    if not total:
        return deal(rows, [1.0] * len(speeds))
    shares = [rows * speed / total for speed in speeds]
    dealt = [int(share) for share in shares]
    # What is left goes where the next row is done first.
    able = [rank for rank, speed in enumerate(speeds) if speed]
    for _ in range(rows - sum(dealt)):
        dealt[min(able, key=lambda rank: (dealt[rank] + 1) / speeds[rank])] += 1
    return dealt


_TRUST: Final = 1.05
"""So much faster, in each step, is a server taken to be that had no row in it."""


@dataclass(slots=True)
class Pace:
    """How fast one server is, in rows per second, for the capacity that its fleet has.

    Attributes:
        rows_per_s: for each unit of capacity; 0 while nothing is known.
    """

    rows_per_s: float = 0.0

    def took(self, rows: int, seconds: float, capacity: float) -> None:
        """Note what a step showed.

        A server that had no row shows nothing. It is taken for a little faster each time, so that
        it is tried again: it may have been slow for a while.
        """
        if not rows and capacity > 0:
            self.rows_per_s *= _TRUST
        if not (rows and seconds > 0 and capacity > 0):
            return
        shown = rows / seconds / capacity
        old = self.rows_per_s or shown
        self.rows_per_s = (1 - _NEWEST) * old + _NEWEST * shown


@dataclass(slots=True)
class Dealer:
    """Keeps what was dealt while dealing anew would gain little.

    Attributes:
        dealt: rows of each server in the last step.
    """

    dealt: list[int] = field(default_factory=list)

    def next(self, rows: int, speeds: Sequence[float]) -> list[int]:
        """Return how many of the rows each server does in the next step."""
        new = deal(rows, speeds)
        kept = self.dealt
        if sum(kept) != rows or _step_s(new, speeds) < (1 - _WORTH) * _step_s(kept, speeds):
            self.dealt = new
        return self.dealt


def _step_s(dealt: Sequence[int], speeds: Sequence[float]) -> float:
    """Return how long the slowest server takes."""
    pairs = [(rows, speed) for rows, speed in zip(dealt, speeds, strict=True) if rows]
    return max((rows / speed if speed else float("inf") for rows, speed in pairs), default=0.0)


def part_of(batches: Sequence[Batch], dealt: Sequence[int], rank: int) -> list[Batch]:
    """Return what one server does of a step's micro-batches, in micro-batches of its own.

    Args:
        batches: all of the step, of one size.
        dealt: rows of each server.
        rank: which server.
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
