"""A device lies that alone has the state of its stage. Audits find it, and training goes back."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cleave.arrays import Array, DType
from cleave.device.core import Order
from cleave.fleet.fleet import Fleet
from cleave.machine.graph_run import GraphRun, Kept
from cleave.planner.plan import DeviceRates
from cleave.planner.stages.model import PlannedStage, PsCompute, StageModel, StagePlan
from cleave.planner.stages.resident import Protection
from cleave.scheduler.stages.resident import Holding, Lineage, Snapshot
from cleave.scheduler.stages.work import RequestKind, StageOrder
from cleave.training.loop import trainer
from cleave.training.loop.checkpoint import load_latest
from cleave.training.loop.context import TrainContext
from cleave.training.loop.optimizer import UpdateRule
from cleave.training.loop.records import Record
from cleave.training.loop.run_folder import CHECKPOINTS, LAYERS, LOG, REST, RunFolder, held_steps
from cleave.training.loop.start import train
from cleave.training.stages import replay_audits, saved_state
from cleave.training.stages.audits import Auditor, Fault
from cleave.training.stages.replay_audits import ReplayAudits, RolledBackError
from cleave.training.stages.stage_plans import StagePlans
from cleave.training.stages.step_log import LogFolder
from emulator.deferred import default_backend
from emulator.virtual import VirtualRuntime, _VirtualDevice
from profiles.fleets import paper_fleet
from tests.graphs.models import small_model
from tests.invariants import check_state
from tests.training.runs import losses, nightly, notes_of
from tests.training.test_resident import ADAMW, MOST, SGD, Run, plain_losses, same_weights
from tests.training.test_resident_resume import KilledError, job_of
from tests.training.test_staged import batches, rows
from tests.training.test_suspicion import Lie, Lying, dx, loss, output

pytestmark = pytest.mark.slow

STEPS = 12
LIAR = 2


def state(order: StageOrder) -> bool:
    return order.request.kind is RequestKind.STATE


def squares(order: StageOrder) -> bool:
    return order.request.kind is RequestKind.SQUARES


class Falsified(Lie):
    """Device `LIAR` multiplies all elements of its results by a factor.

    Args:
        value: the factor.
        after: number of correct results before the first false one.
        times: number of false results.
    """

    def __init__(
        self, place: Callable[[StageOrder], bool], value: float, after: int = 0, times: int = 10**9
    ) -> None:
        super().__init__(place, value, after, LIAR)
        self.times = times

    def falsified(self, device: int, order: StageOrder, values: Array) -> Array:
        if device != self.device or not self.place(order) or self.told >= self.times:
            return values
        if self.after:
            self.after -= 1
            return values
        self.told += 1
        return values * np.float32(self.value)


class LyingInUpdates(Lying):
    """Device `LIAR` also falsifies updates.

    Attributes:
        scale: the factor of gradients.
        updates: number of correct updates of tensors, and of the false updates that follow.
    """

    lies: Sequence[Lie] = ()
    scale = 1.0
    updates = 0, 10**9
    told = 0

    def _product(self, device: _VirtualDevice, order: Order) -> Any:
        session = self.manager.sessions.get(device.id)
        task = session.expected.get(order.run) if session is not None else None
        if device.id == LIAR and isinstance(order, GraphRun) and task is not None:
            assert isinstance(task.detail, StageOrder)
            if task.detail.request.kind is RequestKind.UPDATE and self.scale != 1.0:
                before, times = self.updates
                self.told += 1
                if before < self.told <= before + times:
                    gradient = order.inputs[1]
                    assert isinstance(gradient, Kept)
                    gradient.value = gradient.value * np.float32(self.scale)
        return super()._product(device, order)


class Repeating(Run):
    """A run that repeats the steps that were undone."""

    def __init__(
        self,
        model: nn.Module,
        fleet: Fleet,
        *args: Any,
        rate: float = 1.0,
        seed: int = 1,
        **settings: Any,
    ) -> None:
        self.notes: list[str] = []
        self.undone: list[int] = []
        self.after_step: Callable[[int], object] = lambda steps: None
        auditor = Auditor(rate, random.Random(seed))
        super().__init__(model, fleet, *args, auditor=auditor, note=self.notes.append, **settings)
        self.staged.plans.protection = lambda *_: Protection(3, 9)  # type: ignore[method-assign]

    @property
    def replays(self) -> ReplayAudits:
        assert self.staged.replays is not None
        return self.staged.replays

    @property
    def quarantined(self) -> list[str]:
        return [note for note in self.notes if "is quarantined" in note]

    def all_losses(self, given: Sequence[Tensor]) -> list[float]:
        """Return the final losses of all steps."""
        losses: list[float] = []
        while True:
            try:
                while len(losses) < len(given):
                    losses.append(self.step(given[len(losses)]))
                    self.after_step(len(losses))
                self.staged.settle()
            except RolledBackError as error:
                self.undone.append(error.steps)
                del losses[len(losses) - error.steps :]
            else:
                return losses


def fleet_of(*lies: Lie, devices: int = 3) -> Fleet:
    runtime = LyingInUpdates(paper_fleet(devices), default_backend(), verify="off", seed=1)
    runtime.lies = lies
    return Fleet(runtime)


@pytest.mark.parametrize(
    ("family", "dtype", "rule", "head"),
    [
        ("opt", DType.FP32, ADAMW, False),
        ("opt", DType.BF16, ADAMW, True),
        ("llama", DType.BF16, ADAMW, False),
        ("llama", DType.FP32, SGD, True),
    ],
)
def test_honest_devices_are_not_blamed(
    family: str, dtype: DType, rule: UpdateRule, tmp_path: Path, *, head: bool
) -> None:
    model = small_model(family)
    plain, given = copy.deepcopy(model), batches(STEPS)
    with fleet_of() as fleet:
        run = Repeating(model, fleet, rule, 1.0, dtype, head=head, log=tmp_path)
        run.after_step = lambda _: run.staged.evaluate(rows(given[0]))
        mine = run.all_losses(given)
        assert run.replays.counters.stages >= 4
        assert run.replays.counters.steps == 2 * STEPS
        assert run.replays.verified == STEPS
    assert not run.undone
    assert not run.quarantined
    assert mine == pytest.approx(plain_losses(plain, given, rule), rel=MOST[dtype])


FALSIFIED = {
    "outputs": Falsified(output, 1.02),
    "one output": Falsified(output, 1.05, after=20, times=1),
    "input gradients": Falsified(dx, 1.05),
    "one input gradient": Falsified(dx, 0.8, after=20, times=1),
    "snapshots": Falsified(state, 1.01),
    "an array of a snapshot": Falsified(state, 1.01, times=1),
    "squares": Falsified(squares, 0.5, after=4),
}


def head_on_liar(model: StageModel, devices: Sequence[DeviceRates], ps: PsCompute) -> StagePlan:
    """All layers on one device, and the LM head on the liar, if it is there."""
    ids, count = sorted(rates.device for rates in devices), len(model.layers)
    head = LIAR if LIAR in ids else ids[-1]
    stages = PlannedStage(0, count, (ids[0],)), PlannedStage(count, count, (head,), loss=True)
    return StagePlan(stages, {}, 1.0, {}, 0, 0)


def all_on_liar(model: StageModel, devices: Sequence[DeviceRates], ps: PsCompute) -> StagePlan:
    """The whole model on the liar, if it is there."""
    ids, count = sorted(rates.device for rates in devices), len(model.layers)
    stage = PlannedStage(0, count, (LIAR if LIAR in ids else ids[-1],), loss=True)
    return StagePlan((stage,), {}, 1.0, {}, 0, 0)


def test_losses_of_a_device_with_the_whole_model_are_audited() -> None:
    """It returns nothing else that could be compared before its state."""
    model = small_model("opt")
    plain, given = copy.deepcopy(model), batches(STEPS)
    lie = Falsified(loss, 1.05)
    with fleet_of(lie) as fleet:
        run = Repeating(model, fleet, head=True, resident_planner=all_on_liar)
        mine = run.all_losses(given)
        assert LIAR not in fleet.runtime.stage_devices()
    assert lie.told
    assert len(run.undone) == 1
    assert mine == pytest.approx(plain_losses(plain, given), rel=1e-5)


WITH_HEAD = {"embeddings": FALSIFIED["outputs"], "losses": Falsified(loss, 1.05), **FALSIFIED}


@pytest.mark.parametrize(
    ("what", "dtype", "head"),
    [
        *((what, DType.FP32, False) for what in FALSIFIED),
        *(nightly(what, DType.BF16, False) for what in FALSIFIED),
        ("embeddings", DType.FP32, True),
        ("losses", DType.FP32, True),
        *(nightly(what, dtype, True) for what in WITH_HEAD for dtype in (DType.FP32, DType.BF16)),
    ],
)
def test_what_a_liar_returned_is_undone(
    what: str, dtype: DType, tmp_path: Path, *, head: bool
) -> None:
    """The last losses are those of plain training. The liar, and only the liar, is quarantined."""
    model = small_model("opt")
    plain, given = copy.deepcopy(model), batches(STEPS)
    lie = copy.copy(WITH_HEAD[what])
    settings: dict[str, Any] = {"head": True, "resident_planner": head_on_liar} if head else {}
    if dtype is DType.BF16:  # errors of some percent may be rounding, or need more audits
        lie.value = abs(1 + 20 * (lie.value - 1))
    with fleet_of(lie) as fleet:
        assert isinstance(fleet.runtime, VirtualRuntime)
        run = Repeating(model, fleet, dtype=dtype, log=tmp_path, **settings)
        mine = run.all_losses(given)
        check_state(fleet.runtime.manager)
        assert LIAR not in fleet.runtime.stage_devices()
    assert lie.told
    assert len(run.undone) == 1
    assert [note.split(":")[0] for note in run.quarantined] == [f"device {LIAR} is quarantined"]
    assert mine == pytest.approx(plain_losses(plain, given), rel=MOST[dtype])
    if dtype is DType.FP32:
        same_weights(model, plain, 1e-3)


@pytest.mark.parametrize("head", [False, True])
def test_what_a_liar_returned_in_an_evaluation_is_found(*, head: bool) -> None:
    """The steps after the last verified snapshot are undone, and with them their evaluations."""
    model = small_model("opt")
    plain, given = copy.deepcopy(model), batches(STEPS)
    lie = Falsified(loss if head else output, 1.05, after=10**9)
    settings: dict[str, Any] = {"head": True, "resident_planner": head_on_liar} if head else {}
    with fleet_of(lie) as fleet:
        run = Repeating(model, fleet, **settings)

        def evaluate(steps: int) -> None:
            if steps == 2 and not lie.told:
                lie.after = 0
                assert run.staged.evaluate(rows(given[0])) is not None
                lie.after = 10**9

        run.after_step = evaluate
        mine = run.all_losses(given)
        assert LIAR not in fleet.runtime.stage_devices()
    assert lie.told
    assert len(run.undone) == 1
    assert [note.split(":")[0] for note in run.quarantined] == [f"device {LIAR} is quarantined"]
    assert mine == pytest.approx(plain_losses(plain, given), rel=1e-5)


@pytest.mark.parametrize(
    ("scale", "updates"), [(1.05, (0, 10**9)), (-1.0, (20, 5)), (0.0, (70, 1)), (1.5, (30, 16))]
)
def test_what_a_liar_did_in_updates_is_undone(scale: float, updates: tuple[int, int]) -> None:
    """It falsifies all updates, or those of a few tensors in one step."""
    model = small_model("opt")
    plain, given = copy.deepcopy(model), batches(STEPS)
    with fleet_of() as fleet:
        assert isinstance(fleet.runtime, LyingInUpdates)
        fleet.runtime.scale, fleet.runtime.updates = scale, updates
        run = Repeating(model, fleet)
        mine = run.all_losses(given)
        assert LIAR not in fleet.runtime.stage_devices()
    assert fleet.runtime.told > updates[0]
    assert len(run.undone) == 1
    assert len(run.quarantined) == 1
    assert mine == pytest.approx(plain_losses(plain, given), rel=1e-5)
    same_weights(model, plain, 1e-3)


@pytest.mark.parametrize("full", [False, True])
def test_tensors_are_restored_from_copies(
    full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the disk is full, the copies stay in memory."""
    if full:
        monkeypatch.setattr(saved_state, "mapped_copy", mock.Mock(side_effect=OSError("disk full")))
    notes: list[str] = []
    tensors = {"a": torch.randn(3, 4).T, "b": torch.randn(5).bfloat16(), "c": torch.tensor(7)}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    copies = saved_state.SavedTensors(tmp_path, tensors, notes.append)
    for name, tensor in tensors.items():
        copies.copy_to(name, tensor.zero_())
        assert torch.equal(tensor, before[name])
    assert bool(notes) == full
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("restarted", [False, True])
def test_after_a_restart_the_snapshot_may_not_be_what_a_device_began_with(restarted: bool) -> None:
    """Another device may have falsified it. So a device with state from before is not blamed."""
    state: Any = SimpleNamespace(
        updates=2, layers={0}, tensors={}, own_tensors=dict, is_current=True,
        found_on_devices=restarted,
    )  # fmt: skip
    auditor: Any = SimpleNamespace(rate=1.0, rng=random.Random(0), excess=0.0)
    audits = ReplayAudits(state, auditor, None, waits=True, note=lambda text: None)
    step: Any = SimpleNamespace(work=SimpleNamespace(stages=[PlannedStage(0, 1, (LIAR,))]))
    audits.repeated()
    fault = Fault(LIAR, "its state does not follow from the snapshot")
    with mock.patch.object(replay_audits, "StageReplay") as replay:
        replay.return_value = mock.Mock(
            number=0, steps=[], returned=[], faults=lambda auditor: [fault]
        )
        audits.taken(Snapshot(3, {}, {0: Holding(LIAR, Lineage(-1))}), [step])
    found = audits.lie()
    audits.close()
    assert found is not None
    assert found.faults == [fault]
    assert found.blamed == ([] if restarted else [fault])


def test_a_negative_sum_of_squares_is_refused() -> None:
    """Another device does the stage; training does not end."""
    model = small_model("opt")
    plain, given = copy.deepcopy(model), batches(STEPS)
    lie = Falsified(squares, -1.0, after=4, times=2)
    with fleet_of(lie) as fleet:
        run = Repeating(model, fleet)
        mine = run.all_losses(given)
    assert lie.told
    assert mine == pytest.approx(plain_losses(plain, given), rel=1e-5)


def test_a_server_killed_while_it_goes_back_does_not_resume_from_the_lie(
    tmp_path: Path, corpus_file: Path
) -> None:
    """The kill comes before it removes the checkpoints that contain the lie."""

    def killed(where: Path, _: Any) -> None:
        if where.name == CHECKPOINTS:
            raise KilledError

    job = job_of(corpus_file, audit=0.5, checkpoint_every=4, steps=12)
    folder = RunFolder(tmp_path)
    snapshots = mock.patch.object(StagePlans, "protection", return_value=Protection(2, 9))
    late = mock.patch.object(ReplayAudits, "_draws", lambda self, _: self._state.position >= 10)
    killing = mock.patch.object(trainer, "remove_checkpoints", killed)
    lie = Falsified(state, 1.01, after=20)
    lie.device = 3  # which has all layers
    with fleet_of(lie) as fleet, snapshots, late, killing, pytest.raises(KilledError):
        train(job, folder, TrainContext(fleet, lambda _: None))
    assert not held_steps(folder.path / LAYERS)
    assert not held_steps(folder.path / REST)
    assert not LogFolder(folder.path / LOG).numbers()


def test_a_run_folder_has_nothing_of_a_lie(tmp_path: Path, corpus_file: Path) -> None:
    """Its records are those of plain training, and the last checkpoint is complete."""
    job = job_of(corpus_file, audit=1.0, checkpoint_every=4)
    folder, seen = RunFolder(tmp_path), list[Record]()
    snapshots = mock.patch.object(StagePlans, "protection", return_value=Protection(2, 9))
    lie = Falsified(state, 1.01, after=10)
    lie.device = 3  # which has all layers
    with fleet_of(lie) as fleet, snapshots:
        train(job, folder, TrainContext(fleet, seen.append))
    told = notes_of(seen)
    assert "going back to step" in told
    assert "is quarantined" in told
    alone = replace(job, method="local", state="server")
    plain = losses(alone, RunFolder(tmp_path / "plain"))
    records = [record for record in folder.records() if record.get("event") == "step"]
    assert [record["step"] for record in records] == [*range(1, job.steps + 1)]
    assert [record["loss"] for record in records] == pytest.approx(plain, rel=1e-5)
    found = load_latest(folder.path / CHECKPOINTS)
    assert found is not None
    assert found.step == job.steps
