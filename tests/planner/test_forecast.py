"""Methods side by side: bytes, memory, the choice; and where stages begin to win."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave.errors import DeviceMemoryError, PlanError
from cleave.gemm import Gemm
from cleave.planner.forecast import (
    CLOSE,
    CrossingPoint,
    Forecast,
    MethodChoice,
    StepForecaster,
    crossing,
    kept_by_server,
    micro_batch_counts,
    most_points,
    plan_batch,
    refused,
)
from cleave.planner.plan import DeviceRates, ElementBytes, GemmKind, Method, PsRates, StepGemm
from cleave.planner.stages.model import LayerCost, PlannedStage, PsCompute, StageModel, StagePlan
from cleave.planner.tiles.planner import TilePlanner
from cleave.planner.tiles.report import StepReport, plan_step
from tests.examples import examples

SECONDS = st.floats(0, 1e6)
LAYER = LayerCost(0, 20, 20, 40, 12e6, 4e6, 1.0)
LOSS = LayerCost(0, 6, 6, 12, 6e6, 2e6, 10.0)
PS = PsCompute(1e9, 0.0, PsRates())
DEVICES = [DeviceRates(n, 1e8, 1e8, 1e10, 0.001, 10**9) for n in range(3)]


def cut(parts: int) -> StageModel:
    return StageModel([LAYER] * 4, LOSS, 8, 2, [64 // parts] * parts)


FORECASTER = StepForecaster(cut, 16, PS, 1000, 5)


def gemms(*sides: tuple[int, int, int]) -> list[StepGemm]:
    return [StepGemm(GemmKind.FORWARD, Gemm(*each), 2, "some") for each in sides]


def test_the_server_alone_computes_no_forward_pass_twice() -> None:
    found = FORECASTER.alone()
    assert found.step_s == pytest.approx(64 * (4 * 8e6 + 6e6) / 1e9)
    assert found.server_bytes == 1000 + 64 * (5 + 10)
    assert found.downlink_bytes == found.uplink_bytes == found.device_bytes == 0


def test_stages_need_what_their_plan_says() -> None:
    found = FORECASTER.by_stages(DEVICES)
    assert found.stages is not None
    model, plan = found.stages
    assert (found.step_s, found.bottleneck) == (plan.step_s, plan.reason)
    assert (found.downlink_bytes, found.uplink_bytes) == (plan.downlink_bytes, plan.uplink_bytes)
    assert found.device_bytes == max(plan.memory_bytes.values())
    assert found.server_bytes == 1000 + kept_by_server(model, plan)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("speed", "device_speed", "count", "loss_flops", "worthwhile"),
    [
        (1e9, 1e9, 3, 6e5, True),
        (1e9, 1e9, 3, 6e6, False),  # the server has the loss to compute
        (1e9, 1e9, 65, 6e5, False),  # one of many devices
        (1e7, 1e9, 3, 6e5, False),  # a slow server
        (1e12, 1e12, 3, 6e5, False),  # a step that takes no second
    ],
)
def test_the_servers_computer_is_a_device_where_that_is_worthwhile(
    speed: float, device_speed: float, count: int, loss_flops: float, worthwhile: bool
) -> None:
    def large(parts: int) -> StageModel:
        loss = replace(LOSS, flops=loss_flops, forward_flops=loss_flops / 3)
        return StageModel([LAYER] * 4, loss, 8, 2, [6400 // parts] * parts)

    forecaster = StepForecaster(large, 64, replace(PS, flops_per_s=speed))
    devices = [DeviceRates(n, 1e8, 1e8, device_speed, 0.001, 10**9) for n in range(count)]
    stages = forecaster.by_stages(devices).stages
    assert stages is not None
    found = forecaster.with_own_device(devices, stages, 10**9)
    assert (found is not None) == worthwhile
    assert found is None or found <= 0.95 * stages[1].step_s
    assert forecaster.with_own_device(devices, stages, 0) is None  # it has no memory


@pytest.mark.parametrize("loss", [False, True])
def test_the_server_keeps_what_goes_in_and_gradients_of_every_device(*, loss: bool) -> None:
    stages = PlannedStage(0, 3, (0, 1)), PlannedStage(3, 4, (2,), loss)
    plan = StagePlan(stages, {}, 1.0, {}, 0, 0)
    activations, gradients = 64 * 8 * 2, 2 * 3 * 20 + 20
    outside = 6 if loss else 2 * activations + 4 * 10  # of a micro-batch of four tokens
    assert kept_by_server(cut(16), plan) == 4 * activations + gradients + outside


def test_tiles_send_out_what_is_sooner_there() -> None:
    # The first is large enough to be worth its bytes, the second takes the server a microsecond.
    counted = gemms((2048, 2048, 2048), (8, 8, 8))
    step = plan_step(TilePlanner(PsRates()), counted, ElementBytes(2, 2), DEVICES, PsRates())
    found = FORECASTER.by_tiles(step, counted)
    large = step.reports[0]
    assert found.downlink_bytes == 2 * large.plan.egress_bytes
    assert found.uplink_bytes == 2 * large.plan.ingress_bytes
    assert found.device_bytes == large.memory_bytes
    # The server alone takes no longer for the whole batch than for these: nothing else is left.
    assert found.step_s == pytest.approx(2 * large.predicted_s + 2 * 2 * 8**3 / 1e9)
    assert "of the 2 of 4 multiplications that" in found.bottleneck
    alone = FORECASTER.by_tiles(StepReport((large,), step.counts[:1]), counted[:1])
    assert alone.bottleneck.endswith("of the 2 multiplications that devices compute")


def forecasts(*seconds: float) -> list[Forecast]:
    methods = (Method.STAGES, Method.TILES, Method.LOCAL)
    return [Forecast(m, s) for m, s in zip(methods, seconds, strict=True)]


@given(SECONDS, SECONDS, SECONDS)
def test_the_shortest_step_is_chosen(stages_s: float, tiles_s: float, local_s: float) -> None:
    found = MethodChoice(Method.AUTO, forecasts(stages_s, tiles_s, local_s))
    assert found.chosen.step_s == min(stages_s, tiles_s, local_s)


def test_of_equally_fast_methods_the_one_with_least_traffic_is_chosen() -> None:
    for seconds, method in (
        ((1.0, 1.0, 1.0), Method.LOCAL),
        ((1.0, 1.0, 2.0), Method.STAGES),
        ((float("inf"), float("inf"), 2.0), Method.LOCAL),
    ):
        assert MethodChoice(Method.AUTO, forecasts(*seconds)).chosen.method is method


@settings(max_examples=examples(30))
@given(st.floats(1e6, 1e11), st.floats(1e5, 1e9), st.integers(1, 3))
def test_tiles_never_take_longer_than_the_server_alone(
    flops_per_s: float, link: float, devices: int
) -> None:
    rates = [replace(d, downlink_bytes_per_s=link) for d in DEVICES[:devices]]
    counted = gemms((256, 256, 256), (8, 8, 8), (512, 64, 128))
    step = plan_step(TilePlanner(PsRates()), counted, ElementBytes(2, 2), rates, PsRates())
    forecaster = replace(FORECASTER, ps=PsCompute(flops_per_s, 0.0))
    products_s = sum(each.count * each.gemm.flops for each in counted) / flops_per_s
    alone_s = forecaster.alone().step_s
    assert forecaster.by_tiles(step, counted).step_s <= max(alone_s, products_s) * (1 + 1e-9)


def test_what_is_refused_is_never_chosen() -> None:
    local = Forecast(Method.LOCAL, 1e9)
    found = MethodChoice(Method.AUTO, [refused(Method.STAGES, "no memory"), local])
    assert found.chosen is local
    assert found.why == "Using the server alone: no other method is possible."
    asked = replace(found, asked=Method.STAGES)
    with pytest.raises(PlanError, match="--method stages is refused: no memory"):
        _ = asked.chosen


# --- the crossing ---


def from_rows(first: int) -> Sequence[CrossingPoint]:
    return [CrossingPoint(rows, 1.0 if rows >= first else 3.0, 2.0) for rows in range(2000)]


@given(st.integers(1, 1500), st.integers(1, 1500))
def test_the_crossing_is_between_batches_that_are_close(first: int, most: int) -> None:
    points, tried = from_rows(first), list[CrossingPoint]()
    found = crossing(lambda rows: points[rows], most, tried.append)
    assert sorted(found.points, key=lambda p: p.rows) == list(found.points)
    assert len(tried) == len(found.points) <= most_points(most)
    if first > most:
        assert found.above is None
        assert found.below == points[most]
        return
    assert found.above is not None
    assert found.above.wins
    assert found.above.rows >= first
    below = found.below.rows if found.below is not None else 0
    assert below < first
    assert found.above.rows - below <= 1 or found.above.rows <= CLOSE * below


# --- micro-batches ---


@given(st.integers(1, 10_000), st.integers(1, 10_000))
def test_a_batch_is_cut_into_its_sequences_at_most(rows: int, devices: int) -> None:
    counts = micro_batch_counts(rows, devices)
    assert counts == sorted(set(counts))
    assert all(1 <= count <= rows for count in counts)


def test_the_best_cut_of_a_batch_is_taken() -> None:
    seconds = {1: 4.0, 4: 3.0, 8: 1.0, 64: 2.0}

    def planner(model: StageModel, devices: Sequence[DeviceRates], ps: PsCompute) -> StagePlan:
        step_s = seconds[len(model.tokens)]
        return StagePlan((PlannedStage(0, 1, (0,)),), {}, step_s, {}, 0, 0)

    model, plan = plan_batch(planner, cut, 64, DEVICES[:1], PS)
    assert (len(model.tokens), plan.step_s) == (8, 1.0)


def test_layers_in_parts_are_planned_where_whole_ones_find_too_little_memory() -> None:
    def only_parts(model: StageModel, devices: Sequence[DeviceRates], ps: PsCompute) -> StagePlan:
        if not model.in_parts:
            raise DeviceMemoryError("a layer needs more than they offer")
        return StagePlan((PlannedStage(0, 1, (0,)),), {}, 1.0, {}, 0, 0)

    def in_parts(count: int) -> StageModel:
        return replace(cut(count), in_parts=True)

    assert plan_batch(only_parts, cut, 8, DEVICES[:1], PS, in_parts)[0].in_parts
    with pytest.raises(DeviceMemoryError, match="more than they offer"):
        plan_batch(only_parts, cut, 8, DEVICES[:1], PS)


def test_a_cut_that_does_not_fit_is_passed_over_and_the_last_reason_is_given() -> None:
    def only_large(model: StageModel, devices: Sequence[DeviceRates], ps: PsCompute) -> StagePlan:
        if len(model.tokens) < 64:
            raise PlanError(f"{len(model.tokens)} micro-batches are too few")
        return StagePlan((PlannedStage(0, 1, (0,)),), {}, 1.0, {}, 0, 0)

    assert len(plan_batch(only_large, cut, 64, DEVICES[:1], PS)[0].tokens) == 64
    with pytest.raises(PlanError, match="16 micro-batches are too few"):
        plan_batch(only_large, cut, 16, DEVICES[:1], PS)
