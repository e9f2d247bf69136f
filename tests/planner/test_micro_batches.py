"""Into how many micro-batches a batch is cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.errors import DeviceMemoryError, PlanError
from cleave.planner.forecast import micro_batch_counts, plan_batch
from cleave.planner.plan import DeviceRates
from cleave.planner.stages.model import LayerCost, PlannedStage, PsCompute, StageModel, StagePlan

PS = PsCompute(1e9, 0.0)
LAYER = LayerCost(0, 1, 1, 2, 6.0, 2.0, 1.0)


@given(st.integers(1, 10_000), st.integers(1, 10_000))
def test_a_batch_is_cut_into_its_sequences_at_most(rows: int, devices: int) -> None:
    counts = micro_batch_counts(rows, devices)
    assert counts == sorted(set(counts))
    assert all(1 <= count <= rows for count in counts)


def batch(parts: int) -> StageModel:
    return StageModel([LAYER], LAYER, 8, 2, [1] * parts)


def test_the_best_cut_of_a_batch_is_taken() -> None:
    seconds = {1: 4.0, 4: 3.0, 8: 1.0, 64: 2.0}

    def planner(model: StageModel, devices: Sequence[DeviceRates], ps: PsCompute) -> StagePlan:
        step_s = seconds[len(model.tokens)]
        return StagePlan((PlannedStage(0, 1, (0,)),), {}, step_s, {}, 0, 0)

    model, plan = plan_batch(planner, batch, 64, [DeviceRates(0, 1, 1, 1)], PS)
    assert (len(model.tokens), plan.step_s) == (8, 1.0)


def test_layers_in_parts_are_planned_where_whole_ones_find_too_little_memory() -> None:
    def only_parts(model: StageModel, devices: Sequence[DeviceRates], ps: PsCompute) -> StagePlan:
        if not model.in_parts:
            raise DeviceMemoryError("a layer needs more than they offer")
        return StagePlan((PlannedStage(0, 1, (0,)),), {}, 1.0, {}, 0, 0)

    def in_parts(count: int) -> StageModel:
        return replace(batch(count), in_parts=True)

    devices = [DeviceRates(0, 1, 1, 1)]
    assert plan_batch(only_parts, batch, 8, devices, PS, in_parts)[0].in_parts
    with pytest.raises(DeviceMemoryError, match="more than they offer"):
        plan_batch(only_parts, batch, 8, devices, PS)


def test_a_cut_that_does_not_fit_is_passed_over_and_the_last_reason_is_given() -> None:
    def only_large(model: StageModel, devices: Sequence[DeviceRates], ps: PsCompute) -> StagePlan:
        if len(model.tokens) < 64:
            raise PlanError(f"{len(model.tokens)} micro-batches are too few")
        return StagePlan((PlannedStage(0, 1, (0,)),), {}, 1.0, {}, 0, 0)

    devices = [DeviceRates(0, 1, 1, 1)]
    assert len(plan_batch(only_large, batch, 64, devices, PS)[0].tokens) == 64
    with pytest.raises(PlanError, match="16 micro-batches are too few"):
        plan_batch(only_large, batch, 16, devices, PS)
