"""`cleave-stages` is what the planner says; what a lost device costs, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cleave.planner.forecast import plan_batch
from cleave.planner.plan import PsRates
from cleave.planner.stages.model import LayerCost, PlannedStage, PsCompute, StageModel, StagePlan
from cleave.planner.stages.search import plan_stages
from cleave.workload.registry import find_model
from cleave.workload.stages import StageSizes, cut_batch
from simulator.cleave_methods import recoveries
from simulator.method import Conditions, Outcome
from simulator.sweep import methods
from simulator.work import train_flops
from tests.simulator.conditions import alike, paper

SPEC = find_model("opt-125m")


def on(conditions: Conditions) -> Outcome:
    (row,) = methods()["cleave-stages"].outcomes(conditions)
    return row


def small(**changed: float) -> Conditions:
    return Conditions(SPEC, 16, 128, alike(6, **changed))


@pytest.fixture(scope="module")
def on_small() -> Outcome:
    return on(small())


@pytest.mark.slow
def test_a_step_takes_what_the_planner_predicts(on_small: Outcome) -> None:
    conditions = small()
    row, sizes = on_small, StageSizes(SPEC, 128)
    ps = PsCompute(conditions.ps_flops_per_s, 0.0, PsRates())

    def cut(parts: int) -> StageModel:
        return sizes.costs(cut_batch(16, 128, parts))

    model, plan = plan_batch(plan_stages, cut, 16, conditions.devices, ps)
    assert row.step_s == plan.step_s
    assert row.devices_used == len(plan.memory_bytes)
    assert row.download_bytes * row.devices_used == pytest.approx(plan.downlink_bytes)
    assert row.upload_bytes * row.devices_used == pytest.approx(plan.uplink_bytes)
    assert row.memory_needed_bytes == max(plan.memory_bytes.values())
    assert row.fits
    assert f"{len(plan.stages)} stages, {len(model.tokens)} micro-batches" in row.setting


@pytest.mark.slow
def test_the_forward_pass_is_counted_twice_and_the_loss_where_it_is() -> None:
    alone = replace(small(memory=1e12), ps_flops_per_s=1.0)  # the loss goes to a device
    row = on(alone)
    assert "loss in 2 slices" in row.setting  # logits are computed twice, too
    assert row.flops == pytest.approx(4 / 3 * train_flops(SPEC, 16, 128))


def test_too_little_memory_is_said_as_training_says_it() -> None:
    row = on(paper(32))
    assert not row.fits
    assert "the layers need" in row.misfit  # in parts, for a whole one fits no device
    assert "connect more devices" in row.misfit


@pytest.mark.nightly
@pytest.mark.slow
def test_layers_are_computed_in_fp32(on_small: Outcome) -> None:
    slow = [replace(device, flops_per_s=1e10) for device in alike(6)]
    conditions = small()
    assert on(replace(conditions, fp32_devices=slow)).step_s > on_small.step_s
    expected = on(Conditions(SPEC, 16, 128, slow)).step_s
    assert on(replace(conditions, fp32_devices=slow)).step_s == expected


def test_a_loss_by_hand() -> None:
    layer = LayerCost(30, 20, 20, 40, 12.0, 4.0, 1.0)
    model = StageModel([layer, layer], layer, 8, 2, [100, 100])
    devices = {d.device: d for d in alike(3, down=1000.0, up=100.0, flops=1.0)}

    def lost(*numbers: int) -> list[tuple[float, float]]:
        stages = (PlannedStage(0, 2, numbers),)
        return list(recoveries(model, StagePlan(stages, {}, 1.0, {}, 0, 0), devices))

    # Two layers of 12 FLOPs a token on two devices, which do 100 tokens each: 50 are done again.
    assert lost(0, 1) == [(0.0, 1200.0)] * 2
    # One device has done half of 200 tokens; another is sent 100 bytes of weights at 1000 a second.
    assert lost(2) == [(0.1, 2400.0)]
    # Three devices: a third of 200 tokens, half of them, shared by the two others.
    assert [again_s for _, again_s in lost(0, 1, 2)] == pytest.approx([24 * 200 / 12] * 3)
