"""The smallest batch for which stages beat the PS alone, on one fleet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

CLOSE: Final = 1.1
"""The search ends when the batches on both sides of the crossing differ by at most this factor."""


@dataclass(frozen=True, slots=True)
class CrossingPoint:
    """A batch of `rows` sequences and its step times in seconds; infinite if no stages fit."""

    rows: int
    stages_s: float
    local_s: float

    @property
    def wins(self) -> bool:
        """Return whether stages are faster than the PS alone."""
        return self.stages_s < self.local_s


@dataclass(frozen=True, slots=True)
class Crossing:
    """The batch size from which stages beat the PS alone.

    Attributes:
        points: the batches that were tried, in ascending order of sequences.
        below: the largest batch tried for which the PS alone wins; None if stages always win.
        above: the smallest batch tried for which stages win; None if they never win.
    """

    points: tuple[CrossingPoint, ...]
    below: CrossingPoint | None
    above: CrossingPoint | None


def crossing(
    predict: Callable[[int], CrossingPoint],
    most_rows: int,
    tried: Callable[[CrossingPoint], None] = lambda point: None,
) -> Crossing:
    """Search for the smallest batch for which stages win.

    The search doubles the batch until stages win, then bisects. It assumes that stages that win
    with a batch also win with every larger one, because traffic per step weighs less there.

    Args:
        predict: returns the step times of a batch of this many sequences.
        most_rows: the largest batch to try, at least 1.
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
    """Return the most batches that `crossing` can try: the doublings and then the bisection."""
    return (most_rows - 1).bit_length() + 1 + 4


def _close(below: int, above: int) -> bool:
    return above - below <= 1 or above <= CLOSE * below
