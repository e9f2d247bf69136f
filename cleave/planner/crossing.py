"""The smallest batch for which training by stages is faster than the PS alone, on a given fleet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

CLOSE: Final = 1.1
"""Precision of the search: the largest allowed quotient of the two batch sizes at the crossing.

The larger batch is the smallest one for which stages win. The smaller batch is the largest one for
which the PS alone wins.
"""


@dataclass(frozen=True, slots=True)
class CrossingPoint:
    """The predicted step times of a batch by stages and on the PS alone.

    Attributes:
        rows: sequences in the batch.
        stages_s: seconds of a step by stages; infinite if the fleet cannot train by stages.
        local_s: seconds of a step on the PS alone.
    """

    rows: int
    stages_s: float
    local_s: float

    @property
    def wins(self) -> bool:
        """Return True if stages are faster than the PS alone for this batch."""
        return self.stages_s < self.local_s


@dataclass(frozen=True, slots=True)
class Crossing:
    """The batch size at which stages become faster than the PS alone.

    Attributes:
        points: the batches that were tried, in ascending order of batch size.
        below: the largest batch tried for which the PS alone wins; None if stages always win.
        above: the smallest batch tried for which stages win; None if stages never win.
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

    The search doubles the batch size until stages win, and then bisects. It assumes that if stages
    win for one batch, stages win for every larger batch, because weights and gradients are
    transferred once per step whatever the batch size is.

    Args:
        predict: function from a number of sequences to the step times of such a batch.
        most_rows: number of sequences of the largest batch to try, at least 1.
        tried: callback, called with the result for each batch.
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
    """Return the maximum number of batches that `crossing` tries, doubling and bisection together.

    Args:
        most_rows: see `crossing`.
    """
    return (most_rows - 1).bit_length() + 1 + 4


def _close(below: int, above: int) -> bool:
    return above - below <= 1 or above <= CLOSE * below
