"""The time of a pipeline, sum t + (m - 1) max t, against 1F1B itself."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from simulator.pipeline import one_f_one_b


def formula(times: np.ndarray, micro_batches: int) -> float:
    return float(times.sum() + (micro_batches - 1) * times.max())


def schedule(stages: int, stage: int, micro_batches: int) -> Iterator[tuple[bool, int]]:
    """What a stage does in turn: (backward, micro-batch)."""
    ahead = round(one_f_one_b(stages, micro_batches, 1)[stage])
    yield from ((False, i) for i in range(ahead))
    for i in range(micro_batches):
        yield True, i
        if ahead + i < micro_batches:
            yield False, ahead + i


def exact(times: np.ndarray, micro_batches: int) -> float:
    """1F1B, event by event: a third of a stage's time is forward; hand-overs take no time."""
    stages = len(times)
    todo = [list(schedule(stages, p, micro_batches)) for p in range(stages)]
    done: dict[tuple[bool, int, int], float] = {}
    free = [0.0] * stages
    while any(todo):
        for p in range(stages):
            while todo[p]:
                backward, i = todo[p][0]
                waits_for = (
                    (backward, i, p + 1 if backward else p - 1)
                    if (p < stages - 1 if backward else p > 0)
                    else (False, i, p) if backward else None
                )  # fmt: skip
                if waits_for is not None and waits_for not in done:
                    break
                begin = max(free[p], done[waits_for] if waits_for else 0.0)
                free[p] = begin + times[p] * (2 / 3 if backward else 1 / 3)
                done[backward, i, p] = free[p]
                todo[p].pop(0)
    return max(free)


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 5), (4, 1), (4, 3), (5, 12)])
def test_equal_stages_take_m_plus_p_less_one(stages: int, micro_batches: int) -> None:
    times = np.ones(stages)
    assert exact(times, micro_batches) == pytest.approx(micro_batches + stages - 1)
    assert formula(times, micro_batches) == pytest.approx(micro_batches + stages - 1)


def test_by_hand() -> None:
    # Eight micro-batches of 3 s, and what comes before the slowest stage, there and back.
    for times, wanted in (([1, 1, 1, 3], 27), ([1, 3, 1, 1], 25), ([3, 1, 1, 1], 24)):
        assert exact(np.array(times, float), 8) == pytest.approx(wanted)
    assert formula(np.array([1.0, 1, 1, 3]), 8) == 27


def test_unequal_stages_take_less_by_no_more_than_what_follows_the_slowest() -> None:
    rng = np.random.default_rng(7)
    for _ in range(150):
        times = rng.uniform(0.2, 1.8, int(rng.integers(2, 10)))
        micro_batches = int(rng.integers(1, 30))
        said, is_ = formula(times, micro_batches), exact(times, micro_batches)
        following = times[int(times.argmax()) + 1 :].sum()
        assert said - following - 1e-9 <= is_ <= said + 1e-9
