"""From how many tokens a step stages beat the PS alone, on one fleet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

CLOSE: Final = 1.1
"""The crossing is known when batches on both sides of it differ by no more than this factor."""


@dataclass(frozen=True, slots=True)
class CrossingPoint:
    """A batch of so many sequences, in seconds a step; infinite where there are no stages."""

    rows: int
    stages_s: float
    local_s: float

    @property
    def wins(self) -> bool:
        """Say whether stages are faster than the PS alone."""
        return self.stages_s < self.local_s


@dataclass(frozen=True, slots=True)
class Crossing:
    """Where stages begin to beat the PS alone.

    Attributes:
        points: what was tried, by rising sequences.
        below, above: the largest batch that was tried before stages win, and the smallest from
            which on they do; None where there is none.
    """

    points: tuple[CrossingPoint, ...]
    below: CrossingPoint | None
    above: CrossingPoint | None


def crossing(
    predict: Callable[[int], CrossingPoint],
    most_rows: int,
    tried: Callable[[CrossingPoint], None] = lambda point: None,
) -> Crossing:
    """Search for the smallest batch with which stages win.

    Batches are doubled until stages win, and then halved in between. Stages that win with a batch
    are taken to win with every larger one: what a step sends once weighs less the longer it is.

    Args:
        predict: returns what a batch of so many sequences takes.
        most_rows: the largest batch that is tried, at least 1.
        tried: called with every point.
    """
    points: dict[int, CrossingPoint] = {}

    def at(rows: int) -> CrossingPoint:
        points[rows] = predict(rows)
        tried(points[rows])
        return points[rows]

    below, above, rows = None, None, 1
    while above is None:
        point = at(rows)
        if point.wins:
            above = point
        else:
            below = point
            if rows == most_rows:
                break
            rows = min(2 * rows, most_rows)
    while above is not None and below is not None and not _close(below.rows, above.rows):
        point = at(round((below.rows * above.rows) ** 0.5))
        below, above = (below, point) if point.wins else (point, above)
    return Crossing(tuple(points[rows] for rows in sorted(points)), below, above)


def most_points(most_rows: int) -> int:
    """Return how many batches `crossing` tries at most: to double until there, then to halve."""
    return (most_rows - 1).bit_length() + 1 + 4


def _close(below: int, above: int) -> bool:
    return above - below <= 1 or above <= CLOSE * below
