"""The dynamic program against every partition there is."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest

from simulator.partition import Cut, best_partition


def every(layers: int, start: int, units: int) -> Iterator[list[Cut]]:
    """All stages that hold so many layers, on units from start on, idle ones allowed."""
    if not layers:
        yield []
        return
    for first in range(start, units):
        for stop in range(first + 1, units + 1):
            for held in range(1, layers + 1):
                for rest in every(layers - held, stop, units):
                    yield [Cut(held, first, stop), *rest]


@pytest.mark.parametrize("seed", range(6))
def test_it_finds_the_best_of_all(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cost = rng.uniform(1, 10, (5, 5, 5))
    cost[rng.uniform(size=cost.shape) < 0.2] = np.inf

    def time_s(cuts: list[Cut], micro_batches: int) -> float:
        times = [cost[cut] for cut in cuts]
        longest = float(max(times))
        return np.inf if np.isinf(longest) else float(sum(times)) + (micro_batches - 1) * longest

    for micro_batches in (1, 3, 20):
        found = best_partition(cost, micro_batches)
        least = min(time_s(cuts, micro_batches) for cuts in every(4, 0, 4))
        if np.isinf(least):
            assert found is None
            continue
        assert found is not None
        assert sum(cut.layers for cut in found) == 4
        assert all(a.stop <= b.start for a, b in pairwise(found))
        assert least <= time_s(found, micro_batches) <= 1.05 * least


def test_one_stage_where_only_that_is_possible() -> None:
    cost = np.full((4, 3, 3), np.inf)
    cost[3, 0, 2] = 7.0
    assert best_partition(cost, 5) == [Cut(3, 0, 2)]
    assert best_partition(np.full((4, 3, 3), np.inf), 5) is None
