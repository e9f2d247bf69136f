"""The order in which partial sums are added, which does not depend on the order of arrival."""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import product
from typing import Any

from cleave.gemm import Span
from cleave.scheduler.tiles.tasks import Task


class ReductionOrder:
    """Releases partial sums in the order of their position along k.

    Each partial sum waits until all partial sums of the same output elements at lower k have
    arrived.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._waits = dict.fromkeys(tasks, 0)
        self._followers: dict[Task, list[Task]] = {task: [] for task in tasks}
        self._parked: dict[Task, Any] = {}
        # All cuts divide C into cells. In each cell, a task waits for the previous task along k.
        blocks = [task.detail.block for task in tasks]
        rows = _cells({block.m for block in blocks})
        columns = _cells({block.n for block in blocks})
        latest: dict[tuple[int, int], Task] = {}
        for task in sorted(tasks, key=lambda u: u.detail.block.k):
            block = task.detail.block
            cells = list(product(rows[block.m], columns[block.n]))
            before = dict.fromkeys(map(latest.get, cells))
            latest.update(dict.fromkeys(cells, task))
            for lower in before:
                if lower is not None:
                    self._waits[task] += 1
                    self._followers[lower].append(task)

    def replace(self, tasks: Sequence[Task], others: Sequence[Task]) -> None:
        """Replace tasks without results by other tasks that compute the same output elements."""
        gone = {task for task in tasks if task in self._waits}
        before, after = [], []
        for task, later in self._followers.items():
            kept = [u for u in later if u not in gone]
            if task not in gone and len(kept) < len(later):
                before.append(task)
                self._followers[task] = kept
        for task in gone:
            del self._waits[task]
            for follower in self._followers.pop(task):
                if follower not in gone:
                    self._waits[follower] -= 1
                    after.append(follower)
        added = dict.fromkeys(task for task in others if task.detail.partial)
        self._waits |= dict.fromkeys(added, 0)
        self._followers |= {task: [] for task in added}
        around = ReductionOrder([*before, *added, *dict.fromkeys(after)])
        for lower, later in around._followers.items():
            for upper in later:
                if lower in added or upper in added:
                    self._followers[lower].append(upper)
                    self._waits[upper] += 1

    def arrived(self, task: Task, payload: Any) -> list[tuple[Task, Any]]:
        """Record that a partial sum arrived.

        Return the partial sums that may be added now, in order.
        """
        if self._waits[task]:
            self._parked[task] = payload
            return []
        ready = [(task, payload)]
        for lower, _ in ready:  # `ready` grows in the loop
            for follower in self._followers.pop(lower):
                self._waits[follower] -= 1
                if not self._waits[follower] and follower in self._parked:
                    ready.append((follower, self._parked.pop(follower)))
        return ready


def _cells(spans: Set[Span]) -> dict[Span, range]:
    """Return a map from each span to the range of cells that the span covers.

    The start and end positions of all spans are the cell boundaries.
    """
    bounds = sorted({bound for span in spans for bound in span})
    numbers = {bound: number for number, bound in enumerate(bounds)}
    return {span: range(numbers[span.start], numbers[span.stop]) for span in spans}
