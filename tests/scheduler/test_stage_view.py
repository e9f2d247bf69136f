"""What is shown of a step by stages agrees with the step, whatever devices do meanwhile."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from cleave.planner.stages.model import PlannedStage
from cleave.scheduler.stages.outcomes import StepResult
from cleave.scheduler.stages.state import StepView
from cleave.scheduler.stages.work import RequestKind, StageOrder
from tests.examples import examples
from tests.scheduler.stage_devices import step_work
from tests.scheduler.test_stage_runs import come, server
from tests.scheduler.test_stage_step import LAYERS, Trial

BATCHES = 3


def in_flight(trial: Trial) -> dict[tuple[int, int], int]:
    """Micro-batches that devices were asked for, by stage and device, from their own queues."""
    found: dict[tuple[int, int], set[tuple[RequestKind, int]]] = {}
    for device, held in trial.fleet.devices.items():
        for order, _, _ in held.orders:
            assert isinstance(order, StageOrder)
            if order.request.kind is not RequestKind.SUMS:
                asked = found.setdefault((order.request.stage, device), set())
                asked.add((order.request.kind, order.request.batch))
    return {place: len(asked) for place, asked in found.items()}


def check(trial: Trial) -> StepView:
    """Look at a step; what is shown must be possible, and be what devices are busy with."""
    view = trial.step.view()
    assert view.ended == trial.step.ended
    shown = {
        (number, holder.device): holder.forward + holder.backward
        for number, stage in enumerate(view.stages)
        for holder in stage.holders
    }
    assert set(trial.fleet.devices) >= {device for _, device in shown}
    if not view.ended:
        assert {place: count for place, count in shown.items() if count} == in_flight(trial)
    for stage in view.stages:
        there = sum(holder.summed + holder.coming for holder in stage.holders)
        assert stage.backward == stage.landed + there
        assert stage.landed <= stage.backward <= stage.forward <= view.batches
    # No micro-batch is further than the stage before, forward; or behind, backward.
    for before, after in pairwise(view.stages):
        if not after.loss:
            assert after.forward <= before.forward
    return view


@settings(max_examples=examples(50), deadline=None)
@given(st.data())
def test_devices_come_answer_and_vanish_in_any_order(data: st.DataObject) -> None:
    loss = data.draw(st.booleans(), "loss")
    stages = [PlannedStage(0, 1, (1, 2)), PlannedStage(1, LAYERS, (2, 3), loss=loss)]
    trial = Trial(step_work(LAYERS, BATCHES, stages), 3)
    lost, number = 0, 3
    while not trial.step.ended:
        check(trial)
        for batch in list(trial.outputs):
            trial.give(batch)
        if trial.step.ended:
            break
        here = sorted(trial.fleet.devices)
        if lost < 3 and here and data.draw(st.integers(0, 9), "what") == 0:
            lost += 1
            trial.lose(data.draw(st.sampled_from(here), "who"))
        elif len(here) < 2:
            number += 1
            trial.join(number)
        else:
            trial.answer(data.draw(st.sampled_from(sorted(trial.fleet.waiting)), "answers"))
    view = check(trial)
    assert isinstance(trial.fleet.told[-1], StepResult)
    assert [stage.landed for stage in view.stages] == [BATCHES, BATCHES]
    assert (view.repeated > 0) <= (lost > 0)


def test_the_last_step_is_shown_until_devices_forget_it() -> None:
    manager = server(1)
    come(manager, 1)
    assert manager.stages.view() is None
    work = step_work(2, 2, [PlannedStage(0, 2, (1,), loss=True)])
    manager.begin_step(work, 1.0)
    view = manager.stages.view()
    assert view is not None
    assert not view.ended
    assert [h.device for h in view.stages[0].holders] == [1]
    manager.closed(1, "it vanished", 2.0)
    view = manager.stages.view()
    assert view is not None
    assert view.stages[0].holders == ()
    assert view.repeated > 0
    again = manager.stages.repeated
    assert again == view.repeated
    manager.end_steps(3.0)
    assert manager.stages.view() is None
    assert manager.stages.repeated == again
    come(manager, 1)
    manager.begin_step(replace(work, stages=[PlannedStage(0, 2, (1,), loss=True)]), 4.0)
    assert manager.stages.repeated == again  # of all steps


def test_sums_that_are_lost_count_as_passes_to_be_done_again() -> None:
    trial = Trial(step_work(LAYERS, BATCHES, [PlannedStage(0, LAYERS, (1,), loss=True)]), 2)
    while trial.step.view().stages[0].backward < 2:
        trial.answer(1)
    in_hand = sum(in_flight(trial).values())
    trial.lose(1)
    assert trial.step.view().repeated == 2 + in_hand
    assert trial.step.view().stages[0].backward == 0
