"""Division of each batch's sequences among several servers, in proportion to server speeds.

A server's speed is predicted until the server has computed a step, and measured from then on.
Measured speeds include the fixed cost of a step. Repeated division therefore converges until all
servers need the same time per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from cleave.training.data.batches import Batch

_WORTH: Final = 0.1
"""Minimum fraction of the step time that a new division must save.

A server whose part changes must compute a new plan.
"""

_NEWEST: Final = 0.5
"""Weight of the speed of the newest step in the moving average of a server's speed."""


def deal(rows: int, speeds: Sequence[float]) -> list[int]:
    """Return the number of batch rows that each server computes.

    Args:
        rows: number of rows in the batch.
        speeds: speed of each server, in any common unit. If all speeds are 0, servers get equal
            parts.
    """
    total = sum(speeds)
    if not total:
        return deal(rows, [1.0] * len(speeds))
    shares = [rows * speed / total for speed in speeds]
    dealt = [int(share) for share in shares]
    # Each remaining row goes to the server that would finish its rows first.
    able = [rank for rank, speed in enumerate(speeds) if speed]
    for _ in range(rows - sum(dealt)):
        dealt[min(able, key=lambda rank: (dealt[rank] + 1) / speeds[rank])] += 1
    return dealt


_TRUST: Final = 1.05
"""Factor by which a server's speed is multiplied after each step in which it computed no rows."""


@dataclass(slots=True)
class Pace:
    """Measures the speed of one server relative to its fleet's capacity.

    Attributes:
        rows_per_s: rows per second, divided by the fleet's capacity. 0 until the first step or
            prediction.
    """

    rows_per_s: float = 0.0

    def took(self, rows: int, seconds: float, capacity: float) -> None:
        """Update the speed after a step.

        After a step without rows, the speed rises slightly, so that the server gets rows again.

        Args:
            rows: number of rows that the server computed.
            seconds: time that the rows took.
            capacity: capacity of the server's fleet during the step, in FLOP/s.
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
    """Divides the rows of each step among servers.

    Keeps the previous division while a new division would save little time.

    Attributes:
        dealt: number of rows of each server in the last step.
    """

    dealt: list[int] = field(default_factory=list)

    def next(self, rows: int, speeds: Sequence[float]) -> list[int]:
        """Return the number of rows that each server computes in the next step.

        Args:
            rows: number of rows in the step.
            speeds: speed of each server, in any common unit.
        """
        new = deal(rows, speeds)
        kept = self.dealt
        if sum(kept) != rows or _step_s(new, speeds) < (1 - _WORTH) * _step_s(kept, speeds):
            self.dealt = new
        return self.dealt


def _step_s(dealt: Sequence[int], speeds: Sequence[float]) -> float:
    """Return the predicted time of a step: the time that the slowest server takes.

    Args:
        dealt: number of rows of each server.
        speeds: rows per unit of time of each server.
    """
    pairs = [(rows, speed) for rows, speed in zip(dealt, speeds, strict=True) if rows]
    return max((rows / speed if speed else float("inf") for rows, speed in pairs), default=0.0)


def part_of(batches: Sequence[Batch], dealt: Sequence[int], rank: int) -> list[Batch]:
    """Return the micro-batches, or parts of micro-batches, that one server computes.

    Args:
        batches: all micro-batches of the step, each with the same number of rows.
        dealt: number of rows that each server computes.
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
