"""A stage that lost its device is shared by those that finish it soonest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.scheduler.stage_takeover import Candidate, soonest
from tests.scheduler.stage_devices import step_work
from tests.scheduler.test_stage_step import LAYERS, Trial, check, stages_of

seconds = st.floats(0.0, 100.0)


def end_s(candidates: list[Candidate], batches: int) -> float:
    """When these have done so many micro-batches, if each may take parts of one."""
    speed = sum(1 / c.each_s for c in candidates)
    return (batches + sum(c.other_s / c.each_s for c in candidates)) / speed


@given(
    st.lists(st.tuples(seconds, st.floats(0.1, 10.0)), min_size=1, max_size=8),
    st.integers(1, 50),
)
def test_no_device_that_is_left_out_would_be_sooner(
    drawn: list[tuple[float, float]], batches: int
) -> None:
    candidates = [Candidate(n, *each) for n, each in enumerate(drawn)]
    chosen = soonest(candidates, batches)
    taken = [c for c in candidates if c.device in chosen]
    ends_s = end_s(taken, batches)
    assert chosen
    assert all(c.other_s <= ends_s * (1 + 1e-9) for c in taken)  # nobody has less than nothing
    assert all(c.other_s >= ends_s * (1 - 1e-9) for c in candidates if c not in taken)


def test_nothing_left_needs_one_device() -> None:
    assert soonest([Candidate(1, 5.0, 1.0), Candidate(2, 3.0, 1.0)], 0) == [2]


@pytest.mark.parametrize("answers", [0, 5, 20])
def test_all_others_share_what_a_lost_device_had(answers: int) -> None:
    stages = stages_of([1, 2, 3], [(1,), (2,), (3,), (4,)], loss=False)
    work = step_work(LAYERS, 12, stages)
    trial = Trial(work, 4)
    for _ in range(answers):
        trial.answer(min(trial.fleet.waiting))
    trial.lose(2)
    turns = 0
    while not trial.step.ended:  # all are equally fast
        for batch in trial.outputs:
            trial.give(batch)
        waiting = sorted(trial.fleet.waiting)
        if waiting and not trial.step.ended:
            trial.answer(waiting[turns % len(waiting)])
            turns += 1
    result = trial.finish()
    check(result, work)
    takers = {sums.device for sums in result.records[1].sums}
    assert len(takers) > 1
    assert 2 not in takers
