"""Plans of stages whose state stays on devices: each layer on one device that has room for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave.errors import DeviceMemoryError
from cleave.planner.plan import DeviceRates
from cleave.planner.stages.model import PlannedStage, PsCompute, StageModel
from cleave.planner.stages.prediction import held_bytes, predict
from cleave.planner.stages.resident import (
    kept_on_devices,
    plan_resident,
    protection,
    worth_moving,
)
from cleave.planner.stages.search import plan_stages
from cleave.planner.stages.snapshots import most_copies
from cleave.workload.registry import find_model
from cleave.workload.stages import StageSizes
from tests.examples import examples
from tests.planner.test_stage_search import check_right, fleets, models

PS = PsCompute(3e11, 0.1)


def home(devices: int, memory_bytes: int = 8 * 10**9) -> list[DeviceRates]:
    """Computers behind 100/20 Mbit/s."""
    return [
        DeviceRates(n, 100e6 / 8, 20e6 / 8, 2e11, memory_bytes=memory_bytes) for n in range(devices)
    ]


def cut(tokens: int, parts: int = 4) -> StageModel:
    sizes = StageSizes(find_model("opt-125m"), 512, 4, 4)
    return sizes.forecaster(tokens // 512, PS).cut(parts)


@settings(max_examples=examples(60), deadline=None)
@given(models(), fleets(), st.booleans())
def test_each_layer_is_on_one_device(
    model: StageModel, fleet: Sequence[DeviceRates], head: bool
) -> None:
    kept = kept_on_devices(model, head=head and not model.ps_layers)
    head = kept.resident_head
    try:
        plan = plan_resident(kept, fleet, PS)
    except DeviceMemoryError:
        return
    check_right(plan, kept, fleet)
    assert all(len(stage.devices) == 1 for stage in plan.stages)
    assert plan.stages[-1].loss == head
    assert not any(stage.loss for stage in plan.stages[:-1])
    assert len({stage.devices for stage in plan.stages}) == len(plan.stages)
    assert not plan.slices


def test_neither_weights_nor_gradients_count() -> None:
    model, devices = cut(1024, 2), home(4)
    resident = plan_resident(kept_on_devices(model), devices, PS)
    usual = plan_stages(model, devices, PS)
    assert resident.uplink_bytes + resident.downlink_bytes < 0.1 * (
        usual.uplink_bytes + usual.downlink_bytes
    )
    assert resident.step_s < 0.5 * usual.step_s


def test_little_memory_needs_more_devices() -> None:
    model = kept_on_devices(cut(1024, 2))
    plan = plan_resident(model, home(6, 10**9), PS)
    assert len(plan.stages) > len(plan_resident(model, home(1), PS).stages) == 1
    with pytest.raises(DeviceMemoryError, match="of which 2 can hold a layer"):
        plan_resident(model, home(2, 10**9), PS)


def test_state_moves_only_if_that_pays_within_some_steps() -> None:
    model, devices = kept_on_devices(cut(1024, 2)), {d.device: d for d in home(4)}
    plan = plan_resident(model, [*devices.values()], PS)
    layers = {n: stage.stop - stage.first for stage in plan.stages for n in stage.devices}
    state_bytes = 12 * max(layers.values()) * model.layers[0].sum_bytes / 4
    moved = [replace(s, devices=(s.devices[0] + 10,)) for s in plan.stages]
    devices |= {d + 10: replace(one, device=d + 10) for d, one in devices.items()}
    seconds = state_bytes / (20e6 / 8) + state_bytes / (100e6 / 8)
    for saved_s, pays in ((seconds / 21, False), (seconds / 19, True)):
        slow = replace(plan, step_s=plan.step_s + saved_s)
        assert worth_moving(model, slow, replace(plan, stages=tuple(moved)), devices) == pays
        there = replace(plan, step_s=plan.step_s + seconds)
        assert worth_moving(model, there, plan, devices)  # each device returns its state only


def test_a_device_with_too_little_memory_for_a_layer_has_none() -> None:
    model = kept_on_devices(cut(1024, 2))
    fast, *others = home(4)
    small = replace(fast, flops_per_s=10 * fast.flops_per_s, graph_flops_per_s=0, memory_bytes=1000)
    plan = plan_resident(model, [small, *others], PS)
    assert plan.devices <= {device.device for device in others}
    sizes = StageSizes(find_model("opt-125m"), 512, 4, 4)
    found = sizes.forecaster(2, PS).with_state_on_devices([small, *others])
    assert "1 device has too little memory for even one layer" in found.bottleneck


def test_snapshots_are_rarer_where_they_are_dear_and_devices_stay() -> None:
    model, devices = kept_on_devices(cut(8192)), home(4)
    plan = plan_resident(model, devices, PS)
    rates = {device.device: device for device in devices}
    often = protection(model, plan, rates, 600.0, 600.0).interval
    assert often <= protection(model, plan, rates, 6e5, 6e5).interval
    slow = {d: replace(one, uplink_bytes_per_s=1e6) for d, one in rates.items()}
    assert often <= protection(model, plan, slow, 600.0, 600.0).interval


def test_hot_spares_add_more_than_a_tenth_to_the_traffic_only_where_devices_leave_often() -> None:
    model, devices = kept_on_devices(cut(8192)), home(4)
    plan = plan_resident(model, devices, PS)
    rates = {device.device: device for device in devices}
    stages = len(plan.stages)
    copies = [protection(model, plan, rates, 600.0, s).copies for s in (60.0, 600.0, 1e6, math.inf)]
    assert (copies[0], copies[-1]) == (stages, 0)
    assert copies == sorted(copies, reverse=True)


@given(st.integers(1, 50), st.floats(0, 1), st.floats(0, 10))
def test_snapshots_and_hot_spares_share_a_tenth(
    stages: int, snapshots: float, saved: float
) -> None:
    copies = most_copies(stages, snapshots, saved)
    assert 0 <= copies <= stages
    if saved <= 0.5 and copies:  # a stage has four activations per step, and its hot spare two
        assert snapshots + 2 * copies / (4 * stages) <= 0.1 + 1e-9


def test_a_step_ends_with_the_updates_of_the_devices() -> None:
    (device,) = home(1)
    device = replace(device, latency_s=0.5)
    model = kept_on_devices(cut(1024, 2))
    stages = [PlannedStage(0, len(model.layers), (0,))]
    without = replace(model, layers=[replace(each, update_flops=0.0) for each in model.layers])
    updates_s = sum(each.update_flops for each in model.layers) / device.flops_per_s
    assert updates_s > 0.1
    found, before = (predict(each, stages, {0: device}, PS).step_s for each in (model, without))
    assert found == pytest.approx(before + updates_s + 4 * 0.5)  # two requests


def test_what_devices_update_is_no_work_of_the_server() -> None:
    sizes = StageSizes(find_model("opt-125m"), 512, 4, 4)
    forecaster = sizes.forecaster(2, sizes.server(3e11))
    at_server = replace(forecaster, cut=lambda n: replace(forecaster.cut(n), head_may_move=False))
    (layer, *_), parameters = cut(1024, 2).layers, sizes.trained_parameters
    inside = 12 * layer.sum_bytes / 4
    slow = replace(forecaster.ps, optimizer_s=50.0, parameter_s=50.0 / parameters)
    fast_s = at_server.with_state_on_devices(home(4)).step_s
    slow_s = replace(at_server, ps=slow).with_state_on_devices(home(4)).step_s
    outside_s = 50.0 * (parameters - inside) / parameters
    assert slow_s - fast_s == pytest.approx(outside_s, abs=0.1)
    # All parameters after the last layer, and the embedding, are then on a device.
    head = replace(forecaster, ps=slow).with_state_on_devices(home(4))
    assert head.step_s < slow_s / 2


def test_a_device_has_the_head_if_that_is_faster() -> None:
    """A slow server leaves it to a device, which then has fewer layers. A fast one computes it."""
    sizes = StageSizes(find_model("opt-125m"), 512, 4, 4)
    for server, on_device in ((2e10, True), (3e12, False)):
        found = sizes.forecaster(8, sizes.server(server)).with_state_on_devices(home(6))
        assert found.stages is not None
        model, plan = found.stages
        assert (plan.stages[-1].loss, model.resident_head) == (on_device, on_device)
        assert [n for s in plan.stages for n in range(s.first, s.stop)] == [*range(12)]
    alone = sizes.forecaster(8, sizes.server(2e10))
    before = replace(alone, cut=lambda n: replace(alone.cut(n), head_may_move=False))
    slow, fast = (each.with_state_on_devices(home(6)) for each in (before, alone))
    assert fast.step_s < slow.step_s
    assert fast.server_bytes < slow.server_bytes


@pytest.mark.parametrize(
    ("uplink_bytes_per_s", "steps", "on_device"),
    [(4e6, 10, False), (4e6, 1000, True), (1e6, 1000, False)],
)
def test_the_head_stays_where_its_state_takes_long_to_return(
    uplink_bytes_per_s: float, steps: int, on_device: bool
) -> None:
    """Only one device has the memory. A longer fetch must pay until the next one."""
    sizes = StageSizes(find_model("opt-125m"), 512, 4, 4)
    forecaster = sizes.forecaster(8, sizes.server(1.2e11))
    small = [replace(d, uplink_bytes_per_s=1.25e7, memory_bytes=9 * 10**8) for d in home(8)]
    large = DeviceRates(8, 1.25e8, uplink_bytes_per_s, 4e11, memory_bytes=18 * 10**8)
    found = forecaster.with_state_on_devices([*small, large], fetch_steps=steps)
    assert found.stages is not None
    assert found.stages[0].resident_head == on_device


def test_the_head_needs_memory_for_its_state() -> None:
    """Weights, two moments, their snapshot and the gradient, all in fp32."""
    model = kept_on_devices(cut(1024, 2), head=True)
    least = 7 * model.loss.sum_bytes
    small = [replace(device, memory_bytes=least // 2) for device in home(6)]
    with pytest.raises(DeviceMemoryError, match="the LM head and 12 layers"):
        plan_resident(model, small, PS)
    large = replace(small[3], memory_bytes=8 * 10**9)
    plan = plan_resident(model, [*small[:3], large, *small[4:]], PS)
    assert plan.stages[-1].devices == (3,)
    assert plan.stages[-1].loss
    assert plan.memory_bytes[3] > least


def test_a_device_with_a_tied_head_also_sends_the_first_inputs() -> None:
    """And it gets their gradients. That is one more activation in each direction."""
    model = kept_on_devices(cut(1024, 2), head=True)
    stages = [PlannedStage(0, 12, (0,)), PlannedStage(12, 12, (1,), loss=True)]
    devices = {device.device: device for device in home(2)}
    plans = [predict(replace(model, tied=tied), stages, devices, PS) for tied in (True, False)]
    tied, untied = plans
    activations = 1024 * model.width * model.element_bytes
    assert tied.uplink_bytes - untied.uplink_bytes == pytest.approx(activations, rel=0.2)
    assert tied.downlink_bytes - untied.downlink_bytes == pytest.approx(activations, rel=0.2)
    assert tied.step_s > untied.step_s


def test_an_update_of_the_lm_head_needs_memory() -> None:
    """Weights, moments, their snapshot, the gradient, and the new weights and moments."""
    model = cut(512, 1)
    few = replace(model, tokens=[1])
    kept = kept_on_devices(few, head=True)
    layers = len(kept.layers)
    head = held_bytes(kept, PlannedStage(layers, layers, (0,), loss=True))
    assert head > 10 * model.loss.largest_bytes
    positions = 4 * 2048 * 768
    assert kept.loss.sum_bytes > model.loss.sum_bytes + positions
    assert kept_on_devices(few).loss == model.loss
