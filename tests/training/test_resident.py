"""Devices keep the layers' weights and optimizer state, and training follows plain PyTorch."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from cleave.arrays import DType
from cleave.cluster.endpoints import EndpointRuntime
from cleave.errors import UsageError
from cleave.fleet.fleet import Fleet
from cleave.planner.stages.resident import Protection, plan_resident
from cleave.planner.stages.search import plan_stages
from cleave.scheduler.stages.holders import RETURN_S
from cleave.training.loop import state_files
from cleave.training.loop.disk import Patience
from cleave.training.loop.finite import DivergedError
from cleave.training.loop.job import OptimizerKind
from cleave.training.loop.optimizer import Optimizer, UpdateRule
from cleave.training.loop.state_files import StateFiles, is_mapped
from cleave.training.stages import step_log
from cleave.training.stages.audits import Auditor
from cleave.training.stages.resident import ResidentState, StateStorage
from cleave.training.stages.step_log import LogFolder
from emulator.virtual import VirtualRuntime, emulated
from profiles.fleets import paper_fleet
from tests.graphs.models import plain_gradients, small_model
from tests.invariants import check_state
from tests.training.runs import nightly
from tests.training.test_staged import EvenStages, batches, rows, staged

RATE, STEPS, LOSSES = 5e-3, 5, 6
ADAMW = UpdateRule(OptimizerKind.ADAMW, weight_decay=0.1)
SGD = UpdateRule(OptimizerKind.SGD, weight_decay=0.1)
MOST = {DType.FP32: 1e-5, DType.BF16: 2e-2}


class Run:
    """A model whose layers' state is on devices, and what it is compared with.

    Args:
        clip: 0 for no clipping.

    Attributes:
        losses: the losses of all completed steps.
    """

    def __init__(
        self,
        model: nn.Module,
        fleet: Fleet,
        rule: UpdateRule = ADAMW,
        clip: float = 1.0,
        dtype: DType = DType.FP32,
        head: bool = False,
        **settings: Any,
    ) -> None:
        self.model, self.losses = model, list[float]()
        self._plain, self._given = copy.deepcopy(model), list[Tensor]()
        self._how, self._dtype = (rule, clip), dtype
        kept = {key: settings.pop(key) for key in ("log", "files", "stored") if key in settings}
        planner = settings.pop("resident_planner", EvenStages(loss=head))
        self.optimizer = Optimizer(model, rule, clip=clip, in_backward=False)
        self.staged = staged(model, fleet, loss=False, dtype=dtype, **settings)
        self.staged.keep_on_devices(
            self.optimizer, StateStorage(**kept), planner=planner, head=head
        )

    def step(self, ids: Tensor) -> float:
        loss = self.optimizer.step_whole(RATE, lambda: self.staged.gradients(rows(ids)))
        assert isinstance(loss, float)
        self.losses.append(loss)
        self._given.append(ids)
        return loss

    @property
    def runtime(self) -> VirtualRuntime:
        assert isinstance(self.staged.runtime, VirtualRuntime)
        return self.staged.runtime

    @property
    def state(self) -> ResidentState:
        assert self.staged.resident is not None
        return self.staged.resident

    def sync(self) -> None:
        """Fetch the state from the devices, and check the scheduler."""
        self.staged.sync()
        check_state(self.runtime.manager)

    def check(self, within: float = 1e-5, weights_within: float = 1e-3) -> None:
        """Check that losses and weights are those of plain PyTorch."""
        expected = plain_losses(self._plain, self._given, *self._how)
        assert self.losses == pytest.approx(expected, rel=max(within, MOST[self._dtype]))
        if self._dtype is DType.FP32:
            same_weights(self.model, self._plain, weights_within)


def plain_losses(
    model: nn.Module,
    given: Sequence[Tensor],
    rule: UpdateRule = ADAMW,
    clip: float = 1.0,
    after: Callable[[], None] = lambda: None,
) -> list[float]:
    """Return the losses of training with plain PyTorch, which calls `after` after each step."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    if rule.kind is OptimizerKind.ADAMW:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, RATE, betas=(0.9, 0.95))
    else:
        optimizer = torch.optim.SGD(groups, RATE, momentum=rule.momentum)
    losses = []
    for ids in given:
        optimizer.zero_grad()
        losses.append(plain_gradients(model, ids))
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        after()
    return losses


def same_weights(model: nn.Module, plain: nn.Module, most: float) -> None:
    """Biases of keys have no gradient but rounding, from which AdamW makes whole steps."""
    for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        if "k_proj.bias" not in name:
            assert float((mine - other).abs().max()) < most, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype", "rule", "clip", "head"),
    [
        ("opt", DType.FP32, ADAMW, 1.0, False),
        ("opt", DType.FP32, SGD, 1.0, True),
        ("llama", DType.BF16, ADAMW, 0.0, True),
        nightly("llama", DType.FP32, SGD, 1.0, False),
        nightly("gpt2", DType.FP32, ADAMW, 1.0, False),
        nightly("gpt2", DType.FP32, ADAMW, 1.0, True),
        nightly("qwen3", DType.FP32, ADAMW, 0.0, True),
        nightly("opt", DType.BF16, ADAMW, 1.0, True),
        nightly("opt", DType.BF16, SGD, 1.0, False),
    ],
)
def test_steps_lose_as_plain_pytorch_does(
    family: str, dtype: DType, rule: UpdateRule, clip: float, *, head: bool
) -> None:
    """Also if a device has the LM head; with OPT and GPT-2, this device also embeds tokens."""
    with emulated(3, seed=1) as fleet:
        run = Run(small_model(family), fleet, rule, clip, dtype, head=head)
        assert run.staged.work.is_tied == (family in ("opt", "gpt2"))
        for ids in batches(STEPS):
            run.step(ids)
        run.sync()
    run.check()


@pytest.mark.parametrize("head", [False, True])
def test_neither_weights_nor_gradients_travel(*, head: bool) -> None:
    with emulated(2, seed=1) as fleet:
        run = Run(small_model("opt"), fleet, head=head)
        first, *later = batches(3)
        run.step(first)
        before = fleet.counters().traffic
        for ids in later:
            run.step(ids)
        after = fleet.counters().traffic
        assert after.down.weights == before.down.weights > 0
        assert after.up.gradients == before.up.gradients == 0
        run.staged.sync()
        assert fleet.counters().traffic.up.weights > before.up.weights


@pytest.mark.parametrize(("family", "sends"), [("opt", False), ("llama", True)])
def test_a_device_with_everything_gets_nothing_but_tokens(family: str, sends: bool) -> None:
    """Without a tied head, the server still embeds tokens, and needs the gradient for that."""
    with emulated(1, seed=1) as fleet:
        run = Run(small_model(family), fleet, head=True)
        sent = []
        for ids in batches(3):
            before = fleet.counters().traffic
            run.step(ids)
            traffic = fleet.counters().traffic
            sent.append(traffic.up.activations - before.up.activations)
        run.sync()
    activations = 4 * ids.numel() * run.staged.work.graphs.calls[0].x.shape[-1]
    assert (max(sent) > activations) == sends
    assert (max(sent) < activations / 10) == (not sends)
    run.check()


def held_out(given: Sequence[Tensor], number: int) -> Tensor:
    """Return the sequences of an evaluation, of which there are one or more."""
    return given[0][: 1 + number % len(given[0])]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "devices", "after", "head"),
    [
        ("opt", 2, 0, False),
        ("opt", 3, 0, True),
        ("llama", 1, 0, True),
        ("opt", 3, 37, True),
        ("llama", 3, 23, False),
        nightly("gpt2", 3, 29, True),
        nightly("opt", 1, 0, True),
    ],
)
def test_devices_evaluate_the_model_without_returning_their_state(
    family: str, devices: int, after: int, *, head: bool
) -> None:
    """Also with few sequences, while a snapshot is under way, and if devices are lost."""
    model = small_model(family)
    plain, given = copy.deepcopy(model), batches(8)
    with emulated(devices, seed=1) as fleet:
        assert isinstance(fleet.runtime, VirtualRuntime)
        run = Run(model, fleet, head=head)
        run.staged.plans.protection = lambda *_: Protection(3, 9)  # type: ignore[method-assign]
        assert run.staged.evaluate(rows(given[0])) is None  # the server has the weights
        mine: list[float] = []
        found: list[float | None] = []
        lost = losing(fleet.runtime, after) if after else None
        with mock.patch.object(ResidentState, "of_fetch", side_effect=AssertionError):
            for ids in given:
                mine.append(run.step(ids))
                found.append(run.staged.evaluate(rows(held_out(given, len(found)))))
        run.staged.sync()
        check_state(fleet.runtime.manager)
    assert lost is None or lost() > 2
    wanted: list[float] = []

    def evaluate() -> None:
        wanted.append(plain_gradients(plain, held_out(given, len(wanted))))

    assert mine == pytest.approx(plain_losses(plain, given, after=evaluate), rel=1e-4)
    assert found == pytest.approx(wanted, rel=1e-4)


def test_departures_are_counted_with_and_without_a_stage() -> None:
    """Before the first one, a device is expected to stay for eight hours."""
    with emulated(4, seed=1) as fleet:
        run = Run(small_model("opt"), fleet)
        run.step(batches(1)[0])
        state = run.state
        stages, began_s = state._stages, state._began_s
        present = {*fleet.runtime.stage_devices()}
        both = state.between_losses_s(began_s + 600, present)
        assert both == pytest.approx([600 + 8 * 3600 / stages] * 2)
        present.pop()
        _, between_s = state.between_losses_s(began_s + 700, present)
        assert between_s == pytest.approx(700 / min(1.0, stages / 3))
        run.staged.sync()


def losing(runtime: VirtualRuntime, after: int, away_s: float | None = None) -> Callable[[], int]:
    """Lose the device of every message whose number is a multiple of `after`, `LOSSES` times.

    It returns with its arrays after `away_s` seconds. With None, a new device joins instead.
    Returns a function that returns the number of lost devices.
    """
    send, sent, lost = runtime.send, 0, 0

    def sending(session: int, *rest: Any) -> None:
        nonlocal sent, lost
        send(session, *rest)
        sent += 1
        if sent % after == 0 and lost < LOSSES:
            lost += 1
            if away_s is None:
                runtime.join(paper_fleet(1)[0])
            runtime.lose(session, away_s=away_s)

    runtime.send = sending  # type: ignore[assignment, method-assign]
    return lambda: lost


@pytest.mark.slow
@pytest.mark.parametrize(
    ("after", "head"),
    [(0, True), (170, False), nightly(170, True), nightly(101, True), nightly(400, False)],
)
def test_snapshots_are_taken_while_devices_work_on(after: int, *, head: bool) -> None:
    """The log then holds only the steps after the snapshot, also if devices are lost."""
    given = batches(12)
    with emulated(3, seed=1) as fleet:
        run = Run(small_model("opt"), fleet, head=head)
        run.staged.plans.protection = lambda *_: Protection(2, 9)  # type: ignore[method-assign]
        if after:
            losing(run.runtime, after)
        logged = []
        for ids in given:
            run.step(ids)
            logged.append(len(run.state.log.steps))
        run.sync()
    if not after:
        assert max(logged) < len(given) - 1
    assert run.optimizer.on_devices is not None
    updates = {run.optimizer.hand_over(name)[0] for name in run.optimizer.on_devices.names}
    assert updates == {len(given)}
    run.check(1e-4, 1e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("after", "head"),
    [(97, True), (150, False), (333, True), *(nightly(n, h) for n in (61, 211) for h in (0, 1))],
)
def test_lost_devices_change_nothing(after: int, tmp_path: Path, *, head: bool) -> None:
    """Whatever a device is doing: passes, squares, updates, returning state, or restoring."""
    with emulated(3, seed=1) as fleet:
        run = Run(small_model("opt"), fleet, head=bool(head), log=tmp_path)
        lost = losing(run.runtime, after)
        for number, ids in enumerate(batches(STEPS)):
            run.step(ids)
            if number == 2:
                run.sync()
        assert run.state.log.nbytes > 0
        run.sync()
        assert run.state.log.nbytes == 0
        assert lost() == LOSSES
    run.check(1e-4, 1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("after", [97, 333, nightly(61), nightly(150), nightly(211)])
@pytest.mark.parametrize(
    ("away_s", "head"), [(5.0, True), (RETURN_S + 1, False), nightly(1000.0, True)]
)
def test_devices_that_return_with_their_state_change_nothing(
    after: int, away_s: float, *, head: bool
) -> None:
    """Whatever they were doing when their connection was cut."""
    with emulated(3, seed=1) as fleet:
        run = Run(small_model("opt"), fleet, head=head)
        lost = losing(run.runtime, after, away_s)
        for ids in batches(STEPS):
            run.step(ids)
        run.sync()
        assert lost() > 0
    run.check(1e-4, 1e-2)


@pytest.mark.slow
def test_state_on_a_device_that_returns_in_time_is_not_sent_again() -> None:
    with emulated(3, seed=1) as fleet:
        run, (first, *later) = Run(small_model("opt"), fleet), batches(4)
        run.step(first)
        before = fleet.counters().traffic.down.weights
        for number, ids in enumerate(later):
            holders = sorted(run.runtime.manager.stages.in_use)
            run.runtime.lose(holders[number % len(holders)], in_s=0.01, away_s=5.0)
            run.step(ids)
        assert fleet.counters().traffic.down.weights == before


@pytest.mark.slow
@pytest.mark.parametrize("busy", [True, False])
def test_a_device_that_says_that_it_leaves_returns_its_state_first(busy: bool) -> None:
    """Then no step is repeated. The device is dismissed, and the others go on."""
    with emulated(2, seed=1) as fleet:
        run = Run(small_model("opt"), fleet)
        runtime = run.runtime
        for number, ids in enumerate(batches(5)):
            if number == 2:
                leaving = min(runtime.manager.stages.in_use)
                runtime._drain(leaving)  # the message arrives in the next step, or before it
                if not busy:
                    runtime.wait_until(lambda: runtime.state_leaves)
            elif number == 4:
                assert leaving not in runtime.manager.sessions
                runtime.join(paper_fleet(1)[0])
            run.step(ids)
        run.sync()
        assert run.state.losses == 0
    run.check()


@pytest.mark.slow
@pytest.mark.parametrize("uplink_bytes_per_s", [1e5, 1e12])
def test_state_is_on_devices_if_that_is_predicted_to_be_faster(uplink_bytes_per_s: float) -> None:
    """Weights and gradients take long on a slow uplink, and several devices share fast work."""
    notes: list[str] = []
    model = small_model("opt")
    plain, given = copy.deepcopy(model), batches(3)
    devices = [
        replace(one, uplink_bytes_per_s=uplink_bytes_per_s, downlink_bytes_per_s=1e12)
        for one in paper_fleet(4)
    ]
    with emulated(devices, seed=1) as fleet:
        optimizer = Optimizer(model, ADAMW, clip=1.0, in_backward=False)
        found = staged(model, fleet, planner=plan_stages, note=notes.append)
        found.keep_on_devices(optimizer, if_faster=True)
        mine = [
            optimizer.step_whole(RATE, partial(found.gradients, rows(ids)), found.updated)
            for ids in given
        ]
        slow = uplink_bytes_per_s < 1e6
        assert (found.resident is not None) == slow
        where = "devices" if slow else "the server"
        (said,) = [note for note in notes if "optimizer state stay" in note]
        assert f"stay on {where}: a step is predicted to take" in said
        found.sync()
    assert mine == pytest.approx(plain_losses(plain, given), rel=1e-5)


def test_devices_that_join_while_the_step_is_planned_still_get_the_state() -> None:
    """This holds even if steps are predicted to be faster with the state on the server."""
    devices = [
        replace(one, uplink_bytes_per_s=1e12, downlink_bytes_per_s=1e12) for one in paper_fleet(4)
    ]
    with emulated(devices, seed=1) as fleet:
        model = small_model("opt")
        optimizer = Optimizer(model, ADAMW, clip=1.0, in_backward=False)
        found = staged(model, fleet, planner=plan_stages)
        found.keep_on_devices(optimizer, head=None)
        looks = mock.Mock(side_effect=[{}, {}, *[mock.DEFAULT] * 99], wraps=found.plans.devices)
        found.plans.devices = looks  # type: ignore[method-assign]
        for ids in batches(2):
            optimizer.step_whole(RATE, partial(found.gradients, rows(ids)))
            assert found.resident is not None
        found.sync()


@pytest.mark.slow
def test_what_devices_cannot_update_stays_on_the_server_and_is_audited() -> None:
    """This holds even if steps are predicted to be faster with the state on devices."""
    notes: list[str] = []
    model = small_model("opt")
    plain, given = copy.deepcopy(model), batches(2)
    rule = UpdateRule(OptimizerKind.ADAFACTOR)
    devices = [
        replace(one, uplink_bytes_per_s=1e5, downlink_bytes_per_s=1e12) for one in paper_fleet(4)
    ]
    with emulated(devices, seed=1) as fleet:
        optimizer = Optimizer(model, rule, clip=1.0, in_backward=False)
        auditor = Auditor(1.0)
        found = staged(model, fleet, planner=plan_stages, note=notes.append, auditor=auditor)
        found.keep_on_devices(optimizer, if_faster=True)
        for ids in given:
            loss = optimizer.step_whole(RATE, partial(found.gradients, rows(ids)), found.updated)
            if ids is given[0]:
                assert loss == pytest.approx(plain_gradients(plain, ids), rel=1e-5)
        assert found.resident is None
        assert found.plans.planner is plan_stages
        assert found.audit_s > 0
    (said,) = [note for note in notes if "optimizer state stay" in note]
    assert "adafactor" in said


def test_all_steps_in_the_log_have_the_same_plan() -> None:
    """Stages in the log have numbers."""
    with emulated(2, seed=1) as fleet:
        run, asked = Run(small_model("opt"), fleet), 0
        plan_for = run.staged.plans.plan_for

        def counted(*given: Any) -> Any:
            nonlocal asked
            asked += 1
            return plan_for(*given)

        run.staged.plans.plan_for = counted  # type: ignore[assignment, method-assign]
        first, second, third = batches(3)
        run.step(first)
        run.step(second)
        assert asked == 1
        run.staged.sync()
        run.step(third)
        assert asked == 2


def test_an_optimizer_that_devices_lack_is_refused() -> None:
    with emulated(2, seed=1) as fleet, pytest.raises(UsageError, match="adafactor"):
        Run(small_model("opt"), fleet, UpdateRule(OptimizerKind.ADAFACTOR))


def test_the_plan_of_logged_steps_stays_and_its_forecast_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other stages would need other inputs than the log has."""
    notes: list[str] = []
    with emulated(3, seed=1) as fleet:
        monkeypatch.setattr(fleet.runtime, "clock", "wall", raising=False)
        run = Run(small_model("opt"), fleet, note=notes.append)
        plans = []
        for slower, ids in enumerate(batches(5), 1):
            run.step(ids)
            rates = {d: one.for_graphs() for d, one in fleet.runtime.stage_devices().items()}
            first = min(rates)
            rates[first] = replace(rates[first], flops_per_s=rates[first].flops_per_s / 10**slower)
            with monkeypatch.context() as slow:
                slow.setattr(fleet.runtime, "stage_devices", lambda rates=rates: rates)
                run.staged.learn(1000.0, 0.5)
            assert run.staged.plan is not None
            plans.append(run.staged.plan)
        assert not [note for note in notes if "planned again" in note]
        assert all(plan.stages == plans[0].stages for plan in plans)
        assert plans[-1].step_s != plans[0].step_s


def test_state_moves_to_the_devices_of_a_better_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    with emulated(3, seed=1) as fleet:
        monkeypatch.setattr(fleet.runtime, "clock", "wall", raising=False)
        run = Run(small_model("opt"), fleet, note=notes.append, resident_planner=plan_resident)
        slow = 0
        for number, ids in enumerate(batches(5)):
            run.step(ids)
            assert run.staged.plan is not None
            devices = run.staged.plan.devices
            slow = slow or min(devices)
            assert (slow in devices) == (number < 4)
            rates = {d: one.for_graphs() for d, one in fleet.runtime.stage_devices().items()}
            if number >= 2:
                flops_per_s = rates[slow].flops_per_s / 1e6
                rates[slow] = replace(rates[slow], flops_per_s=flops_per_s)
            monkeypatch.setattr(fleet.runtime, "stage_devices", lambda rates=rates: rates)
            run.staged.learn(1000.0, 0.5)
        run.sync()
    run.check()
    assert len([note for note in notes if "planned again" in note]) == 1


@pytest.mark.slow
def test_the_snapshot_may_be_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server then needs memory for neither weights nor optimizer state of the layers."""
    monkeypatch.setattr(state_files, "LEAST_BYTES", 1)
    files = StateFiles(tmp_path, Patience(print, lambda: False, print))
    with emulated(3, seed=1) as fleet:
        run = Run(small_model("opt"), fleet, files=files)
        lost = losing(run.runtime, 150)
        for ids in batches(4):
            run.step(ids)
        run.sync()
        assert lost() > 0
    names = run.optimizer.on_devices
    assert names is not None
    for name in names.names:
        assert is_mapped(run.optimizer.parameters[name].data), name
        assert all(map(is_mapped, run.optimizer.hand_over(name)[1])), name
    run.check()


@pytest.mark.slow
@pytest.mark.parametrize(("family", "devices"), [("opt", 3), ("llama", 1), nightly("qwen3", 2)])
def test_a_restarted_server_repeats_no_pass_before_the_next_step(
    tmp_path: Path, family: str, devices: int
) -> None:
    """It has a snapshot and the log. Devices have no state, and fewer devices may be connected."""
    model, folder = small_model(family), LogFolder(tmp_path / "log")
    given = batches(7)
    expected = plain_losses(copy.deepcopy(model), given)
    begun = copy.deepcopy(model)
    with emulated(3, seed=1) as fleet:
        run = Run(model, fleet, log=folder)
        before = [run.step(ids) for ids in given[:5]]
    with emulated(devices, seed=2) as fleet:
        run = Run(begun, fleet, log=folder, stored=folder.after(0))
        again = [run.step(ids) for ids in given[:5]]
        assert fleet.counters().traffic.down.activations == 0
        after = [run.step(ids) for ids in given[5:]]
        run.staged.sync()
    assert again == before
    assert before + after == pytest.approx(expected, rel=1e-5)
    assert folder.numbers() == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("damage", [b"", b"damaged", None])
def test_a_damaged_file_ends_the_log(tmp_path: Path, damage: bytes | None) -> None:
    folder, given = LogFolder(tmp_path), batches(4)
    with emulated(2, seed=1) as fleet:
        run = Run(small_model("opt"), fleet, log=folder)
        for ids in given:
            run.step(ids)
    path = tmp_path / "step-000003.log"
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-9] + damage if damage else b"")
    assert len(folder.after(0)) == 2
    folder.keep(range(2, 3))
    assert folder.numbers() == [2]


@pytest.mark.slow
def test_a_full_disk_keeps_the_log_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a device that is lost later is rebuilt from there."""

    def full(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(step_log, "mapped_copy", full)
    with emulated(3, seed=1) as fleet:
        run = Run(small_model("opt"), fleet, log=tmp_path, note=print)
        lost = losing(run.runtime, 150)
        for ids in batches(4):
            run.step(ids)
        run.sync()
        assert lost() > 0
    assert "no space left" in capsys.readouterr().out
    run.check()


@pytest.mark.slow
def test_a_step_that_ends_before_it_is_logged_is_undone() -> None:
    """Devices did the updates, but the log lacks them."""
    with emulated(3, seed=1) as fleet:
        run, (first, *later) = Run(small_model("opt"), fleet), batches(4)
        run.step(first)
        for ids in later:
            interrupting = mock.patch.object(run.state.log, "add", side_effect=KeyboardInterrupt)
            with interrupting, pytest.raises(KeyboardInterrupt):
                run.step(ids)
            run.step(ids)
        run.sync()
    run.check()


def test_a_step_whose_update_is_refused_leaves_the_state_as_it_was() -> None:

    def diverged(run: Run, ids: Tensor) -> float:
        run.staged.gradients(rows(ids))
        return math.nan

    with emulated(3, seed=1) as fleet:
        run, (first, second, third) = Run(small_model("opt"), fleet), batches(3)
        run.step(first)
        with pytest.raises(DivergedError):
            run.optimizer.step_whole(RATE, lambda: diverged(run, third))
        run.sync()
        run.step(second)
        with pytest.raises(DivergedError):
            run.optimizer.step_whole(RATE, lambda: diverged(run, second))
        run.step(third)
        run.sync()
    run.check()


def test_a_snapshot_that_is_a_copy_of_the_weights_is_refused() -> None:
    """It would not change when the devices' state becomes the new snapshot."""
    with emulated(2, seed=1) as fleet, pytest.raises(UsageError, match="fp32"):
        Run(small_model("opt").bfloat16(), fleet)


def test_devices_of_an_endpoint_do_not_keep_state() -> None:
    """An endpoint has a copy of the first snapshot, which a new one does not change."""
    with emulated(2, seed=1) as fleet, pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleet.runtime, "keeps_state", EndpointRuntime.keeps_state)
        with pytest.raises(UsageError, match="Ray"):
            Run(small_model("opt"), fleet)
