"""A model trained by stages on emulated devices follows plain PyTorch, whatever devices do."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from cleave import arrays
from cleave.arrays import DType
from cleave.errors import FleetError, PlanError
from cleave.fleet.fleet import Fleet
from cleave.fleet.local_fallback import AbandonedError, FleetPresence
from cleave.fleet.product import Side
from cleave.graphs.model_graphs import ModelGraphs
from cleave.planner.plan import DeviceRates
from cleave.planner.stages.model import (
    NOTHING_KEPT,
    HeadSlice,
    KeptBatches,
    PlannedStage,
    PsCompute,
    StageModel,
    StagePlan,
    StagePlanner,
)
from cleave.training.loop.job import OptimizerKind
from cleave.training.loop.optimizer import Optimizer, UpdateRule
from cleave.training.stages.stage_work import ModelWork
from cleave.training.stages.staged import RESTING_STEPS, NotByStages, Rows, StagedModel
from emulator.virtual import emulated
from profiles.fleets import paper_fleet
from tests.emulator.fleets import virtual
from tests.graphs.models import (
    TOKENS,
    WIDTH,
    graphs_of,
    plain_gradients,
    small_model,
    trained,
    with_lora,
)
from tests.invariants import check_state
from tests.training.runs import nightly

pytestmark = pytest.mark.slow

ROWS = 6
PS = PsCompute(1e11, 0.0)


KEPT = KeptBatches(inputs=2)


class EvenStages:
    """One layer after another on as many devices as there are layers; the others are replicas."""

    def __init__(self, *, loss: bool, kept: KeptBatches = KEPT) -> None:
        self.loss, self.kept = loss, kept

    def __call__(
        self, model: StageModel, devices: Sequence[DeviceRates], ps: PsCompute
    ) -> StagePlan:
        ids = sorted(rates.device for rates in devices)
        count = min(len(model.layers), len(ids))
        cuts = [number * len(model.layers) // count for number in range(count + 1)]
        stages = tuple(
            PlannedStage(cuts[n], cuts[n + 1], tuple(ids[n::count]), self.loss and n == count - 1)
            for n in range(count)
        )
        stages = tuple(replace(stage, pieces=model.most_pieces(stage)) for stage in stages)
        return StagePlan(stages, {d: self.kept for s in stages for d in s.devices}, 1.0, {}, 0, 0)


def in_turn(model: StageModel, devices: Sequence[DeviceRates], ps: PsCompute) -> StagePlan:
    """Each layer is a stage, each device has every second one and a slice of the loss.

    One slice is three times as large as the other. Forward passes come first.
    """
    layers, (one, other, *_) = len(model.layers), sorted(rates.device for rates in devices)
    stages = tuple(PlannedStage(n, n + 1, ((one, other)[n % 2],)) for n in range(layers))
    slices = tuple(
        PlannedStage(layers, layers, (device,), slice=HeadSlice(n, 2, (0, 1, 4)))
        for n, device in enumerate((one, other))
    )
    kept = {one: KeptBatches(1, 2), other: KeptBatches(2)}
    return StagePlan(stages, kept, 1.0, {}, 0, 0, slices=slices, forward_first=True)


@dataclass
class SlicedLoss:
    """Layers on the first two devices, slices of the loss on the others in turn, or so.

    Attributes:
        slices: how many; one if fewer devices are there.
        kept: what each device keeps.
        first: whether the first devices have the slices.
    """

    slices: int
    kept: KeptBatches
    first: bool = False

    def __call__(
        self, model: StageModel, devices: Sequence[DeviceRates], ps: PsCompute
    ) -> StagePlan:
        layers = len(model.layers)
        one, other, *others = sorted((rates.device for rates in devices), reverse=self.first)
        stages = PlannedStage(0, 1, (one,)), PlannedStage(1, layers, (other,))
        count = min(self.slices, len(others))
        slices = tuple(
            PlannedStage(layers, layers, tuple(sorted(others)[n::count]), slice=HeadSlice(n, count))
            for n in range(count)
        )
        kept = {rates.device: self.kept for rates in devices}
        return StagePlan(stages, kept, 1.0, {}, 0, 0, slices=slices)


def batches(count: int) -> list[Tensor]:
    torch.manual_seed(5)
    return [torch.randint(3, 96, (ROWS, TOKENS)) for _ in range(count)]


def rows(ids: Tensor) -> Rows:
    targets = torch.full_like(ids, -100)
    targets[:, :-1] = ids[:, 1:]
    return Rows(ids, targets)


def staged(
    model: nn.Module,
    fleet: Fleet,
    *,
    graphs: ModelGraphs | None = None,
    loss: bool = True,
    kept: KeptBatches = KEPT,
    dtype: DType = DType.FP32,
    message_bytes: int = 2**28,
    planner: StagePlanner | None = None,
    **settings: Any,
) -> StagedModel:
    work = ModelWork(model, graphs or graphs_of(model), dtype, message_bytes)
    planner = planner or EvenStages(loss=loss, kept=kept)
    return StagedModel(work, fleet.runtime, planner, PS, **settings)


def twice(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Return a model and a copy."""
    return model, copy.deepcopy(model)


def gradients_of(found: StagedModel) -> Any:
    return lambda ids: found.gradients(rows(ids))


def assert_close(model: nn.Module, plain: nn.Module, most: float) -> None:
    """All gradients of a layer are right, relative to the layer's largest."""
    largest = max(float(p.grad.abs().max()) for p in plain.parameters() if p.grad is not None)
    pairs = zip(model.named_parameters(), plain.parameters(), strict=True)
    for (name, mine), expected in pairs:
        assert (mine.grad is None) == (expected.grad is None), name
        if expected.grad is not None and mine.grad is not None:
            assert float((mine.grad - expected.grad).abs().max()) < most * largest, name


def assert_same_gradients(found: StagedModel, plain: nn.Module, ids: Tensor) -> None:
    """The loss and all gradients of a batch are those of plain PyTorch."""
    loss = found.gradients(rows(ids))
    assert loss == pytest.approx(plain_gradients(plain, ids), rel=1e-6)
    assert_close(found.work.model, plain, 3e-6)


def assert_steps_lose_as_plain(
    model: nn.Module,
    devices: int,
    most: float,
    *,
    plain: nn.Module | None = None,
    count: int = 4,
    clip: float | None = 1.0,
    **how: Any,
) -> None:
    """Train by stages and with plain PyTorch, a copy unless another model is given."""
    plain = plain or copy.deepcopy(model)
    with emulated(devices, seed=1) as fleet:
        mine = trained(model, gradients_of(staged(model, fleet, **how)), batches(count), clip=clip)
    expected = trained(plain, lambda ids: plain_gradients(plain, ids), batches(count), clip=clip)
    assert mine == pytest.approx(expected, rel=most)


@pytest.mark.parametrize(
    ("family", "loss", "kept"),
    [
        nightly("opt", "here", NOTHING_KEPT),
        ("opt", "on a device", KEPT),
        ("opt", "in slices", KeptBatches(inputs=1, activations=2)),
        nightly("llama", "here", KeptBatches(1, 2)),
        nightly("llama", "on a device", NOTHING_KEPT),
        nightly("llama", "in slices", KEPT),
    ],
)
def test_gradients_are_those_of_plain_pytorch(family: str, loss: str, kept: KeptBatches) -> None:
    """One of the two slices is on two devices. OPT's head is its embedding, too."""
    model, plain = twice(small_model(family))
    even = EvenStages(loss=loss == "on a device", kept=kept)
    planner = SlicedLoss(2, kept) if loss == "in slices" else even
    with emulated(5, seed=1) as fleet:
        assert_same_gradients(staged(model, fleet, planner=planner), plain, batches(1)[0])


@pytest.mark.nightly
@pytest.mark.parametrize(("slices", "tied"), [(2, False), (0, False), (0, True), (3, True)])
def test_a_vocabulary_may_be_smaller_than_the_width(slices: int, *, tied: bool) -> None:
    """The norm before the head is longer then, and was taken for it."""
    small: Any = small_model(
        "llama", **({"vocab_size": 9, "tie_word_embeddings": True} if tied else {})
    )
    if not tied:  # so that layers have the graphs of all tests
        small.lm_head = nn.Linear(WIDTH, 9, bias=False)
    model, plain = twice(small)
    ids = batches(1)[0] % 9
    with emulated(5, seed=1) as fleet:
        planner = SlicedLoss(slices, KEPT) if slices else None
        assert_same_gradients(staged(model, fleet, planner=planner), plain, ids)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16])
def test_parameters_that_travel_in_parts_change_nothing(dtype: DType) -> None:
    """As those do that are larger than a message."""
    model = small_model("llama")
    (ids,) = batches(1)
    found = []
    for message_bytes in (2**28, 1000):
        with emulated(3, seed=1) as fleet:
            model.zero_grad()
            mine = staged(model, fleet, dtype=dtype, message_bytes=message_bytes)
            found.append((mine.gradients(rows(ids)), [p.grad for p in model.parameters()]))
    (loss, gradients), (loss_in_parts, gradients_in_parts) = found
    assert loss_in_parts == loss
    for one, other in zip(gradients, gradients_in_parts, strict=True):
        assert one is None or torch.equal(one, other)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("family", "dtype", "planner", "clip", "most"),
    [
        nightly("gpt2", DType.FP32, None, None, 1e-4),
        ("llama", DType.BF16, None, 1.0, 2e-2),
        ("opt", DType.FP32, SlicedLoss(2, KEPT), 1.0, 1e-5),
        ("opt", DType.FP32, in_turn, 1.0, 1e-5),
        nightly("opt", DType.BF16, SlicedLoss(2, KEPT), 1.0, 2e-2),
        nightly("opt", DType.BF16, in_turn, 1.0, 2e-2),
        nightly("llama-lora", DType.FP32, in_turn, 1.0, 1e-5),
    ],
)
def test_steps_lose_as_plain_pytorch_does(
    family: str,
    dtype: DType,
    planner: StagePlanner | None,
    clip: float | None,
    most: float,
) -> None:
    model = with_lora(small_model("llama")) if family == "llama-lora" else small_model(family)
    devices, count = (5, 4) if planner else (3, 6)
    assert_steps_lose_as_plain(
        model, devices, most, count=count, clip=clip, dtype=dtype, planner=planner
    )


@pytest.mark.nightly
def test_padding_is_masked_as_in_the_model() -> None:
    """Also for sequences of the batch that have none."""
    model = small_model("llama")
    plain = copy.deepcopy(model)
    (ids,) = batches(1)
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    mask[2, 9:] = 0
    batch = rows(ids)
    batch.targets[:, :-1][mask[:, 1:] == 0] = -100
    with emulated(3, seed=1) as fleet:
        found = staged(model, fleet, graphs=graphs_of(model, padded=True))
        loss = found.gradients(Rows(ids, batch.targets, mask))
    assert loss == pytest.approx(plain_gradients(plain, ids, mask), rel=1e-6)
    assert_close(model, plain, 3e-6)


def test_adapters_alone_travel_after_the_first_step() -> None:
    model, plain = twice(with_lora(small_model("llama")))
    with emulated(2, seed=1) as fleet:
        found = staged(model, fleet)
        sent = []
        for ids in batches(3):
            before = fleet.counters()
            model.zero_grad()
            plain.zero_grad()
            assert_same_gradients(found, plain, ids)
            sent.append(fleet.counters().downlink_bytes - before.downlink_bytes)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad) * 4
    activations = 3 * ROWS * TOKENS * 32 * 4
    assert sent[0] > 2 * sent[1]
    assert max(sent[1:]) < trainable + activations + 60_000  # messages, of small numbers


@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16])
def test_new_weights_are_sent_as_they_are_updated_and_changes_after_that_count(
    dtype: DType,
) -> None:
    model, plain = twice(small_model("opt"))
    most = 2e-2 if dtype is DType.BF16 else 1e-5
    changes: Sequence[Callable[[Tensor], Any]] = (
        lambda parameter: None,
        lambda parameter: None,
        lambda parameter: parameter.mul_(0.9),
        lambda parameter: setattr(parameter, "data", parameter.data * 1.1),
        lambda parameter: None,
    )
    resent, down_s = [], []
    with emulated(3, seed=1) as fleet:
        found = staged(model, fleet, dtype=dtype, planner=SlicedLoss(1, KEPT))

        def sent() -> int:
            return fleet.counters().traffic.down.weights

        for ids, change in zip(batches(5), changes, strict=True):
            before = sent()
            loss = found.gradients(rows(ids))
            resent.append(sent() - before)
            down_s.append(sum(use.down_s for use in found.used))
            assert loss == pytest.approx(plain_gradients(plain, ids), rel=most)
            before = sent()
            with torch.no_grad():
                for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
                    assert mine.grad is not None
                    assert other.grad is not None
                    mine.sub_(mine.grad, alpha=0.1)
                    other.sub_(other.grad, alpha=0.1)
                    mine.grad = other.grad = None
                    if len(resent) != 4:
                        found.updated(mine)
                    change(mine)
                    change(other)
            early = 0 if len(resent) == 4 else resent[0]
            assert sent() - before == pytest.approx(early, rel=0.01)  # IDs get longer
    assert resent[1:3] == [0, 0]
    assert resent[3:] == pytest.approx([resent[0]] * 2, rel=0.01)
    assert down_s[1:3] == pytest.approx([down_s[4]] * 2, rel=0.02)  # wherever weights were sent
    assert down_s[3] > 1.1 * down_s[4]  # they were sent twice


@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16])
@pytest.mark.parametrize("kind", OptimizerKind)
def test_steps_that_the_caller_computes_change_weights_that_were_sent_early(
    kind: OptimizerKind, dtype: DType
) -> None:
    """Fused optimizers do not count their changes of a parameter."""
    original = small_model("opt")

    def losses(*, early: bool) -> list[Any]:
        model, by_stages = copy.deepcopy(original), []
        optimizer = Optimizer(model, UpdateRule(kind), clip=1.0, in_backward=False)
        with emulated(3, seed=1) as fleet:
            found = staged(model, fleet, dtype=dtype, planner=SlicedLoss(1, KEPT))
            updated = found.updated if early else lambda _: None
            for number, ids in enumerate(batches(6)):
                gradients = partial(found.gradients, rows(ids))
                if number not in (1, 3, 4):
                    by_stages.append(optimizer.step_whole(0.02, gradients, updated))
                    continue
                with patch.object(found, "planned", lambda _: NotByStages("for now")):
                    optimizer.step_whole(0.02, gradients, updated)
                optimizer.step(0.02, partial(plain_gradients, model, ids))
        return by_stages

    assert losses(early=True) == pytest.approx(losses(early=False), rel=1e-6)


@pytest.mark.parametrize("sliced", [nightly(False), True])
def test_lost_devices_cost_their_share_and_no_exactness(sliced: bool) -> None:
    model, plain = twice(small_model("opt"))
    fleet = emulated(8, seed=1)
    runtime = virtual(fleet)
    planner = SlicedLoss(2, KEPT) if sliced else None
    notes: list[str] = []
    found = staged(model, fleet, planner=planner, note=notes.append)

    def disturbed(ids: Tensor) -> Any:
        there = sorted(runtime.stage_devices())
        for device in there[2:4] if sliced else there[:2]:  # in the middle of the step
            runtime.lose(device, in_s=0.005 if sliced else 0.03)
        loss = found.gradients(rows(ids))
        for profile in runtime.profiles[:2]:
            runtime.join(profile)
        return loss

    mine = trained(model, disturbed, batches(6), clip=1.0)
    assert fleet.counters().reissued > 0
    assert any("left during a step" in note for note in notes)
    expected = trained(plain, lambda ids: plain_gradients(plain, ids), batches(6), clip=1.0)
    assert mine == pytest.approx(expected, rel=1e-4)
    fleet.close()


def test_the_server_shares_its_processor_only_while_its_own_device_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared: list[int | None] = []

    def planner(model: StageModel, devices: Sequence[DeviceRates], ps: PsCompute) -> StagePlan:
        shared.append(ps.own_device)
        return EvenStages(loss=False)(model, devices, ps)

    (ids,) = batches(1)
    with emulated(2, seed=1) as fleet:
        found = staged(small_model("opt"), fleet, planner=planner)
        for count, own in enumerate(({min(fleet.runtime.stage_devices())}, set[int]()), 1):
            monkeypatch.setattr(fleet.runtime, "own_devices", lambda own=own: own)
            shared.clear()
            found.forecast_s(rows(ids[:count]))
            assert all(device in own if own else device is None for device in shared)
            assert shared


def test_a_plan_for_other_speeds_is_made_again_and_the_forecast_corrects_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = small_model("opt")
    notes: list[str] = []
    with emulated(2, seed=1) as fleet:
        monkeypatch.setattr(fleet.runtime, "clock", "wall", raising=False)
        found = staged(model, fleet, note=notes.append)

        def step(step_s: float) -> StagePlan | None:
            model.zero_grad()
            found.gradients(rows(batches(1)[0]))
            found.learn(step_s, 0.5)
            return found.plan

        plan = step(9.0)
        assert plan is not None
        assert plan.step_s == 1.0  # as EvenStages says; graphs were sent in the first step
        plan = step(9.0)
        assert plan is not None
        assert plan.step_s == pytest.approx(1.5, abs=0.4)  # with what the server does
        rates = fleet.runtime.stage_devices()
        rates = {device: one.for_graphs() for device, one in rates.items()}

        def slow_down(*factors: float) -> None:
            slow = {
                device: replace(one, flops_per_s=one.flops_per_s / factor)
                for (device, one), factor in zip(rates.items(), factors, strict=True)
            }
            monkeypatch.setattr(fleet.runtime, "stage_devices", lambda: slow)

        slow_down(2, 2)
        chosen_s = plan.step_s
        alike = step(chosen_s)  # it took what was predicted, although all are slower
        assert alike is not None
        assert (alike.stages, alike.kept_batches) == (plan.stages, plan.kept_batches)
        assert alike.step_s != chosen_s
        assert "based on the devices' speeds" in notes[-1]
        assert step(2 * chosen_s) is not None
        slow_down(2, 1e5)
        unlike = step(chosen_s)  # by chance, it took what was predicted
        assert unlike is not None
        assert unlike.step_s > alike.step_s
        assert not [note for note in notes if "planned again" in note]
        assert step(20 * chosen_s) is None
        assert "planned again" in notes[-1]
        assert step(9.0) is not None


def test_without_devices_it_waits_until_training_is_to_stop() -> None:
    model = small_model("opt")
    notes: list[str] = []
    fleet = emulated(1, seed=1)
    runtime = virtual(fleet)
    (ids,) = batches(1)
    stops = iter([False, False, True])
    told: list[FleetPresence] = []
    how: Any = {"note": notes.append, "presence": told.append}
    found = staged(model, fleet, stop=lambda: next(stops), **how)
    runtime.lose(1)
    runtime.lose(1, in_s=1e6)  # something that is still to happen
    runtime.next_outcome(0.0)
    with pytest.raises(AbandonedError):
        found.gradients(rows(ids))
    assert notes == ["training waits: no device is connected"]
    assert told == [FleetPresence.ABSENT]
    found = staged(model, fleet, local_after_s=2.0)
    assert isinstance(found.gradients(rows(ids)), NotByStages)


def test_a_fleet_that_no_plan_fits_is_waited_for_and_said() -> None:
    def planner(model: StageModel, devices: Sequence[DeviceRates], ps: PsCompute) -> StagePlan:
        raise PlanError("every device is too small")

    model = small_model("opt")
    notes: list[str] = []
    with emulated(1, seed=1) as fleet:
        found = staged(model, fleet, planner=planner, local_after_s=0.0, note=notes.append)
        assert isinstance(found.gradients(rows(batches(1)[0])), NotByStages)
    assert notes == ["there is no plan for stages: every device is too small"]


def broken(graphs: ModelGraphs) -> ModelGraphs:
    """Graphs that no device can run backward."""
    layers = [replace(one, backward=one.forward) for one in graphs.layers]
    return ModelGraphs(graphs.calls, graphs.parts, layers, graphs.loss)


def test_devices_that_cannot_run_a_graph_end_the_step_with_the_reason() -> None:
    model = small_model("opt")
    graphs = broken(graphs_of(model))
    (ids,) = batches(1)
    with emulated(6, seed=1) as fleet:
        found = staged(model, fleet, graphs=graphs)
        with pytest.raises(FleetError, match="too many devices failed"):
            found.gradients(rows(ids))
    notes: list[str] = []
    with emulated(1, seed=1) as fleet:  # where something else may do a step, stages rest
        found = staged(model, fleet, graphs=graphs, local_after_s=0.0, note=notes.append)
        for _ in range(RESTING_STEPS):
            assert isinstance(found.gradients(rows(ids)), NotByStages)
        (resting,) = [note for note in notes if "steps without stages" in note]
        assert "no device is left that did not fail: device 1: " in resting
        assert all(parameter.grad is None for parameter in model.parameters())
        found.gradients(rows(ids))
        assert "set aside" in notes[-1]  # the device, whose runs all failed


def test_where_something_else_may_do_a_step_nobody_waits_for_devices_that_all_left() -> None:
    model = small_model("opt")
    notes: list[str] = []
    with emulated(2, seed=1) as fleet:
        runtime = virtual(fleet)
        found = staged(model, fleet, local_after_s=2.0, note=notes.append)
        (ids,) = batches(1)
        found.gradients(rows(ids))
        model.zero_grad()
        for device in list(runtime.devices):
            runtime.lose(device, in_s=0.001)
        runtime.lose(1, in_s=1e6)  # something that is still to happen
        began_s = runtime.now()
        assert isinstance(found.gradients(rows(ids)), NotByStages)
        assert 2.0 <= runtime.now() - began_s <= 5.0
        assert all(parameter.grad is None for parameter in model.parameters())
        assert "all devices that can train whole layers have left" in notes[-1]
        for profile in runtime.profiles:
            runtime.join(profile)
        fleet.wait_for(2)
        assert isinstance(found.gradients(rows(ids)), float)


def test_tiles_and_stages_share_a_devices_memory() -> None:
    """What tiles keep there makes room for a step, and tiles get what the step leaves."""
    model = small_model("opt")
    devices = [replace(device, memory_bytes=16 * 2**20) for device in paper_fleet(2)]
    with emulated(devices, seed=1) as fleet:
        found = staged(model, fleet)
        a = arrays.empty(1000, 1000, DType.FP32)
        a.array[...] = 1
        operand = fleet.operand(a)
        for ids in batches(2):
            out = arrays.empty(1000, 1000, DType.FP32)
            fleet.submit(Side(operand), Side(operand), out).result()
            assert float(out.array[0, 0]) == 1000
            found.gradients(rows(ids))
            manager = virtual(fleet).manager
            check_state(manager)
            for session in manager.sessions.values():
                held = manager.stages.occupied_bytes(session.id)
                assert session.planned_rates.memory_bytes == 16 * 2**20 - held
        found.close()
        assert all(s.reserved_bytes == 0 for s in manager.sessions.values())
        assert fleet.device_count == 2
