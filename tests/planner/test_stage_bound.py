"""What is not simulated, or not to its end, would not have been chosen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cleave.errors import PlanError
from cleave.planner import stage_search
from cleave.planner.least_step import least_step_s
from cleave.planner.micro_batches import plan_batch
from cleave.planner.plan import DeviceRates
from cleave.planner.stage_bound import StepBound
from cleave.planner.stage_estimate import StageTables
from cleave.planner.stage_events import StageSimulation
from cleave.planner.stage_prediction import predict
from cleave.planner.stage_search import plan_stages, plan_stages_within
from cleave.planner.stages import PlannedStage, PsCompute, StageModel, StagePlan
from tests.planner.test_stage_search import (
    all_stages,
    few,
    fleets,
    large_head,
    models,
    planned,
    servers,
    slices_on,
)


def check_bound(
    model: StageModel, plan: StagePlan, fleet: Sequence[DeviceRates], ps: PsCompute
) -> None:
    """See that a simulation is not ended by a bound before its time, and that it is after that."""

    def run() -> StageSimulation:
        by_id = {device.device: device for device in fleet}
        return StageSimulation(model, plan.stages, plan.kept_batches, by_id, ps, plan.slices)

    end_s = run().end_s()
    again = run()
    bound = StepBound(again)
    assert bound.may_end_by(end_s)
    assert again.end_s(end_s, lambda now_s: bound.may_end_by(end_s, now_s)) == end_s
    assert run().end_s(0.99 * end_s) == math.inf
    assert not StepBound(run()).may_end_by(0.0)


@few
@given(st.data(), models(4), fleets(4), servers)
def test_a_step_does_not_end_before_its_bound(
    data: st.DataObject, model: StageModel, fleet: list[DeviceRates], ps: PsCompute
) -> None:
    devices = {device.device: device for device in fleet}
    stages = data.draw(st.sampled_from(list(all_stages(len(model.layers), sorted(devices)))))
    assume({stage.stop for stage in stages} >= set(model.cuts))
    loss = data.draw(st.booleans()) and not model.ends_at_ps
    last = PlannedStage(stages[-1].first, stages[-1].stop, stages[-1].devices, loss)
    try:
        plan = predict(model, (*stages[:-1], last), devices, ps)
    except PlanError:
        return  # too little memory for these stages
    check_bound(model, plan, fleet, ps)


@few
@given(st.data(), servers)
def test_nor_does_one_with_slices(data: st.DataObject, ps: PsCompute) -> None:
    model, fleet, _ = large_head()
    rates = st.sampled_from([1e7, 1e8])
    fleet = [
        replace(
            device,
            downlink_bytes_per_s=data.draw(rates),
            uplink_bytes_per_s=data.draw(rates),
            memory_bytes=2**32,
        )
        for device in fleet
    ]
    stages = PlannedStage(0, 1, (0, 1)), PlannedStage(1, 4, (2, 3, 4))
    slices = slices_on([(5, 6), (7, 8)], 4)
    plan = predict(model, stages, {device.device: device for device in fleet}, ps, slices)
    check_bound(model, plan, fleet, ps)


@few
@given(models(), fleets(), servers)
def test_no_step_is_shorter_than_the_least(
    model: StageModel, fleet: list[DeviceRates], ps: PsCompute
) -> None:
    plan = planned(model, fleet, ps)
    if plan is not None:
        assert least_step_s(StageTables(model), fleet, ps) <= plan.step_s


@few
@given(models(), fleets(20, memory=(26, 29)), servers, st.sampled_from([30, 300]))
def test_a_limit_changes_nothing_but_what_is_beyond_it(
    model: StageModel, fleet: list[DeviceRates], ps: PsCompute, units: int
) -> None:
    def without_limit(
        model: StageModel,
        stages: Sequence[PlannedStage],
        devices_by_id: Mapping[int, DeviceRates],
        ps: PsCompute,
        slices: Sequence[PlannedStage],
        limit_s: float,
    ) -> StagePlan | None:
        return predict(model, stages, devices_by_id, ps, slices)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(stage_search, "_MOST_UNITS", units)  # so few that no changes are simulated
        plan = planned(model, fleet, ps)
        if plan is None:
            return
        for share in (1.0, 1.3):
            assert plan_stages_within(model, fleet, ps, share * plan.step_s) == plan
        assert plan_stages_within(model, fleet, ps, 0.99 * plan.step_s) is None
        patched.setattr(stage_search, "predict_within", without_limit)
        assert plan_stages(model, fleet, ps) == plan


@few
@given(models(4), fleets(20, memory=(27, 29)), servers)
def test_batches_are_cut_alike_with_limits(
    model: StageModel, fleet: list[DeviceRates], ps: PsCompute
) -> None:
    def cut(parts: int) -> StageModel:
        tokens = [model.tokens[0] // parts] * parts
        return StageModel(model.layers, model.loss, model.width, model.element_bytes, tokens)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(stage_search, "_MOST_UNITS", 300)  # a search that takes a tenth as long
        try:
            found = plan_batch(plan_stages, cut, 16, fleet, ps)
        except PlanError:
            return
        assert plan_batch(plan_stages, cut, 16, fleet, ps, within=plan_stages_within) == found
