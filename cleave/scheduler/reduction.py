"""The order in which partial sums of the same elements are added, whoever answers first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cleave.scheduler.tasks import Task


class ReductionOrder:
    """Releases partial sums in the order of k: each waits for the lower ones of its elements.

    So results do not depend on the order in which devices answer.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._waits = dict.fromkeys(tasks, 0)
        self._followers: dict[Task, list[Task]] = {task: [] for task in tasks}
        self._parked: dict[Task, Any] = {}
        # All cuts together divide C into cells. In a cell a task waits for the one before it in k,
        # which waited for the one before that.
        rows = _cells({span for task in tasks for span in task.detail.block.m})
        columns = _cells({span for task in tasks for span in task.detail.block.n})
        latest: dict[tuple[int, int], Task] = {}
        for task in sorted(tasks, key=lambda u: u.detail.block.k):
            block = task.detail.block
            before = set()
            for row in range(rows[block.m.start], rows[block.m.stop]):
                for column in range(columns[block.n.start], columns[block.n.stop]):
                    cell = (row, column)
                    if cell in latest:
                        before.add(latest[cell])
                    latest[cell] = task
            self._waits[task] = len(before)
            for lower in before:
                self._followers[lower].append(task)

    def replace(self, tasks: Sequence[Task], others: Sequence[Task]) -> None:
        """Replace tasks that have not arrived by others that cover the same elements."""
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
        """Take a partial sum; return those that are to be added now, in order."""
        if self._waits[task]:
            self._parked[task] = payload
            return []
        ready = [(task, payload)]
        for lower, _ in ready:  # which grows
            for follower in self._followers.pop(lower):
                self._waits[follower] -= 1
                if not self._waits[follower] and follower in self._parked:
                    ready.append((follower, self._parked.pop(follower)))
        return ready


def _cells(bounds: set[int]) -> dict[int, int]:
    """Number boundaries in ascending order."""
    return {bound: number for number, bound in enumerate(sorted(bounds))}
