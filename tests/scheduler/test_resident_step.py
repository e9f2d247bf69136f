"""Each update of trained state on devices counts once, whatever devices do meanwhile."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave.planner.plan import DeviceRates
from cleave.planner.stages.model import KeptBatches, PlannedStage
from cleave.protocol import messages
from cleave.scheduler.sessions.session import DeviceState, Session
from cleave.scheduler.stages.device import StageDevice
from cleave.scheduler.stages.outcomes import OutputReady, StepFailed, StepResult, UpdateWanted
from cleave.scheduler.stages.resident import KeptState, Lineage, ResidentParameter, Snapshot
from cleave.scheduler.stages.runs import StageRuns
from cleave.scheduler.stages.step import MAX_FAILURES, StageStep
from cleave.scheduler.stages.work import (
    LOSS_LAYER,
    LoggedStep,
    RequestKind,
    Resident,
    StageRequest,
    StepWork,
)
from cleave.scheduler.tiles.device_memory import Names
from tests.examples import examples
from tests.scheduler.stage_devices import (
    LOST,
    STEP_BATCHES,
    TOKENS,
    SymbolicDevice,
    SymbolicFleet,
    array,
    history_of,
    resident_of,
    step_work,
)
from tests.scheduler.test_stage_step import LAYERS, Trial, expected, rates_of, stages_of

_MOST_ANSWERS = 20_000  # with fewer answers, a step ends once devices stay and no order fails


class Runs(StageRuns):
    """The steps on devices whose sessions have no rates."""

    def __init__(self, present: Callable[[], Mapping[int, DeviceRates]]) -> None:
        self.sessions: dict[int, Session] = {}
        super().__init__(self.sessions, Names(), any_device=True)
        self._there = present

    def opened(self, device: int, arrays: str = "") -> Session:
        """Return the session of a device that joins or returns."""
        session = Session(device, 0.0, arrays=arrays or f"arrays of {device}")
        session.state = DeviceState.READY
        self.sessions[device] = session
        return session

    @property
    def able(self) -> dict[int, DeviceRates]:
        return dict(self._there())

    @property
    def step(self) -> StageStep | None:
        return self._step

    @property
    def fetches_snapshot(self) -> bool:
        return self._snapshot is not None


class Training(Trial):
    """Steps on a symbolic fleet that keeps the state, and the log, as the training thread does.

    Args:
        failing: probability that an order fails.
        frozen: layers that are not trained.
        head: whether a device has the state of the loss.
        tied: whether this device also computes the embedding.
    """

    def __init__(
        self,
        devices: int,
        *,
        memory_bytes: int = 2**30,
        rng: random.Random | None = None,
        failing: float = 0.0,
        frozen: Set[int] = frozenset(),
        head: bool = False,
        tied: bool = False,
    ) -> None:
        self.fleet = SymbolicFleet()
        self.failing = failing
        self._draw = (rng or random.Random(0)).random
        for device in range(1, devices + 1):
            self.fleet.devices[device] = self._device()
        self.away: set[int] = set()  # devices that may not take part now, but stay connected

        def present() -> dict[int, DeviceRates]:
            return {
                device: replace(rates, memory_bytes=memory_bytes)
                for device, rates in rates_of(self.fleet.devices.keys() - self.away).items()
            }

        self._present = present
        self.runs = Runs(present)
        self.stores = self.runs._stores
        for device in self.fleet.devices:
            self.runs.opened(device)
        self.kept: Sequence[KeptState] = ()  # what devices have after the last logged step
        self.frozen, self.tied = frozen, tied
        stages = stages_of([], [(1,)], head)
        self.first = step_work(LAYERS, 1, stages, frozen=frozen, tied=tied)
        self.resident = resident_of(self.first)
        self.log: list[LoggedStep] = []
        self.position = 0  # number of updates in the snapshot
        self.snapshots = 0  # number of snapshots that came during steps
        self.done: list[StepWork] = []  # the works of all completed steps
        self.scalars: list[Any] = []
        self.fetches = self.evaluates = False
        self.newcomer = devices + 1  # the next device that joins
        self.cut_off: dict[str, SymbolicDevice] = {}  # devices without a connection

    def _device(self) -> SymbolicDevice:
        return SymbolicDevice(fails=lambda: self._draw() < self.failing)

    def step_of(self, stages: list[PlannedStage], batches: int, **changed: Any) -> StepWork:
        """Return the work of the next step. Layers have the same graphs in all steps."""
        step = len(self.done)
        self.extra = f"extra {step}"
        extra = array(self.extra, 8)
        how: dict[str, Any] = {"step": step, "frozen": self.frozen, "tied": self.tied, **changed}
        made = step_work(LAYERS, batches, stages, **how)
        if (loss := self.first.loss) is not None:
            assert made.loss is not None
            loss = replace(loss, targets=made.loss.targets)
        layers = [
            replace(first, of_batch=layer.of_batch, extras={"extra": extra})
            for first, layer in zip(self.first.layers, made.layers, strict=True)
        ]
        first: dict[str, Any] = {"loss": loss, "embedding": self.first.embedding}
        return replace(made, layers=layers, resident=self._resident(), **first)

    def _resident(self) -> Resident:
        log = tuple(self.log)
        return replace(self.resident, log=log, position=self.position, kept=self.kept)

    def begin(self, work: StepWork) -> None:
        """Begin a step, or begin it again."""
        assert work.resident is not None
        self.work, self.fetches = work, work.resident.fetches
        self.evaluates = work.resident.evaluates
        self.given, self.scalars = set(), []
        self.fleet.told.clear()
        wanted = self.runs.begin(work, 0.0)
        assert self.runs.step is not None
        self.step = self.runs.step
        self._do(wanted)

    def begin_fetch(self) -> None:
        """Begin a step that fetches the state."""
        resident = replace(self._resident(), fetches=True)
        self.begin(replace(self.work, resident=resident, token=object()))

    def _do(self, wanted: Any) -> None:
        super()._do(wanted)
        for number, device in self.fleet.devices.items():
            known = number in self.stores or self.runs.occupied_bytes(number)
            assert known or not device.sizes, "a device keeps what nobody knows of"

    @property
    def wants_update(self) -> bool:
        asked = [outcome for outcome in self.fleet.told if isinstance(outcome, UpdateWanted)]
        assert len(asked) <= 1
        if asked:
            gradients = len(self.resident.parameters) + self.tied
            assert asked[0].squares == gradients * self.work.batches
            self._check_returned(asked[0])
        return bool(asked) and not self.scalars

    def give(self, key: Any) -> None:
        if self.evaluates and key[0] is OutputReady:
            self.given.add(key)  # the training thread computes the loss only
        else:
            super().give(key)

    def update(self) -> None:
        """Give the coefficients of the optimizer step."""
        self.scalars = [array(("scalars", len(self.done)), 4)]
        self._do(self.step.update(self.scalars))

    def answer(self, device: int, volume: float | None = None) -> None:
        order, run, found = self.fleet.devices[device].orders.popleft()
        if found == LOST:
            self._do(self.runs.refused(order, run))
        elif found is None:
            self._do(self.runs.answered(order, messages.Computed(run, 0.0), 0, 0.0))
        else:
            result = messages.Result(run, order.rows, order.columns, order.out, 0.0, found)
            self._do(self.runs.answered(order, result, 0, 0.0))

    def lose(self, device: int) -> None:
        del self.fleet.devices[device]
        del self.runs.sessions[device]
        self._do(self.runs.lost(device))

    def cut(self, device: int) -> str:
        """Cut a device's connection, in the middle of its orders. Return what `come_back` takes."""
        lost = self.fleet.devices.pop(device)
        lost.lose_connection(self._draw)
        session = self.runs.sessions.pop(device)
        self._do(self.runs.keep(session, 0.0))
        self._do(self.runs.lost(device))
        self.cut_off[session.arrays] = lost
        return session.arrays

    def come_back(self, arrays: str) -> None:
        """Connect a device again. What it still has counts only if the server awaits it."""
        device, self.newcomer = self.newcomer, self.newcomer + 1
        self.fleet.devices[device] = back = self.cut_off.pop(arrays)
        if self.runs.holders.awaits(arrays):
            session = self.runs.opened(device, arrays)
            session.held = frozenset(back.held)
        else:
            session = self.runs.opened(device)
            back.held, back.sizes = {}, {}
        self._do(self.runs.returned(session))

    def give_up(self) -> None:
        """Wait no longer for devices without a connection."""
        self._do(self.runs.expire(self.runs.holders.return_s))

    def restart(self) -> None:
        """Kill the PS and start it again. Some devices return before it goes on with the step."""
        running = not self.step.ended
        for device in list(self.fleet.devices):
            lost = self.fleet.devices.pop(device)
            lost.lose_connection(self._draw)
            self.cut_off[self.runs.sessions[device].arrays] = lost
        self.runs = Runs(self._present)
        self.stores = self.runs._stores
        self.runs.holders.expect(self.kept)
        for arrays in list(self.cut_off):
            if self._draw() < 0.5:
                self.come_back(arrays)
        if running:
            resident = replace(self._resident(), fetches=self.fetches, evaluates=self.evaluates)
            self.begin(replace(self.work, resident=resident, token=object()))

    def fail(self, device: int) -> None:
        self.fleet.devices[device].orders.clear()
        self._do(self.runs.failed(device, "it is tired"))

    def join(self, device: int) -> None:
        self.newcomer += 1
        self.fleet.devices[device] = self._device()
        self.runs.opened(device)
        self._do(self.runs.changed())

    def begin_snapshot(self) -> None:
        """Begin to fetch the state after the last step, while devices work on later steps."""
        self._do(self.runs.begin_snapshot(self.work, len(self.done)))

    def withdraw(self) -> None:
        """End the step in the middle, and begin it again."""
        self.runs.withdraw()
        self.begin(self.work if not self.fetches else replace(self.work, token=object()))

    def serve(self) -> None:
        """Do what the PS has to do now: give arrays and the optimizer's coefficients."""
        for key in list(self.outputs):
            self.give(key)
        if self.wants_update:
            self.update()

    def complete(self) -> StepResult:
        """Let devices answer until the step ends, and assert that it does not fail."""
        result = self.finish()
        assert isinstance(result, StepResult)
        return result

    def finish(self) -> Any:
        """Let devices answer until the step ends. Then log the step, or take the state."""
        answers = 0
        self.failing = 0.0
        while not self.step.ended:
            self.serve()
            if not self.step.ended and self.fleet.waiting:
                self.answer(min(self.fleet.waiting))
                answers += 1
                assert answers < _MOST_ANSWERS
            elif not self.step.ended:
                assert self.outputs or self.wants_update, "nobody does anything"
        return self.end()

    def end(self) -> Any:
        """Do what the training thread does when a step has ended. Return the result."""
        result = self.fleet.told[-1]
        if isinstance(result, StepFailed):
            return result
        assert isinstance(result, StepResult)
        assert self.runs.finished_snapshot(-1) is None  # it is of another model
        snapshot = self.runs.finished_snapshot(0)
        self._check_held()
        if self.fetches:
            assert snapshot is None
            self._take(Snapshot(len(self.done), result.state, result.holders))
            self.kept = ()
            return result
        if self.evaluates:
            self._check_evaluated(result)
            if snapshot is not None:
                self.snapshots += 1
                self._take(snapshot)
            return result
        self._check_returned(result)
        work = replace(self.work, resident=self.resident)
        x, dy = [one.x for one in result.records], [one.dy for one in result.records]
        self.log.append(LoggedStep(work, x, dy, self.scalars))
        self.done.append(self.work)
        if snapshot is not None:
            self.snapshots += 1
            self._take(snapshot)
        self.kept = self.runs.kept() if self.log else ()
        return result

    def _check_returned(self, result: UpdateWanted | StepResult) -> None:
        """Check the losses, and the gradients for an embedding on the PS."""
        expected = [self._expected(batch, self.work) for batch in range(self.work.batches)]
        losses, dx = ({b: s.value for b, s in each.items()} for each in (result.losses, result.dx))
        found = {b: ("loss", xs[-1], ("targets", b)) for b, (xs, _) in enumerate(expected)}
        assert losses == (found if self.work.loss is not None else {})
        assert dx == ({} if self.tied else {b: dys[0] for b, (_, dys) in enumerate(expected)})

    def _check_evaluated(self, result: StepResult) -> None:
        """Check that each micro-batch has the loss of the current state, and nothing else is left.

        Without the loss on a device, check the last outputs.
        """
        expected = [self._expected(batch, self.work)[0][-1] for batch in range(self.work.batches)]
        if self.work.loss is not None:
            found = {batch: loss.value for batch, loss in result.losses.items()}
            assert found == {b: ("loss", y, ("targets", b)) for b, y in enumerate(expected)}
        else:
            outputs = [outcome for outcome in self.fleet.told if isinstance(outcome, OutputReady)]
            assert {each.batch: each.payload.value for each in outputs} == dict(enumerate(expected))
        assert not result.gradients
        assert not result.dx
        assert not self.scalars

    def _check_held(self) -> None:
        """Check that devices have nothing but graphs, parameters and arguments of layers."""
        for number, device in self.fleet.devices.items():
            if number in self.stores and not self._is_busy(number):
                held = device.held.values()
                assert {value[0] for value in held if isinstance(value, tuple)} <= {"updated"}
                extras = {value for value in held if str(value).startswith("extra")}
                assert extras <= {self.extra}
                states = states_on(device)
                assert self.runs.fetches_snapshot or len(states) == len(set(states))

    def _is_busy(self, device: int) -> bool:
        """Return whether a device does something that does not end with the step."""
        return self.stores[device].waits or self.runs._spares.is_busy(device)

    def _take(self, snapshot: Snapshot) -> None:
        """Check the fetched state, and make it the snapshot, in the same memory."""
        found: dict[Any, Any] = {}
        for (state, first), payload in snapshot.state.items():
            row, value = payload.value
            assert row == first
            assert found.setdefault(state, value) == value, "rows are from different steps"
        assert found.keys() == self.resident.arrays
        assert len(snapshot.state) in (len(found), TOKENS * len(found))  # each row alone, or all
        for (layer, _), parameter in self.resident.parameters.items():
            values = [found[each] for each in parameter.arrays]
            self._check_state(layer, parameter, values, snapshot.position)
        for state, value in found.items():
            object.__setattr__(state.payload, "value", value)
            for number, part in enumerate(state.parts):
                object.__setattr__(part.payload, "value", (value, number))
        del self.log[: snapshot.position - self.position]
        self.position = snapshot.position

    def _check_state(
        self, layer: int, parameter: ResidentParameter, found: list[Any], position: int
    ) -> None:
        assert len(found) == len(parameter.arrays)
        for name, value in zip((f"w{layer}", f"m{layer}"), found, strict=True):
            of, updates = history_of(value)
            assert of == name
            assert len(updates) == position
            for step, (scalars, gradient) in enumerate(updates):
                assert scalars == ("scalars", step)
                pairs = []
                for batch in range(self.done[step].batches):
                    xs, dys = self._expected(batch, self.done[step], step)
                    if layer != LOSS_LAYER:
                        pairs.append((xs[layer], dys[layer + 1]))
                        continue
                    pairs.append((xs[-1], ("targets", batch)))
                    if self.tied:
                        pairs.append((("ids", step * STEP_BATCHES + batch), dys[0]))
                assert Counter(map(repr, gradient)) == Counter(map(repr, pairs))

    def _expected(self, batch: int, work: StepWork, step: int | None = None) -> Any:
        return expected(batch, work, len(self.done) if step is None else step)


def states_on(device: SymbolicDevice) -> list[str]:
    """Return the names of all weights and moments of trained layers on a device."""
    return sorted(history_of(v)[0] for v in device.held.values() if v[0] in ("updated", "w", "m"))


def drawn_stages(
    data: st.DataObject, devices: int, *, head: bool = False
) -> tuple[list[PlannedStage], frozenset[int]]:
    """Any cut into stages, each on any one device, and any layers on the PS.

    If `head`, the loss is in the last stage, or in a stage of its own.
    """
    cuts = sorted(data.draw(st.sets(st.integers(1, LAYERS - 1), max_size=3)))
    who: list[tuple[int, ...]] = [
        (data.draw(st.integers(1, devices)),) for _ in range(len(cuts) + 1)
    ]
    after = data.draw(st.frozensets(st.integers(0, len(cuts) - 1))) if cuts else frozenset()
    if head and data.draw(st.booleans()):
        alone = PlannedStage(LAYERS, LAYERS, (data.draw(st.integers(1, devices)),), loss=True)
        return [*stages_of(cuts, who, False), alone], after
    return stages_of(cuts, who, head), after


def disturbed(training: Training, rng: random.Random, trouble: float, events: int) -> None:
    """Let a step go on for some events. With probability `trouble`, an event is a disturbance."""
    failures = 0
    for _ in range(events):
        fleet = training.fleet
        normal: list[tuple[str, Any]] = [("answer", d) for d in fleet.waiting]
        normal += [("give", b) for b in training.outputs]
        normal += [("update", None)] * training.wants_update
        wrong: list[tuple[str, Any]] = [("lose", d) for d in fleet.devices]
        wrong += [("join", training.newcomer), ("withdraw", None)]
        wrong += [("cut", d) for d in fleet.devices]
        wrong += [("come_back", arrays) for arrays in training.cut_off] * 2
        wrong += [("give_up", None), ("restart", None)]
        if failures < MAX_FAILURES - 1:
            wrong += [("fail", d) for d in fleet.devices]
        what, number = rng.choice(wrong if not normal or rng.random() < trouble else normal)
        failures += what == "fail"
        getattr(training, what)(*([] if number is None else [number]))
        if training.step.ended:
            training.end()
            return


@mock.patch("cleave.scheduler.stages.device_arrays._PIECE_BYTES", 1)
@mock.patch("cleave.scheduler.stages.device._SNAPSHOT_BYTES", 1)
@settings(max_examples=examples(600), deadline=None)
@given(data=st.data())
def test_each_update_counts_once(data: st.DataObject) -> None:
    devices = data.draw(st.integers(1, 4))
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    failing = rng.choice([0.0, 0.0, 0.01, 0.1])
    trouble = rng.choice([0.0, 0.003, 0.01, 0.03, 0.1])
    roomy = rng.random() < 0.5 or failing > 0.01
    frozen = data.draw(st.sets(st.integers(0, LAYERS - 1), max_size=LAYERS - 1))
    memory_bytes, head = 2**30 if roomy else 0, data.draw(st.booleans())
    training = Training(
        devices, memory_bytes=memory_bytes, rng=rng, frozen=frozen, head=head,
        tied=head and data.draw(st.booleans()),
    )  # fmt: skip
    kept = KeptBatches(data.draw(st.integers(0, 2)), data.draw(st.integers(0, 2)))
    stages, after = drawn_stages(data, devices, head=head)
    for _ in range(rng.randint(1, 5)):
        if not training.log:
            stages, after = drawn_stages(data, devices, head=head)
        fetches = bool(training.done) and rng.random() < 0.3
        evaluates = rng.random() < 0.3
        completed = False
        while not completed:
            if fetches:
                training.begin_fetch()
            else:
                work = training.step_of(
                    stages,
                    data.draw(st.integers(1, 3)),
                    kept_batches=dict.fromkeys(range(1, 9), kept),
                    ps_after=after,
                )
                assert work.resident is not None
                resident = replace(work.resident, evaluates=evaluates)
                training.begin(replace(work, resident=resident))
            training.failing = failing
            disturbed(training, rng, trouble, rng.randint(0, 500))
            if not training.step.ended:
                training.join(training.newcomer)  # this device has not failed
                training.give_up()
                training.finish()
            completed = isinstance(training.fleet.told[-1], StepResult)
            # Between two steps:
            if training.step.ended and rng.random() < 0.5:
                training.begin_snapshot()
            if training.fleet.devices and rng.random() < trouble:
                training.fail(rng.choice(list(training.fleet.devices)))
            if training.fleet.devices and rng.random() < trouble:
                training.cut(rng.choice(list(training.fleet.devices)))
            if rng.random() < trouble:
                training.restart()
            if training.cut_off and rng.random() < 0.5:
                training.come_back(rng.choice(list(training.cut_off)))
            training.away = {d for d in training.fleet.devices if rng.random() < trouble}
    training.begin_fetch()
    training.join(training.newcomer)
    training.give_up()
    training.finish()
    training._do(training.runs.end())
    for arrays in list(training.cut_off):
        training.come_back(arrays)
    for device in training.fleet.devices.values():
        assert not device.held


class Audited(Training):
    """Training on devices some of which lie, and whose snapshots are audited at random.

    Attributes:
        found: whether an audit has found a lie. Training would then go back.
        blamed: how often a device was blamed.
    """

    def __init__(self, devices: int, *, rng: random.Random, liars: float, rate: float) -> None:
        self.rng, self.liars, self.rate = rng, liars, rate
        self.found, self.blamed = False, 0
        self.everyone: dict[int, SymbolicDevice] = {}
        super().__init__(devices, rng=rng)
        self.values = {a: a.payload.value for a in self.resident.arrays}  # type: ignore[union-attr]
        self.lineages: Set[Lineage] = frozenset()
        self.sound = set(range(LAYERS))

    def _device(self) -> SymbolicDevice:
        made = super()._device()
        if self.rng.random() < self.liars:
            made.lie = f"falsified {len(self.everyone)} {self.rng.random()}"
            made.falsifies = self.rng.random() < 0.5
            made.lies = lambda: self.rng.random() < 0.2
        return made

    def restart(self) -> None:
        self.lineages = frozenset()
        self.sound = set() if self.kept else set(range(LAYERS))
        super().restart()

    def _do(self, wanted: Any) -> None:
        self.everyone |= self.fleet.devices
        super()._do(wanted)

    def _take(self, snapshot: Snapshot) -> None:
        """Audit some stages as `ReplayAudits` does. Nobody honest is blamed."""
        found = {array: payload.value[1] for (array, _), payload in snapshot.state.items()}
        sound: set[int] = set()
        for number, stage in enumerate(self.work.stages):
            if self.rng.random() >= self.rate or not any(self.resident.of_stage(stage)):
                continue
            holder, layers = snapshot.holders[number], {*range(stage.first, stage.stop)}
            if self._follows(stage, found, snapshot.position):
                sound |= layers & self.sound
                continue
            self.found = True
            if layers <= self.sound or holder.continues(self.position, self.lineages):
                self.blamed += 1
                assert self.everyone[holder.device].lied, "an honest device is blamed"
        self.sound, self.values = sound, found
        held = (holding.lineage for holding in snapshot.holders.values())
        self.lineages = frozenset(lineage for lineage in held if lineage is not None)
        super()._take(snapshot)

    def _follows(self, stage: PlannedStage, found: Mapping[Any, Any], position: int) -> bool:
        """Return whether a stage's state follows from that in the last snapshot by all updates."""
        for each in self.resident.arrays_of(stage):
            before, after = (
                [scalars for scalars, _ in history_of(state[each])[1]]
                for state in (self.values, found)
            )
            right = [("scalars", step) for step in range(self.position, position)]
            if after != before + right:
                return False
        return True

    def _check_state(self, *_: Any) -> None:
        """State may be false."""


@pytest.mark.parametrize("rate", [0.4, 1.0])
@settings(max_examples=examples(100), deadline=None)
@given(data=st.data())
def test_audits_of_snapshots_blame_no_honest_device(rate: float, data: st.DataObject) -> None:
    """This also holds if a device continues with state that another device falsified."""
    devices = data.draw(st.integers(3, 5))
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    trouble = rng.choice([0.0, 0.003, 0.01, 0.03])
    training = Audited(devices, rng=rng, liars=rng.choice([0.0, 0.3, 0.6]), rate=rate)
    stages, after = drawn_stages(data, devices)
    while not training.found and len(training.done) < 8:
        if not training.log:
            stages, after = drawn_stages(data, devices)
        completed = False
        while not completed:
            if training.done and rng.random() < 0.2:
                training.begin_fetch()
            else:
                training.begin(training.step_of(stages, 2, ps_after=after))
            disturbed(training, rng, trouble, rng.randint(0, 500))
            if not training.step.ended:
                training.join(training.newcomer)
                training.give_up()
                training.finish()
            completed = isinstance(training.fleet.told[-1], StepResult)
        if training.step.ended and training.log and rng.random() < 0.6:
            training.begin_snapshot()
        if rng.random() < 0.5:  # a device that has followed a stage may take over
            training.away = {rng.choice(list(training.fleet.devices))}
            training.runs.changed()
        training.resident = replace(training.resident, copies=rng.choice((None, 0, 1)))
    lied = any(device.lied for device in training.everyone.values())
    assert lied or not training.found


TWO_STAGES = stages_of([2], [(1,), (2,)], False)


def test_after_a_restart_nobody_is_blamed_for_the_lie_of_another_device() -> None:
    """Device 1 returns a false snapshot. Device 3, which followed it, has the true state."""
    training = Audited(3, rng=random.Random(0), liars=0.0, rate=0.0)
    liar = training.fleet.devices[1]
    liar.falsifies, liar.lie = True, "falsified"
    completed(training)
    training.begin_snapshot()
    completed(training)
    completed(training)
    assert (training.snapshots, liar.lied) == (1, True)
    training.lose(1)
    completed(training)
    assert training.step._stages[0].devices == [3]
    for device in training.fleet.devices.values():
        device.before.clear()  # all messages arrived
    with mock.patch.object(training, "_draw", return_value=0.0):
        training.restart()
    completed(training)
    training.rate = 1.0
    training.begin_snapshot()
    completed(training)
    assert training.found
    assert not training.blamed


def completed(training: Training, batches: int = 2) -> None:
    """Do a step without disturbances."""
    training.begin(training.step_of(TWO_STAGES, batches))
    training.complete()


def begun(
    devices: int,
    *,
    steps: int = 1,
    copies: int | None = None,
    following: Sequence[int] = (),
    **how: Any,
) -> Training:
    """Return a training after some steps without disturbances.

    Args:
        copies: most stages that hot spares follow.
        following: hot spares that repeat each step at once.
    """
    training = Training(devices, **how)
    training.resident = replace(training.resident, copies=copies)
    for _ in range(steps):
        completed(training)
        for device in following:
            spare_ready(training, device)
    return training


def fetched(training: Training) -> None:
    """Complete the step that has begun. Then fetch and check the state."""
    if not training.step.ended:
        training.complete()
    training.begin_fetch()
    training.complete()


def break_order(device: SymbolicDevice) -> None:
    """Let the next order of a device fail, and those that follow it."""
    order, run, _ = device.orders[0]
    device.orders[0], device.failed = (order, run, LOST), True


def until_asked(training: Training, device: int, kind: RequestKind) -> None:
    """Let all devices answer until a device's first order is of a kind."""
    while True:
        training.serve()
        waiting = training.fleet.waiting
        if device in waiting and waiting[device].orders[0][0].request.kind is kind:
            return
        training.answer(min(d for d in waiting if d != device or len(waiting) == 1))


def without_device_1(training: Training) -> None:
    """Do a step in which device 1 may not take part, and answers nothing."""
    training.away = {1}
    training.begin(training.step_of(TWO_STAGES, 2))
    while not training.step.ended:
        training.serve()
        training.answer(max(training.fleet.waiting))
    training.end()
    training.away = set()


def test_state_that_a_withdrawn_step_updated_is_not_used() -> None:
    """Device 1 updated its layers and device 2 did not, so the log lacks the step."""
    training = begun(2)
    training.begin(training.step_of(TWO_STAGES, 2))
    until_asked(training, 2, RequestKind.UPDATE)
    while 1 in training.fleet.waiting:
        training.answer(1)
    training.withdraw()
    fetched(training)


@pytest.mark.parametrize("early", [True, False])
def test_devices_go_on_with_their_state_after_a_restart(early: bool) -> None:
    """Whether they return before the first step or during it. Nobody gets the snapshot again."""
    training = begun(2, steps=2)
    with mock.patch.object(training, "_draw", return_value=0.0 if early else 0.9):
        for device in training.fleet.devices.values():
            device.before.clear()  # all messages arrived
            device.sent.clear()
        training.restart()
    assert bool(training.cut_off) != early
    training.begin(training.step_of(TWO_STAGES, 2))
    for arrays in list(training.cut_off):
        training.come_back(arrays)
    training.complete()
    for device in training.fleet.devices.values():
        assert not [value for value in device.sent if value[0] in ("w", "m", "updated")]
    fetched(training)


@pytest.mark.parametrize("why", ["the job ends", "other work begins", "nothing begins"])
def test_a_restarted_server_lets_devices_drop_state_that_no_step_needs(why: str) -> None:
    training = begun(2)
    with mock.patch.object(training, "_draw", return_value=0.0):
        training.restart()
    assert all(training.runs.occupied_bytes(d) for d in training.fleet.devices)
    if why == "the job ends":
        training._do(training.runs.end())
    elif why == "other work begins":
        training._do(training.runs.expect_none())
    else:
        for now_s in (5.0, 100.0, 605.0):
            assert all(training.runs.occupied_bytes(d) for d in training.fleet.devices)
            training._do(training.runs.expire(now_s))
    assert not any(device.held for device in training.fleet.devices.values())


def test_new_arrays_have_other_ids_than_those_of_an_earlier_process() -> None:
    training = begun(2)
    used = {id for device in training.fleet.devices.values() for id in device.held}
    training.restart()
    training.join(9)
    training.begin(training.step_of(TWO_STAGES, 2))
    training.give_up()
    training.complete()
    assert used.isdisjoint(training.fleet.devices[9].held)


def test_a_device_that_fails_after_a_step_drops_its_arrays() -> None:
    training = begun(2)
    training.fail(2)
    assert not training.fleet.devices[2].held
    completed(training)
    fetched(training)


def test_arguments_of_logged_steps_do_not_stay_on_devices() -> None:
    training = begun(2, steps=4)
    training.lose(1)
    training.join(3)
    completed(training)  # checks what devices hold
    assert [value for value in training.fleet.devices[3].sent if str(value).startswith("extra")]
    fetched(training)


def test_a_stage_without_trained_layers_has_nothing_to_update() -> None:
    training = begun(2, frozen={0, 1})
    training.lose(2)
    training.join(3)
    completed(training)
    fetched(training)


def test_a_stage_without_trained_layers_stays_on_its_device() -> None:
    training = begun(2, frozen={2, 3})
    training.begin(training.step_of(TWO_STAGES, 2))
    assert [stage.devices for stage in training.step._stages] == [[1], [2]]
    training.finish()
    fetched(training)


def test_state_that_is_only_kept_for_a_snapshot_is_not_current() -> None:
    """Device 1 misses a step, and still has the state before that step for the snapshot."""
    training = begun(3)
    training.begin_snapshot()
    without_device_1(training)
    assert training.fleet.waiting.keys() == {1}
    completed(training)
    assert training.snapshots == 1
    fetched(training)


def test_state_that_has_been_returned_for_a_snapshot_is_dropped() -> None:
    training = begun(3)
    training.begin_snapshot()
    without_device_1(training)
    assert states_on(training.fleet.devices[1]) == ["m0", "m1", "w0", "w1"]
    while 1 in training.fleet.waiting:
        training.answer(1)
    assert not states_on(training.fleet.devices[1])
    fetched(training)


@pytest.mark.parametrize("why", ["lost", "failed", "refused"])
def test_what_is_kept_for_a_snapshot_that_cannot_end_is_dropped(why: str) -> None:
    """And another snapshot can begin."""
    training = begun(3)
    training.begin_snapshot()
    without_device_1(training)
    assert states_on(training.fleet.devices[1])
    if why == "lost":
        training.lose(2)
    elif why == "failed":
        training.fail(2)
    else:
        break_order(training.fleet.devices[1])
        training.answer(1)
    assert not states_on(training.fleet.devices[1])
    completed(training)
    assert training.snapshots == 0
    training.begin_snapshot()
    completed(training)
    assert training.snapshots == 1
    fetched(training)


def test_a_snapshot_is_not_finished_while_a_piece_is_on_its_way() -> None:
    training = begun(2)
    training.begin_snapshot()
    while training.fleet.waiting:
        assert training.runs.finished_snapshot(0) is None
        training.answer(min(training.fleet.waiting))
    snapshot = training.runs.finished_snapshot(0)
    assert snapshot is not None
    training._take(snapshot)
    fetched(training)


@pytest.mark.parametrize("snapshots", [0, 1])
def test_a_device_with_another_stage_has_state_once_and_what_a_snapshot_needs(
    snapshots: int,
) -> None:
    """Device 1 gets the state of its layers again, with that of one more layer."""
    training = begun(2)
    fetched(training)
    if snapshots:
        training.begin_snapshot()
    training.begin(training.step_of(stages_of([3], [(1,), (2,)], False), 2))
    training.complete()
    assert states_on(training.fleet.devices[1]) == ["m0", "m1", "m2", "w0", "w1", "w2"]
    assert training.snapshots == snapshots
    fetched(training)


def test_a_piece_that_waits_for_a_careful_device_outlives_the_step() -> None:
    training = begun(2)
    training.stores[1].be_careful(2**30)
    training.fleet.devices[1].failed = True  # an order, before
    training.begin_snapshot()
    training.begin(training.step_of(TWO_STAGES, 2))
    training.answer(1)  # the first piece
    training.answer(1)  # the first order of the step, which the second piece follows
    assert len(training.fleet.devices[1].orders) == 1
    training.withdraw()
    training.finish()
    completed(training)
    assert training.snapshots == 1
    fetched(training)


def test_what_is_kept_for_a_snapshot_is_dropped_in_the_end() -> None:
    training = begun(2)
    training.begin_snapshot()
    training._do(training.runs.end())
    assert not any(device.held for device in training.fleet.devices.values())


def test_state_whose_update_failed_is_restored() -> None:
    training = begun(2)
    training.begin(training.step_of(TWO_STAGES, 2))
    while not training.wants_update:
        for key in list(training.outputs):
            training.give(key)
        if training.fleet.waiting:
            training.answer(min(training.fleet.waiting))
    training.fleet.devices[1].fails = lambda: True
    training.update()
    training.fleet.devices[1].fails = lambda: False
    training.answer(1)
    assert LOST not in training.fleet.devices[1].held.values()
    fetched(training)


def test_a_failed_order_for_squares_costs_no_pass_where_an_order_failed_before() -> None:
    training = begun(2)
    for store in training.stores.values():
        store.be_careful(2**30)
    training.begin(training.step_of(TWO_STAGES, 2))
    until_asked(training, 1, RequestKind.SQUARES)
    training.fleet.devices[1].fails = lambda: True
    training.answer(1)  # The next order adds to the result of this one, and fails.
    training.fleet.devices[1].fails = lambda: False
    assert training.fleet.devices[1].orders[0][2] == LOST
    training.complete()
    assert training.step.repeated == 0
    fetched(training)


def test_squares_and_state_are_no_usual_gradients() -> None:
    training = begun(2)
    (usual,) = training.runs._usual.values()
    assert not usual._usual


def test_each_message_with_the_snapshot_has_its_own_payload() -> None:
    """Else the server may send one that it compressed before the snapshot changed."""
    training = Training(2)
    store = StageDevice(9, Names(), training.step_of(TWO_STAGES, 1))
    request = StageRequest(RequestKind.RESTORE, 0, TWO_STAGES[0], -1, 9)
    payloads: list[Any] = []
    for _ in range(2):
        store.drop_state(training.resident.arrays)
        store.restore(request)
        puts = [sent.message for sent in store.take() if isinstance(sent.message, messages.Put)]
        payloads += [put.payload for put in puts]
    assert len({id(payload) for payload in payloads}) == len(payloads) == 2 * 2 * (1 + 2)


def spare_ready(training: Training, device: int) -> None:
    """Let a hot spare repeat all logged steps."""
    while training.runs._spares.is_busy(device):
        training.answer(device)


def test_a_hot_spare_takes_over_without_a_snapshot() -> None:
    """It repeats no step if it has kept up, and the steps that it has not repeated otherwise."""
    for keeps_up in (True, False):
        training = begun(3, steps=4, following=[3] if keeps_up else [])
        spare = training.fleet.devices[3]
        received = len(spare.sent)
        training.begin(training.step_of(TWO_STAGES, 2))
        if keeps_up:
            spare_ready(training, 3)
        training.lose(1)  # device 3 has no time for the other stage
        assert training.step._stages[0].devices == [3]
        training.complete()
        assert not [v for v in spare.sent[received:] if str(v).startswith(("w", "m"))]
        fetched(training)


@pytest.mark.parametrize("answers", [True, False])
def test_a_hot_spare_continues_in_the_middle_of_a_step(answers: bool) -> None:
    """It does not repeat the micro-batches that it has repeated before the device was lost."""
    training = begun(3, steps=2, following=[3])
    training.begin(training.step_of(TWO_STAGES, 4))
    stage, spare = training.step._stages[0], training.fleet.devices[3]
    while not stage.accumulators or len(stage.accumulators[0].batches) < 2:
        for key in list(training.outputs):
            training.give(key)
        training.answer(min(d for d in training.fleet.waiting if d != 3))
    while answers and spare.orders:
        training.answer(3)
    done, received = set(stage.accumulators[0].batches), len(spare.sent)
    training.lose(1)
    assert stage.devices == [3]
    result = training.complete()
    assert {b for b, device in result.records[0].backward_by.items() if device == 1} == done
    gradients = [v for v in spare.sent[received:] if v[0] == "dx"]
    assert len(gradients) == 4 - len(done)
    fetched(training)


@pytest.mark.parametrize("fails", [True, False])
def test_a_hot_spare_that_gets_another_stage_follows_no_more(fails: bool) -> None:
    """If one of its orders fails, it keeps only what its own stage needs."""
    training = begun(4, steps=2, following=[3, 4])
    training.begin(training.step_of(TWO_STAGES, 4))
    training.lose(3)
    training.lose(1)
    assert [stage.devices for stage in training.step._stages] == [[4], [2]]
    spare = training.fleet.devices[4]
    if fails:
        break_order(spare)
        training.answer(4)
    training.complete()
    assert 4 not in training.runs._spares.devices or not training.runs._spares.is_busy(4)
    completed(training)
    fetched(training)


@pytest.mark.parametrize("complete", [True, False])
def test_hot_spares_forget_a_step_that_is_not_logged(complete: bool) -> None:
    training = begun(3, following=[3])
    training.begin(training.step_of(TWO_STAGES, 4))
    while not training.runs._spares.is_busy(3) if not complete else not training.step.ended:
        training.serve()
        training.answer(min(training.fleet.waiting))
    training.withdraw()
    spare_ready(training, 3)
    training.finish()
    spare_ready(training, 3)
    training.begin(training.step_of(TWO_STAGES, 2))
    training.lose(1)
    fetched(training)


def test_hot_spares_follow_no_more_stages_than_they_may() -> None:
    training = Training(5)
    for most in (0, 1, 2, 1, 0, None):
        training.resident = replace(training.resident, copies=most)
        completed(training)
        followed = {number for _, number in training.runs._spares._copies}
        assert len(followed) == (2 if most is None else most)
        for device in training.runs._spares.devices:
            spare_ready(training, device)
    fetched(training)


def completed_without(training: Training, silent: int) -> None:
    """End the step, although one device answers nothing."""
    while not training.step.ended:
        training.serve()
        training.answer(min(d for d in training.fleet.waiting if d != silent))
    training.end()


def test_a_hot_spare_that_is_too_slow_is_left_alone() -> None:
    """Else it would receive one snapshot after another, and never catch up."""
    training = Training(3)
    for _ in range(12):
        training.begin(training.step_of(TWO_STAGES, 2))
        completed_without(training, 3)
    assert not training.runs._spares.devices
    spare_ready(training, 3)
    training.fleet.devices[3].orders.clear()
    completed(training)
    assert not states_on(training.fleet.devices[3])
    fetched(training)


def test_a_hot_spare_that_is_behind_when_the_state_is_fetched_follows_again() -> None:
    """The log is then empty, so it needs the snapshot, and that is not its fault."""
    training = Training(3)
    for _ in range(3):
        training.begin(training.step_of(TWO_STAGES, 2))
        completed_without(training, 3)
    fetched(training)
    completed(training)
    assert training.runs._spares.devices == {3}
    spare_ready(training, 3)
    fetched(training)


def test_the_device_that_held_a_stage_keeps_it_if_others_have_the_same_state() -> None:
    """Unless another one of them is planned for the stage."""
    training = Training(4)
    training.away = {1, 3}
    completed(training)
    training.away = {1}
    completed(training)
    spare_ready(training, 3)
    fetched(training)
    spare_ready(training, 3)
    training.begin(training.step_of(TWO_STAGES, 2))
    assert [stage.devices for stage in training.step._stages] == [[4], [2]]
    training.finish()
    fetched(training)


def test_a_device_without_a_stage_may_leave_during_a_snapshot() -> None:
    training = begun(4)
    training.begin_snapshot()
    training.lose(3)
    training.fail(4)
    completed(training)
    assert training.snapshots == 1
    fetched(training)


def test_a_hot_spare_whose_order_fails_follows_no_more() -> None:
    training = begun(3, steps=2)
    spare = training.fleet.devices[3]
    training.begin(training.step_of(TWO_STAGES, 2))
    break_order(spare)
    training.answer(3)
    assert not spare.orders
    assert not spare.held
    training.complete()
    completed(training)
    assert not spare.held
    fetched(training)


def test_a_device_that_returns_in_time_continues_with_its_stage() -> None:
    """And meanwhile, no other device gets the stage."""
    training = begun(2, steps=3)
    training.begin(training.step_of(TWO_STAGES, 2))
    training.answer(1)
    training._draw = lambda: 0.0  # the device has all that it was sent
    arrays = training.cut(1)
    training.join(3)
    assert training.step._stages[0].devices == []
    training.come_back(arrays)
    (back,) = training.step._stages[0].devices
    training.complete()
    assert back == 4
    fetched(training)


def test_a_device_that_returns_late_takes_its_stage_back_from_one_that_restores_it() -> None:
    training = begun(2, steps=3, copies=0)
    training.begin(training.step_of(TWO_STAGES, 2))
    training._draw = lambda: 0.0
    arrays = training.cut(1)
    training.join(3)
    training.give_up()
    assert training.step._stages[0].devices == [3]
    training.come_back(arrays)
    assert training.step._stages[0].devices == [4]
    training.complete()
    assert not states_on(training.fleet.devices[3])
    fetched(training)


def test_a_device_that_missed_steps_only_repeats_those() -> None:
    training = Training(3)
    training.runs._spares._unfit.add(3)  # it does not follow
    for _ in range(3):
        completed(training)
    training._draw = lambda: 0.0
    arrays = training.cut(1)
    training.give_up()
    completed(training)  # on device 3
    training.come_back(arrays)
    back = max(training.fleet.devices)
    received = len(training.fleet.devices[back].sent)
    completed(training)
    spare_ready(training, back)
    training.lose(3)
    completed(training)
    later = training.fleet.devices[back].sent[received:]
    assert not [value for value in later if str(value).startswith(("w", "m"))]
    fetched(training)


def test_a_device_with_older_state_takes_a_stage_from_one_that_begins_with_the_snapshot() -> None:
    training = begun(3, steps=6, copies=0)
    training._draw = lambda: 0.0
    arrays = training.cut(1)
    training.give_up()
    completed(training)  # on device 3
    training.begin(training.step_of(TWO_STAGES, 2))
    training.join(4)
    training.lose(3)
    assert training.step._stages[0].devices == [4]  # which must repeat seven steps
    training.come_back(arrays)
    back = max(training.fleet.devices)
    assert training.step._stages[0].devices == [back]
    received = len(training.fleet.devices[back].sent)
    training.complete()
    later = training.fleet.devices[back].sent[received:]
    assert not [value for value in later if str(value).startswith(("w", "m"))]
    assert not states_on(training.fleet.devices[4])
    fetched(training)


def test_a_device_that_joins_while_a_stage_is_restored_follows_at_once() -> None:
    training = begun(2, steps=3)
    training.begin(training.step_of(TWO_STAGES, 2))
    training.join(3)
    training.lose(1)
    assert training.step._stages[0].devices == [3]
    training.join(4)
    assert training.runs._spares.devices == {4}
    fetched(training)


def test_a_fetch_is_not_done_before_the_state_has_arrived() -> None:
    training = begun(2)
    training.begin_fetch()
    assert training.step.tasks() == (0, 2)
    training.finish()
    assert training.step.tasks() == (2, 2)
