"""Stages that are planned: right on any fleet, fast where it is known what is fast."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, combinations, count, pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cleave import graph_names as names
from cleave.errors import DeviceMemoryError, PlanError
from cleave.planner.plan import DeviceRates, PsRates
from cleave.planner.stages.estimate import StageTables
from cleave.planner.stages.groupings import groupings
from cleave.planner.stages.loss_slices import _levelled
from cleave.planner.stages.model import (
    HeadSlice,
    LayerCost,
    PlannedStage,
    PsCompute,
    PsLayers,
    StageModel,
    StagePlan,
)
from cleave.planner.stages.prediction import (
    held_by_device,
    held_bytes,
    predict,
    worth_changing,
)
from cleave.planner.stages.search import interleaved, plan_stages
from cleave.planner.stages.simulated import PIECE_BYTES
from cleave.planner.stages.simulation import StageSimulation
from cleave.protocol import messages
from cleave.protocol.messages import Message
from cleave.scheduler.instructions import ForSteps, SendStage, TellStep
from cleave.scheduler.stages import step as stage_step
from cleave.scheduler.stages.arrays import StageArray
from cleave.scheduler.stages.outcomes import (
    GradientWanted,
    InputWanted,
    OutputReady,
    SlicesBack,
    SlicesReady,
    StepResult,
    Suspect,
)
from cleave.scheduler.stages.work import (
    LayerWork,
    LossWork,
    SliceWork,
    StageGraph,
    StageOrder,
    StepWork,
    SumShape,
)
from cleave.scheduler.tiles.device_memory import Names
from cleave.scheduler.tiles.tasks import Task
from cleave.workload.registry import find_model
from cleave.workload.stages import StageSizes
from tests.examples import examples

PS = PsCompute(100e9, 0.5)
OPT_LAYER = LayerCost(0, 28_350_000, 28_350_000, 28_350_000, 57e6, 14e6, 40e3)
OPT_LOSS = LayerCost(0, 154_000_000, 154_000_000, 154_000_000, 231e6, 77e6, 800e3)
OPT_125M = StageModel([OPT_LAYER] * 12, OPT_LOSS, 768, 4, [256] * 4)
HOME = [DeviceRates(n, 12.5e6, 2.5e6, 50e9, 0.01, 4 * 2**30) for n in range(4)]

few = settings(max_examples=examples(30))
same_each_time = settings(max_examples=examples(20), derandomize=True)
"""For what a search may miss in rare cases: chance must not say whether the tests pass."""

shares = st.floats(0.0, 2.0).map(lambda power: 10**power)
"""Within two orders of magnitude."""


@st.composite
def models(draw: st.DrawFn, most_layers: int = 8) -> StageModel:
    """Of layers that are alike or not, trained or mostly frozen."""

    def layer() -> LayerCost:
        trained = draw(st.sampled_from([200_000, 2_000_000, 28_000_000]))
        frozen = draw(st.sampled_from([0, 28_000_000]))
        activations = draw(st.sampled_from([(0.0, 0.0), (30e3, 12e6)]))
        pieces = draw(st.sampled_from([1, 4]))
        flops = 42e6, 14e6, 40e3
        return LayerCost(frozen, trained, trained, trained, *flops, 0, *activations, pieces=pieces)

    count, one = draw(st.integers(1, most_layers)), layer()
    layers = [one] * count if draw(st.booleans()) else [layer() for _ in range(count)]
    tokens = [draw(st.sampled_from([64, 256, 1024]))] * draw(st.integers(1, 6))
    element_bytes = draw(st.sampled_from([2, 4]))
    slices = draw(st.sampled_from([1, 1000]))
    embeds = draw(st.booleans())
    model = StageModel(layers, OPT_LOSS, 768, element_bytes, tokens, embeds, most_slices=slices)
    return draw(with_ps_layers(model)) if draw(st.integers(0, 3)) == 0 else model


@st.composite
def with_ps_layers(draw: st.DrawFn, model: StageModel) -> StageModel:
    """The same with layers that only the PS can do, maybe before the first or after the last."""
    before = draw(st.sets(st.integers(0, len(model.layers)), max_size=3))
    layers = [PsLayers(number, 14e6, 42e6) for number in sorted(before)]
    model = replace(model, ps_layers=layers)
    return replace(model, most_slices=1) if model.ends_at_ps else model


@st.composite
def fleets(draw: st.DrawFn, most: int = 5, memory: tuple[int, int] = (25, 30)) -> list[DeviceRates]:
    """Of one to `most` devices, with memory of two to the power of a number in that range."""
    return [
        DeviceRates(
            device,
            1e6 * draw(shares),
            1e6 * draw(shares),
            1e10 * draw(shares),
            draw(st.sampled_from([0.0, 0.01, 0.1])),
            int(2 ** draw(st.floats(*memory))),
        )
        for device in range(draw(st.integers(1, most)))
    ]


cards = st.sampled_from([None, PsRates(125e6, 125e6), PsRates(12e6, 12e6)])
servers = st.builds(PsCompute, shares.map(lambda share: 1e10 * share), st.just(0.1), cards)


def planned(model: StageModel, fleet: Sequence[DeviceRates], ps: PsCompute) -> StagePlan | None:
    try:
        return plan_stages(model, fleet, ps)
    except PlanError:
        return None


def check_right(plan: StagePlan, model: StageModel, fleet: Sequence[DeviceRates]) -> None:
    """Each layer is in one stage, each device in at most one slice, and all fits."""
    assert plan.stages[0].first == 0
    assert plan.stages[-1].stop == len(model.layers)
    assert all(before.stop == after.first for before, after in pairwise(plan.stages))
    assert all(stage.first < stage.stop and stage.devices for stage in plan.stages)
    assert {stage.stop for stage in plan.stages} >= set(model.cuts)
    assert plan.loss_at_ps or not model.ends_at_ps
    assert not any(stage.loss for stage in plan.stages[:-1])
    slices = [stage.slice for stage in plan.slices]
    cuts = slices[0].cuts if slices and slices[0] is not None else ()
    assert slices == [HeadSlice(number, len(slices), cuts) for number in range(len(slices))]
    assert not cuts or (cuts[0] == 0 and all(first < stop for first, stop in pairwise(cuts)))
    assert not slices or not plan.stages[-1].loss
    used = [device for part in plan.slices for device in part.devices]
    assert len(used) == len(set(used))
    offered = {device.device: device.memory_bytes for device in fleet}
    assert set(plan.memory_bytes) == plan.devices
    assert plan.memory_bytes == held_by_device(model, plan.planned, plan.kept_batches)
    for device, kept in plan.kept_batches.items():
        tasks = sum(device in stage.devices for stage in plan.planned)
        assert min(kept.inputs, kept.activations) >= 0
        assert kept.inputs + kept.activations <= tasks * len(model.tokens)
        assert plan.memory_bytes[device] <= offered[device]


@few
@given(models(), fleets(), servers)
def test_plans_are_right_in_any_order_of_devices(
    model: StageModel, fleet: list[DeviceRates], ps: PsCompute
) -> None:
    plan = planned(model, fleet, ps)
    assert planned(model, fleet[::-1], ps) == plan
    if plan is not None:
        check_right(plan, model, fleet)
        by_id = {device.device: device for device in fleet}
        again = predict(
            model, plan.stages, by_id, ps, plan.slices, forward_first=plan.forward_first
        )
        assert again == plan


def all_stages(layers: int, devices: Sequence[int]) -> Iterator[tuple[PlannedStage, ...]]:
    """Yield all cuts of the layers with all ways to give each stage devices."""
    for stages in range(1, min(layers, len(devices)) + 1):
        for inner in combinations(range(1, layers), stages - 1):
            for places in product(range(stages + 1), repeat=len(devices)):
                if set(range(stages)) <= set(places):
                    yield tuple(
                        PlannedStage(
                            first,
                            stop,
                            tuple(d for d, p in zip(devices, places, strict=True) if p == number),
                        )
                        for number, (first, stop) in enumerate(pairwise((0, *inner, layers)))
                    )


@same_each_time
@given(models(4), fleets(3), servers)
def test_small_plans_are_close_to_the_best_of_all(
    model: StageModel, fleet: list[DeviceRates], ps: PsCompute
) -> None:
    by_id = {device.device: device for device in fleet}
    best: list[float] = []
    for stages in all_stages(len(model.layers), sorted(by_id)):
        for loss in (False, True):
            tried = (*stages[:-1], replace(stages[-1], loss=loss))
            if not {stage.stop for stage in stages} >= set(model.cuts) or (
                loss and model.ends_at_ps
            ):
                continue
            try:
                best.append(predict(model, tried, by_id, ps).step_s)
            except PlanError:
                continue
    plan = planned(model, fleet, ps)
    assert (plan is None) == (not best)
    if plan is not None:
        assert min(best) * (1 - 1e-9) <= plan.step_s <= 1.05 * min(best)


# --- examples ---


def test_four_equal_devices_each_get_a_quarter() -> None:
    slow = DeviceRates(9, 0.1e6, 0.02e6, 1e9, 0.2, 4 * 2**30)
    # Layers take the speed of graphs, and a far slower device is left out.
    in_graphs = [replace(d, flops_per_s=1.0, graph_flops_per_s=d.flops_per_s) for d in HOME]
    plan = plan_stages(OPT_125M, HOME, PS)
    assert plan_stages(OPT_125M, [slow, *in_graphs], PS) == plan
    assert [(s.first, s.stop, len(s.devices)) for s in plan.stages] == [
        (0, 3, 1), (3, 6, 1), (6, 9, 1), (9, 12, 1)
    ]  # fmt: skip
    assert not plan.stages[-1].loss
    assert plan.step_s < 65
    gradients_s = 3 * 28_350_000 / 2.5e6
    assert gradients_s < plan.step_s
    assert plan.reason.startswith(
        "the gradients of 3 layers on the uplink of device 0 take 34 s of"
    )


def test_frozen_layers_on_fast_devices_go_to_every_device() -> None:
    layer = LayerCost(140_000_000, 200_000, 200_000, 200_000, 210e6, 70e6, 40e3)
    loss = LayerCost(100_000_000, 0, 0, 0, 300e6, 100e6, 800e3)
    model = StageModel([layer] * 24, loss, 2048, 2, [256] * 16, embeds=False)
    fleet = [DeviceRates(n, 125e6, 125e6, 1e12, 0.001, 32 * 2**30) for n in range(4)]
    plan = plan_stages(model, fleet, PS)
    assert plan.stages == (PlannedStage(0, 24, (0, 1, 2, 3), loss=True),)
    # Four micro-batches each, and next to nothing else.
    each_s = 4 * 256 * (24 * 210e6 + 300e6) / 1e12
    assert plan.step_s == pytest.approx(each_s + PS.optimizer_s, rel=0.05)


@pytest.mark.parametrize(
    ("frozen_bytes", "saved_s", "worth"),
    [
        (0, 5.1, True),
        (0, 4.9, False),  # hardly a gain
        (12_500_000, 5.1, True),
        (12_500_000 * 200, 19.9, False),  # two layers take 400 s
        (12_500_000 * 200, 20.1, True),
    ],
)
def test_a_change_of_plans_pays_for_the_frozen_layers_that_it_moves(
    frozen_bytes: int, saved_s: float, worth: bool
) -> None:
    layer = replace(OPT_LAYER, frozen_bytes=frozen_bytes)
    model = replace(OPT_125M, layers=[layer] * 12, loss=replace(OPT_LOSS, frozen_bytes=10**12))
    before, after = (
        StagePlan(
            (PlannedStage(0, cut, (0,)), PlannedStage(cut, 12, (1, 2), loss=True)),
            {}, step_s, {}, 0, 0,
        )
        for cut, step_s in ((6, 100.0), (8, 100.0 - saved_s))
    )  # fmt: skip
    rates = {device.device: device for device in HOME}
    assert worth_changing(model, before, after, rates) == worth
    assert worth_changing(model, after, replace(before, step_s=1.0), rates)  # to two devices


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("layers", [1, 5, 40])
def test_large_fleets(layers: int) -> None:
    model = replace(OPT_125M, layers=[OPT_LAYER] * layers, tokens=[256] * 8)
    kinds = [*HOME[:2], replace(HOME[0], uplink_bytes_per_s=30e6, flops_per_s=5e12)]
    fleet = [
        replace(kinds[n % 3], device=n, latency_s=0.001 * (n % 7), memory_bytes=10**8 * (n % 5 + 1))
        for n in range(40)
    ]
    ps = replace(PS, rates=PsRates(125e6, 125e6))
    plan = plan_stages(model, fleet, ps)
    check_right(plan, model, fleet)
    assert plan == plan_stages(model, fleet[::-1], ps)
    assert plan.step_s <= 1.02 * plan_stages(model, fleet[:16], ps).step_s


def test_parts_of_layers_go_to_devices_that_have_room_for_them() -> None:
    """Half of the devices hold an attention, the others an MLP too, and there are no more."""
    sizes = StageSizes(find_model("opt-1.3b"), 128, in_parts=True)
    model = sizes.costs([128] * 8)
    attention, mlp = (held_bytes(model, PlannedStage(n, n + 1, (0,))) for n in range(2))
    assert attention < 0.75 * mlp
    fleet = [
        replace(HOME[0], device=n, memory_bytes=round(1.02 * (mlp if n % 2 else attention)))
        for n in range(len(model.layers))
    ]
    with pytest.raises(DeviceMemoryError, match="a layer needs"):
        plan_stages(replace(sizes, in_parts=False).costs([128] * 8), fleet, PS)
    plan = plan_stages(model, fleet, PS)
    assert [(stage.first, stage.stop) for stage in plan.stages] == [
        (n, n + 1) for n in range(len(model.layers))
    ]
    for stage in plan.stages:
        assert [device % 2 for device in stage.devices] == [stage.first % 2]


def test_too_little_memory_is_said() -> None:
    with pytest.raises(PlanError, match="a layer needs 120 MB on a device, but the largest of 4"):
        plan_stages(OPT_125M, [replace(d, memory_bytes=10**7) for d in HOME], PS)
    with pytest.raises(
        PlanError, match=r"need about 7\d\d MB of memory, but do not fit on .* 600 MB"
    ):
        plan_stages(OPT_125M, [replace(d, memory_bytes=150 * 10**6) for d in HOME], PS)
    with pytest.raises(PlanError, match=r"880 MB in total, because a single layer \(or part\)"):
        plan_stages(OPT_125M, [replace(d, memory_bytes=220 * 10**6) for d in HOME], PS)
    with pytest.raises(PlanError, match="largest of 0 devices offers 0 MB"):
        plan_stages(OPT_125M, [], PS)
    with pytest.raises(PlanError, match="cannot plan a step with 12 layers and 0 micro-batches"):
        plan_stages(replace(OPT_125M, tokens=[]), HOME, PS)


def test_a_prediction_says_which_device_has_too_little_memory() -> None:
    devices = {0: HOME[0], 2: replace(HOME[2], memory_bytes=10**7)}
    with pytest.raises(PlanError, match="device 2 offers 10 MB of memory, but its layers need"):
        predict(OPT_125M, [PlannedStage(0, 12, (0, 2))], devices, PS)


def test_large_messages_are_predicted_as_soon_as_small_ones() -> None:
    """Where no card is shared: petabytes in pieces of a mebibyte would take hours."""
    fast = replace(HOME[0], downlink_bytes_per_s=1e18, uplink_bytes_per_s=1e18, memory_bytes=2**62)
    model = replace(OPT_125M, width=10**12)
    assert predict(model, [PlannedStage(0, 12, (0,))], {0: fast}, PS).step_s > 0


# --- the prediction against the scheduler ---


class TimedStep:
    """A step by the scheduler, on devices whose links and processors only take time.

    Layers have no weights: the prediction has these sent when the step begins.
    """

    def __init__(
        self,
        model: StageModel,
        plan: StagePlan,
        devices: dict[int, DeviceRates],
        ps: PsCompute,
    ) -> None:
        self._model, self._devices, self._ps = model, devices, ps
        self._free_s = {device: [0.0, 0.0, 0.0] for device in devices}
        self._ps_free_s = self.end_s = 0.0
        self._stages = plan.stages
        self._count = count()
        self._events: list[tuple[float, int, Callable[[], list[ForSteps]]]] = []
        self._step = stage_step.StageStep(self._work(plan), {}, lambda: devices, Names())
        self._carry_out(0.0, self._step.begin())
        while self._events and not self.end_s:
            now_s, _, happens = heapq.heappop(self._events)
            self._carry_out(now_s, happens())

    def _work(self, plan: StagePlan) -> StepWork:
        stages = plan.stages
        layers = []
        for layer in self._model.layers:
            sums = {"w": SumShape(1, layer.gradient_bytes // 4)}
            inputs = (names.X, names.DY, names.total("w"))
            found = (names.DX, names.new_total("w"))
            layers.append(
                LayerWork(
                    StageGraph(b"", (names.X,), (names.Y, names.activation(0))),
                    StageGraph(b"", inputs, found),
                    {},
                    sums,
                    {},
                    int(layer.forward_flops),
                    int(layer.flops - layer.forward_flops),
                    StageGraph(b"", (*inputs, names.activation(0)), found),
                    {names.activation(0): int(layer.activation_bytes)},
                    1,
                    int(layer.flops - layer.forward_flops - layer.spared_flops),
                )
            )
        graph = StageGraph(b"", (names.X, names.TARGETS), (names.LOSS, names.DX))
        targets = [StageArray(1, 0, "int64", memoryview(b"")) for _ in self._model.tokens]
        loss = LossWork(graph, {}, {}, targets, int(self._model.loss.flops))
        return StepWork(
            layers,
            loss if stages[-1].loss else None,
            [self._activation(batch) for batch in range(len(self._model.tokens))],
            self._model.width,
            self._model.tokens,
            stages,
            "fp32",
            self._model.embeds,
            plan.kept_batches,
            plan.slices,
            [self._slice(part, targets) for part in plan.head_slices],
            frozenset(n for n, stage in enumerate(stages[:-1]) if stage.stop in self._model.cuts),
            forward_first=plan.forward_first,
        )

    def _slice(self, part: HeadSlice, targets: Sequence[StageArray]) -> SliceWork:
        cost = self._model.slice_of_loss(part.share)
        inputs = (names.X, names.TARGETS)
        return SliceWork(
            StageGraph(b"", inputs, (names.Y, names.LOGITS)),
            StageGraph(b"", (*inputs, names.DY, names.LOGITS), (names.DX,)),
            {},
            {},
            targets,
            cost.forward_flops,
            cost.flops - 2 * cost.forward_flops,
        )

    def _activation(self, batch: int) -> StageArray:
        rows, width = self._model.tokens[batch], self._model.width
        return StageArray(rows, width, "fp32", memoryview(bytes(4 * rows * width)))

    def _at(self, time_s: float, happens: Callable[[], list[ForSteps]]) -> None:
        heapq.heappush(self._events, (time_s, next(self._count), happens))

    def _carry_out(self, now_s: float, instructions: Sequence[ForSteps]) -> None:
        layers = len(self._model.layers)
        for instruction in instructions:
            match instruction:
                case SendStage(device, message, task):
                    self._send(now_s, device, message, task)
                case TellStep(OutputReady(batch)):
                    last = (p.flops for p in self._model.ps_layers if p.before == layers)
                    self._by_ps(now_s, batch, self._model.loss.flops + sum(last))
                case TellStep(InputWanted(stage, batch)):
                    self._by_ps(now_s, batch, self._layers_after(stage).forward_flops, stage)
                case TellStep(GradientWanted(stage, batch)):
                    them = self._layers_after(stage)
                    self._by_ps(now_s, batch, them.flops - them.forward_flops, stage)
                case TellStep(SlicesReady(batch)):
                    rows = self._model.tokens[batch]
                    total = StageArray(rows, 1, "fp32", memoryview(bytes(4 * rows)))
                    self._at(now_s, partial(self._step.give, batch, total))
                case TellStep(SlicesBack(batch)):
                    self._at(now_s, partial(self._step.give, batch, self._activation(batch)))
                case TellStep(Suspect()):
                    self._at(now_s, partial(self._step.resolve, right=True))
                case TellStep(StepResult()):
                    first = sum(p.flops for p in self._model.ps_layers if not p.before)
                    self.end_s = now_s + self._ps.optimizer_s
                    self.end_s += first * sum(self._model.tokens) / self._ps.flops_per_s

    def _layers_after(self, stage: int) -> PsLayers:
        stop = self._stages[stage].stop
        return next(p for p in self._model.ps_layers if p.before == stop)

    def _by_ps(self, now_s: float, batch: int, flops: float, after: int | None = None) -> None:
        """Let the PS compute for each token, and give the result to devices."""
        self._ps_free_s = max(self._ps_free_s, now_s)
        self._ps_free_s += flops * self._model.tokens[batch] / self._ps.flops_per_s
        give = partial(self._step.give, batch, self._activation(batch), after)
        self._at(self._ps_free_s, give)

    def _send(self, now_s: float, device: int, message: Message, task: Task | None) -> None:
        rates, free_s = self._devices[device], self._free_s[device]
        nbytes = len(memoryview(message.payload)) if isinstance(message, messages.Put) else 0
        free_s[0] = max(free_s[0], now_s) + nbytes / rates.downlink_bytes_per_s
        free_s[1] = max(free_s[1], free_s[0] + rates.latency_s)
        if isinstance(message, messages.RunGraph):
            assert task is not None
            assert isinstance(task.detail, StageOrder)
            free_s[1] += message.flops / rates.flops_per_s
            done = partial(self._step.computed, task.detail, message.id)
            self._at(free_s[1] + rates.latency_s, done)
        elif isinstance(message, messages.Fetch):
            assert task is not None
            assert isinstance(task.detail, StageOrder)
            nbytes = 4 * message.rows * message.columns
            free_s[2] = max(free_s[2], free_s[1]) + nbytes / rates.uplink_bytes_per_s
            payload = memoryview(bytes(nbytes))
            fetched = partial(self._step.fetched, task.detail, message.id, payload)
            self._at(free_s[2] + rates.latency_s, fetched)


@few
@given(st.data(), fleets(4, (2, 30)), st.booleans())
def test_predictions_are_what_the_scheduler_does(
    data: st.DataObject, fleet: list[DeviceRates], loss: bool
) -> None:
    layer = LayerCost(0, 0, 400_000, 400_000, 42e6, 14e6, 40e3, 0, 10e3, 12e6)
    tokens = data.draw(st.lists(st.sampled_from([8, 16, 64]), min_size=1, max_size=8))
    layers = data.draw(st.integers(1, 5))
    layer = replace(layer, pieces=data.draw(st.sampled_from([1, 2, 4])))
    end = LayerCost(0, 0, 0, 0, 231e6, 77e6, 800e3)
    model = StageModel([layer] * layers, end, 64, 4, tokens, data.draw(st.booleans()))
    if data.draw(st.booleans()):
        model = data.draw(with_ps_layers(model))
    devices = {device.device: device for device in fleet}
    stages = data.draw(st.sampled_from(list(all_stages(layers, sorted(devices)))))
    stages = (*stages[:-1], replace(stages[-1], loss=loss and not model.ends_at_ps))
    if turns := data.draw(st.sampled_from([0, 0, 2, 3])):  # devices have several stages
        stages = interleaved(stages, turns) or stages
    assume({stage.stop for stage in stages} >= set(model.cuts))
    try:
        predicted = predict(model, stages, devices, PS, forward_first=data.draw(st.booleans()))
    except PlanError:
        return  # too little memory for these stages
    real = TimedStep(model, predicted, devices, PS)
    assert predicted.step_s == pytest.approx(real.end_s, rel=1e-3)


def slices_on(
    groups: Sequence[tuple[int, ...]], layers: int, cuts: tuple[int, ...]
) -> tuple[PlannedStage, ...]:
    return tuple(
        PlannedStage(layers, layers, group, slice=HeadSlice(number, len(groups), cuts))
        for number, group in enumerate(groups)
    )


def large_head() -> tuple[StageModel, list[DeviceRates], PsCompute]:
    """A head of 2 GB, devices of 1.2 GB, and a PS that takes a minute for it."""
    layer = LayerCost(0, 28_000_000, 28_000_000, 56_000_000, 84e6, 28e6, 40e3, 28_000_000)
    head = LayerCost(0, 500_000_000, 500_000_000, 10**9, 1.5e9, 0.5e9, 800e3, 10**9)
    model = StageModel([layer] * 4, head, 768, 2, [512] * 8, most_slices=50_000)
    fleet = [DeviceRates(n, 1e8, 1e8, 1e12, 0.01, 1_200_000_000) for n in range(12)]
    return model, fleet, PsCompute(1e11, 0.1)


@few
@given(models(), st.integers(1, 8), st.floats(0.1, 10.0))
def test_a_device_on_the_servers_computer_only_has_what_the_server_leaves(
    model: StageModel, batches: int, speed: float
) -> None:
    model = replace(model, tokens=[100] * batches, ps_layers=())
    own = DeviceRates(0, 1e15, 1e15, speed * 1e9, 0.0, 10**15)
    ps = PsCompute(1e9, 0.0, own_device=0)
    stages = [PlannedStage(0, len(model.layers), (0,))]
    plan = predict(model, stages, {0: own}, ps)
    run = StageSimulation(model, stages, plan.kept_batches, {0: own}, ps)
    ended_s, device = run.end_s(), run.devices[0]
    loss_s = sum(model.tokens) * ps.loss_s(model.loss)
    weights_s = sum(layer.weight_bytes + layer.gradient_bytes for layer in model.layers) / 1e15
    # One of the two always computes, and never both.
    assert ended_s == pytest.approx(device.computes_s + loss_s, rel=1e-3, abs=1e-3 + 2 * weights_s)
    assert device.delayed_s <= loss_s + 1e-9
    assert plan.own_delay == pytest.approx(1 + device.delayed_s / max(device.computes_s, 1e-9))


@pytest.mark.slow
def test_a_loss_that_no_device_holds_goes_to_several() -> None:
    model, fleet, ps = large_head()
    plan = plan_stages(model, fleet, ps)
    check_right(plan, model, fleet)
    assert len(plan.slices) > 1
    assert "slices" in plan.where_loss
    at_ps = plan_stages(replace(model, most_slices=1), fleet, ps)
    assert at_ps.loss_at_ps
    assert plan.step_s < at_ps.step_s / 2


@few
@given(st.lists(st.tuples(st.floats(0, 1e3), st.floats(1e-3, 1e3)), min_size=1, max_size=8))
def test_slices_make_devices_busy_equally_long(devices: list[tuple[float, float]]) -> None:
    shares = _levelled(devices)
    assert sum(shares) == pytest.approx(1)
    until_s = [busy_s + share / rate for share, (busy_s, rate) in zip(shares, devices, strict=True)]
    with_work = [each for share, each in zip(shares, until_s, strict=True) if share > 1e-9]
    assert max(with_work) == pytest.approx(min(with_work), rel=1e-6)
    without = [each for share, each in zip(shares, until_s, strict=True) if not share]
    assert all(each >= min(with_work) * (1 - 1e-6) for each in without)


@few
@given(st.data(), fleets(6, (100, 300)))
def test_predictions_of_slices_are_what_the_scheduler_does(
    data: st.DataObject, fleet: list[DeviceRates]
) -> None:
    layer = LayerCost(0, 0, 400_000, 400_000, 42e6, 14e6, 40e3, 0, 10e3, 12e6)
    tokens = data.draw(st.lists(st.sampled_from([8, 16, 64]), min_size=1, max_size=8))
    end = LayerCost(0, 0, 0, 0, 231e6, 77e6, 800e3)
    model = StageModel([layer] * 2, end, 64, 4, tokens, most_slices=100)
    fleet = [replace(fleet[n % len(fleet)], device=n) for n in range(6)]
    stages = PlannedStage(0, 1, (0,)), PlannedStage(1, 2, (1,))
    ways: list[list[tuple[int, ...]]] = [[(2, 3, 4)], [(2, 3), (4, 5)], [(2,), (3,), (4,)]]
    ways += [[(0,), (1,)], [(1,), (2,), (0,)], [(0, 2), (1, 3)]]  # devices also have layers
    groups = data.draw(st.sampled_from(ways))
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=len(groups), max_size=len(groups)))
    slices = slices_on(groups, 2, (0, *accumulate(sizes)))
    devices = {device.device: device for device in fleet}
    first = data.draw(st.booleans())
    predicted = predict(model, stages, devices, PS, slices, forward_first=first)
    real = TimedStep(model, predicted, devices, PS)
    assert predicted.step_s == pytest.approx(real.end_s, rel=1e-3)


# --- shortcuts ---


@few
@given(models(), fleets(30, memory=(27, 31)))
def test_groupings_are_of_different_devices_that_hold_all_layers(
    model: StageModel, fleet: list[DeviceRates]
) -> None:
    tables = StageTables(model)
    memory = np.array([device.memory_bytes for device in fleet], dtype=float)
    for grouping in groupings(tables, fleet, 0):
        assert len(set(grouping.members.tolist())) == len(grouping.members)
        assert all(grouping.devices(fleet))
        assert grouping.least(tables.most_layers(memory)).sum() >= tables.layers


@few
@given(models(), fleets(memory=(28, 31)), st.sampled_from([1e6, 12e6, 125e6]))
def test_pieces_that_pass_in_one_loop_pass_as_events(
    model: StageModel, fleet: list[DeviceRates], rate: float
) -> None:
    ps = PsCompute(PS.flops_per_s, PS.optimizer_s, PsRates(rate, rate))
    by_id = {device.device: device for device in fleet}
    stages = (PlannedStage(0, len(model.layers), tuple(by_id)),)
    assume(all(held_bytes(model, stages[0]) <= device.memory_bytes for device in fleet))
    assume(not model.cuts)
    plan = predict(model, stages, by_id, ps)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(StageSimulation, "_at", _at_as_event)
        assert predict(model, stages, by_id, ps) == plan


def _at_as_event(
    self: StageSimulation, time_s: float, happens: Callable[[float, Any], None], what: Any
) -> None:
    """Add an event that is not known to be a piece's: bound methods are equal, not the same."""
    if happens == self._send_up:
        happens = self._send_up
    heapq.heappush(self._events, (time_s, next(self._numbers), happens, what))


def test_a_message_of_whole_pieces_passes() -> None:
    nbytes = int(3 * PIECE_BYTES)
    layer = LayerCost(0, nbytes, nbytes, nbytes, 57e6, 14e6, 40e3)
    model = StageModel([layer], OPT_125M.loss, 768, 4, [256] * 4)
    ps = PsCompute(100e9, 0.5, PsRates(1e6, 1e6))
    plan = predict(model, (PlannedStage(0, 1, (0,)),), {0: HOME[0]}, ps)
    assert plan.step_s >= plan.downlink_bytes / 1e6
