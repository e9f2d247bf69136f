"""A stage that lost its device is shared by those that finish it soonest."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.planner.plan import DeviceRates
from cleave.planner.stages.model import PlannedStage
from cleave.scheduler.stages.passes import arrays_of
from cleave.scheduler.stages.takeover import Candidate, Takeover, all_sums, soonest, soonest_parts
from tests.scheduler.stage_devices import MANY_ROWS, resident_of, step_work
from tests.scheduler.test_stage_step import LAYERS, Trial, check, stages_of

seconds = st.floats(0.0, 100.0)


def end_s(candidates: list[Candidate], batches: int) -> float:
    """When these have done so many micro-batches, if each may take parts of one."""
    speed = sum(1 / c.each_s for c in candidates)
    return (batches + sum(c.other_s / c.each_s for c in candidates)) / speed


@given(
    st.lists(st.tuples(seconds, st.floats(0.1, 10.0)), min_size=1, max_size=8), st.integers(1, 50)
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


@given(
    st.lists(st.tuples(seconds, st.floats(0.1, 10.0), seconds), min_size=1, max_size=8),
    st.integers(1, 50),
    st.integers(1, 8),
)
def test_sums_are_divided_where_that_is_sooner(
    drawn: list[tuple[float, float, float]], batches: int, most: int
) -> None:
    def candidates(parts: int) -> list[Candidate]:
        return [Candidate(n, a + sums / parts, b) for n, (a, b, sums) in enumerate(drawn)]

    def ends_s(devices: list[int], parts: int) -> float:
        return end_s([candidates(parts)[d] for d in devices], batches)

    groups = soonest_parts(candidates, batches, most)
    assert 1 <= len(groups) <= min(most, len(drawn))
    assert all(groups)
    devices = [device for group in groups for device in group]
    assert len(devices) == len(set(devices))
    undivided_s = ends_s(soonest(candidates(1), batches), 1)
    assert max(ends_s(group, len(groups)) for group in groups) <= undivided_s * (1 + 1e-9)


def test_nobody_can_take_over_from_nobody() -> None:
    assert soonest_parts(lambda parts: [], 5, 3) == []


@given(st.integers(1, LAYERS + 1))
def test_each_sum_is_in_one_part(parts: int) -> None:
    stage = PlannedStage(0, LAYERS, (1,), True)
    work = step_work(LAYERS, 1, [stage])
    sums = frozenset(all_sums(work, stage))
    divided = Takeover(work, stage, sums).divided(parts)
    assert len(divided) == parts
    assert all(divided)
    assert sorted(name for part in divided for name in part) == sorted(sums)


@pytest.mark.parametrize("loss", [False, True])
@pytest.mark.parametrize("answers", [0, 5, 20])
def test_sums_that_take_long_are_returned_in_parts(answers: int, loss: bool) -> None:
    stages = stages_of([2], [(1,), (2,)], loss=loss)
    work = step_work(LAYERS, 6, stages, MANY_ROWS)
    trial = Trial(work, 5)
    for _ in range(answers):
        trial.answer(min(trial.fleet.waiting))
    trial.lose(2)
    result = trial.finish()
    check(result, work)
    last = [record for record in result.records if record.plan == stages[1]]
    assert len(last) > 1
    found = [
        {(layer, name) for layer, name, _ in sums.found} for record in last for sums in record.sums
    ]
    assert all(len(names) < len(all_sums(work, stages[1])) for names in found)
    for batch in range(len(work.x)):  # one device returned its gradient, whoever returned sums
        assert sum(batch in record.dx for record in last) == 1


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


def test_an_update_needs_room_for_the_new_weight_and_moments() -> None:
    """The device still has the old ones, and the gradient."""
    plan = PlannedStage(LAYERS, LAYERS, (1,), loss=True)
    work = replace(step_work(LAYERS, 1, (plan,)), width=1, tokens=[1])
    work = replace(work, resident=resident_of(work))
    takeover = Takeover(work, plan, frozenset())
    held = sum(array.nbytes for array in arrays_of(work, plan))
    held += sum(shape.nbytes for shape in all_sums(work, plan).values())
    assert work.resident is not None
    ((_, one),) = work.resident.of_stage(plan)
    needed = held + sum(array.nbytes for array in one.arrays)
    device = DeviceRates(1, 1e6, 1e6, 1e9, memory_bytes=needed)
    assert takeover.fits(device, None)
    assert not takeover.fits(replace(device, memory_bytes=needed - 1), None)
