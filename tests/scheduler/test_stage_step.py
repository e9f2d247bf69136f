"""A step by stages gives each micro-batch to each layer once, whatever devices do meanwhile."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave.planner.plan import DeviceRates
from cleave.planner.stages.model import HeadSlice, KeptBatches, PlannedStage
from cleave.scheduler.instructions import Note
from cleave.scheduler.stages.device import StageDevice
from cleave.scheduler.stages.outcomes import (
    GradientWanted,
    InputWanted,
    OutputReady,
    SlicesBack,
    SlicesReady,
    StepFailed,
    StepResult,
    Suspect,
    UpdateWanted,
)
from cleave.scheduler.stages.step import MAX_FAILURES, StageStep
from cleave.scheduler.stages.work import RequestKind, StepWork, slice_layer
from cleave.scheduler.tiles.device_memory import Names
from tests.examples import examples
from tests.scheduler.stage_devices import (
    LOST,
    MANY_ROWS,
    STEP_BATCHES,
    SUM_ROWS,
    SymbolicDevice,
    SymbolicFleet,
    array,
    step_work,
)

LAYERS = 4
_OTHERS = StepResult | StepFailed | Suspect | UpdateWanted  # these ask for no array


def rates_of(devices: Iterable[int]) -> dict[int, DeviceRates]:
    return {d: DeviceRates(d, 1e6 * d, 1e6, 1e6) for d in devices}


class Shout(bytes):
    """A symbol that has numbers, too."""

    value: Any

    @classmethod
    def of(cls, symbol: Any, volume: float) -> Shout:
        made = cls(np.full(symbol.nbytes // 4, volume, np.float32).tobytes())
        made.value = symbol.value
        return made


class Trial:
    """A step on a symbolic fleet, whose devices answer, fail, go and come as a test says."""

    def __init__(
        self,
        work: StepWork,
        devices: int,
        *,
        memory_bytes: int = 2**30,
        rng: random.Random | None = None,
        failing: float = 0.0,
    ) -> None:
        draw = (rng or random.Random(0)).random
        self.fleet = SymbolicFleet()
        self.fleet.devices = {
            d: SymbolicDevice(fails=lambda: draw() < failing) for d in range(1, devices + 1)
        }
        self.stores: dict[int, StageDevice] = {}

        def present() -> dict[int, DeviceRates]:
            return {
                d: replace(rates, memory_bytes=memory_bytes)
                for d, rates in rates_of(self.fleet.devices).items()
            }

        self.step = StageStep(work, self.stores, present, Names())
        self.given: set[Any] = set()
        self.resolved = 0  # of what it was told to be suspect
        self.volume = 1.0
        self._do(self.step.begin())

    def _do(self, wanted: Any) -> None:
        self.fleet.carry_out(wanted)
        self.step.validate()
        for device, store in self.stores.items():
            if device in self.fleet.devices and not store.waits:
                assert store.occupied_bytes == sum(self.fleet.devices[device].sizes.values())

    @property
    def outputs(self) -> dict[Any, Any]:
        """Return what is told of micro-batches that nothing was made of yet."""
        told = {
            (type(o), o.batch, getattr(o, "stage", None)): o
            for o in self.fleet.told
            if not isinstance(o, _OTHERS)
        }
        others = sum(isinstance(o, _OTHERS) for o in self.fleet.told)
        assert len(told) + others == len(self.fleet.told)
        return {key: outcome for key, outcome in told.items() if key not in self.given}

    @property
    def suspects(self) -> list[Suspect]:
        """Return what is to be resolved: one at a time."""
        return [o for o in self.fleet.told if isinstance(o, Suspect)][self.resolved :]

    def resolve(self, how: str) -> None:
        """Say that what is suspect is right, or wrong, or so wrong that its device has to go."""
        (suspect,) = self.suspects
        self.resolved += 1
        if how == "lie" and suspect.device in self.fleet.devices:
            self.lose(suspect.device)
        self._do(self.step.resolve(right=how == "right", reason="it is odd"))

    def shout(self, device: int) -> None:
        """Answer with numbers that are larger than all before."""
        self.volume *= 1e3
        self.answer(device, self.volume)

    def answer(self, device: int, volume: float | None = None) -> None:
        order, run, found = self.fleet.devices[device].orders.popleft()
        if volume is not None and found is not None and found != LOST:
            found = Shout.of(found, volume)
        if found == LOST:
            self._do(self.step.refused(order, run))
        elif found is None:
            self._do(self.step.computed(order, run))
        else:
            self._do(self.step.fetched(order, run, found))

    def give(self, key: Any) -> None:
        """Make of an outcome what the training thread would."""
        outcome, targets = self.outputs[key], ("targets", key[1])
        self.given.add(key)
        made: Any
        after = key[2]
        match outcome:
            case InputWanted(payload=y):
                made = ("here", y.value)
            case GradientWanted(payload=dx):
                made = ("back", dx.value)
            case OutputReady(payload=y):
                made = ("dy", y.value, targets)
            case SlicesReady(payloads=payloads):
                y = payloads[0].value[2]
                numbers = range(len(payloads))
                assert [p.value for p in payloads] == [
                    ("found", str(n), y, targets) for n in numbers
                ]
                made = ("total", y, targets)
            case SlicesBack(payloads=payloads):
                _, _, y, _, total = payloads[0].value
                assert total == ("total", y, targets)
                assert [p.value for p in payloads] == [
                    ("part", str(n), y, targets, total) for n in range(len(payloads))
                ]
                made = ("dy", y, targets)
        self._do(self.step.give(outcome.batch, array(made), after))

    def lose(self, device: int) -> None:
        del self.fleet.devices[device]
        self._do(self.step.lost(device))

    def fail(self, device: int) -> None:
        self.fleet.devices[device].orders.clear()
        self._do(self.step.failed(device, "it is tired"))

    def join(self, device: int) -> None:
        self.fleet.devices[device] = SymbolicDevice()
        self._do(self.step.changed())

    def finish(self) -> Any:
        """Let devices answer until the step ends; return how it did."""
        done, of = self.step.tasks()
        repeated = self.step.repeated
        while not self.step.ended:
            for batch in list(self.outputs):
                self.give(batch)
            for _ in self.suspects:
                self.resolve("right")
            if not self.step.ended and not self.outputs and not self.suspects:
                self.answer(min(self.fleet.waiting))
            before, (done, of) = done, self.step.tasks()
            lost, repeated = repeated, self.step.repeated
            assert before <= done <= of or lost < repeated
        assert isinstance(self.fleet.told[-1], StepFailed) or done == of
        return self.fleet.told[-1]


def expected(batch: int, work: StepWork, step: int = 0) -> tuple[list[Any], list[Any]]:
    """The input and the output's gradient of every layer for a micro-batch.

    The last input is that of the loss, and the first gradient that of the first input.
    """
    here = {work.stages[number].stop for number in work.ps_after}
    xs: list[Any] = [("x", step * STEP_BATCHES + batch)]
    for layer in range(len(work.layers)):
        y = ("y", str(layer), xs[-1])
        xs.append(("here", y) if layer + 1 in here else y)
    dys: list[Any] = [("dy", xs[-1], ("targets", batch))]
    for layer in reversed(range(len(work.layers))):
        dy = ("back", dys[-1]) if layer + 1 in here else dys[-1]
        dys[-1] = dy
        dys.append(("dx", str(layer), xs[layer], dy))
    return xs, dys[::-1]


def check(result: Any, work: StepWork) -> None:
    """Every micro-batch is in the sums of every layer once, with the right numbers."""
    assert isinstance(result, StepResult)
    batches = range(len(work.x))
    for layer in range(len(work.layers)):
        found = [pair for (part,) in result.gradients[layer, "w"] for pair in part.value[1]]
        wanted = [(expected(b, work)[0][layer], expected(b, work)[1][layer + 1]) for b in batches]
        assert sorted(map(repr, found)) == sorted(map(repr, wanted))
    assert {b: dx.value for b, dx in result.dx.items()} == {
        b: expected(b, work)[1][0] for b in batches
    }
    if work.loss is not None:
        losses = {b: loss.value for b, loss in result.losses.items()}
        assert losses == {b: ("loss", expected(b, work)[0][-1], ("targets", b)) for b in batches}
        found = [pair for (part,) in result.gradients[-1, "h"] for pair in part.value[1]]
        wanted = [(expected(b, work)[0][-1], ("targets", b)) for b in batches]
        assert sorted(map(repr, found)) == sorted(map(repr, wanted))
    for number in range(len(work.slices)):
        sums = result.gradients[slice_layer(number), "h"]
        found = [each for (part,) in sums for each in part.value[1]]
        ends: list[Any] = [(expected(b, work)[0][-1], ("targets", b)) for b in batches]
        wanted = [(*end, ("total", *end)) for end in ends]
        assert sorted(map(repr, found)) == sorted(map(repr, wanted))


def slices_of(who: list[tuple[int, ...]]) -> list[PlannedStage]:
    return [
        PlannedStage(LAYERS, LAYERS, devices, slice=HeadSlice(number, len(who)))
        for number, devices in enumerate(who)
    ]


def stages_of(cuts: list[int], devices: list[tuple[int, ...]], loss: bool) -> list[PlannedStage]:
    bounds = [0, *cuts, LAYERS]
    spans = list(pairwise(bounds))
    return [
        PlannedStage(first, stop, who, loss and stop == LAYERS)
        for (first, stop), who in zip(spans, devices, strict=True)
    ]


def drawn_work(data: st.DataObject, devices: int) -> StepWork:
    """Any cut into stages and slices, with any devices and any layers on the PS."""

    def who() -> tuple[int, ...]:
        return tuple(sorted(data.draw(st.sets(st.integers(1, devices), min_size=1))))

    loss = data.draw(st.booleans())
    cuts = sorted(data.draw(st.sets(st.integers(1, LAYERS - 1), max_size=3)))
    count = 0 if loss else data.draw(st.integers(0, 3))
    kept = KeptBatches(data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3)))
    return step_work(
        LAYERS,
        data.draw(st.integers(1, 5)),
        stages_of(cuts, [who() for _ in range(len(cuts) + 1)], loss),
        data.draw(st.sampled_from([SUM_ROWS, MANY_ROWS])),
        slices_of([who() for _ in range(count)]),
        kept_batches=dict.fromkeys(range(1, 9), kept),
        ps_after=data.draw(st.frozensets(st.integers(0, len(cuts) - 1))) if cuts else frozenset(),
    )


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_devices_that_answer_fail_go_and_come_in_any_order(data: st.DataObject) -> None:
    devices = data.draw(st.integers(1, 5))
    work = drawn_work(data, devices)
    trial = Trial(work, devices)
    failed: set[int] = set()
    newcomer = devices
    for _ in range(data.draw(st.integers(0, 80))):
        if trial.step.ended:
            break
        choices: list[tuple[str, Any]] = [("answer", d) for d in trial.fleet.waiting] * 6
        choices += [("shout", d) for d in trial.fleet.waiting] * 3
        choices += [("resolve", how) for _ in trial.suspects for how in ("right", "lie")] * 3
        choices += [("give", b) for b in trial.outputs] * 6
        choices += [("lose", d) for d in trial.fleet.devices]
        choices += [("join", newcomer + 1)]
        if len(failed) < MAX_FAILURES - 1:
            choices += [("fail", d) for d in trial.fleet.devices]
            choices += [("resolve", "wrong") for _ in trial.suspects]
        what, number = data.draw(st.sampled_from(choices))
        newcomer += what == "join"
        if what == "fail":
            failed.add(number)
        if number == "wrong":
            failed.add(trial.suspects[0].device)
        getattr(trial, what)(number)
    if trial.fleet.told and isinstance(trial.fleet.told[-1], StepFailed):
        assert failed
        assert trial.fleet.devices.keys() <= failed  # there is nobody to wait for
        return
    if not trial.step.ended:
        trial.join(newcomer + 1)  # one at least is there, and has not failed
        trial.finish()
    check(trial.fleet.told[-1], work)


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_orders_that_fail_now_and_then_are_done_again_and_each_counts_once(
    data: st.DataObject,
) -> None:
    """Also on the only device, and on one without memory for two sums of a layer."""
    devices = data.draw(st.integers(1, 3))
    failing = data.draw(st.sampled_from([0.0, 0.03, 0.3, 0.6]))
    roomy = data.draw(st.booleans()) or failing > 0.03
    work = drawn_work(data, devices)
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    trial = Trial(work, devices, memory_bytes=2**30 if roomy else 0, rng=rng, failing=failing)
    check(trial.finish(), work)
    assert not any(store.waits for store in trial.stores.values())
    for device in trial.fleet.devices.values():  # nothing is left but graphs and parameters
        assert not any(isinstance(held, tuple) for held in device.held.values())


@pytest.mark.parametrize("many", [False, True])
def test_a_failed_order_costs_nothing_else_where_one_failed_before(many: bool) -> None:
    work = step_work(LAYERS, 6, stages_of([], [(1,)], True), MANY_ROWS if many else SUM_ROWS)
    trial = Trial(work, 1, rng=random.Random(3), failing=0.3)
    check(trial.finish(), work)
    assert trial.step.repeated <= 2  # what was under way when the first order failed
    sent = Counter(value for value in trial.fleet.devices[1].sent if isinstance(value, str))
    assert all(sent[f"w{layer}"] == 1 for layer in range(0, LAYERS, 2))  # weights stayed


@pytest.mark.parametrize(
    ("loss", "embeds", "down", "up"),
    # Three layers and a head, each with 40 bytes and a sum of ten elements. Activations of 48
    # bytes: the first input, two cuts there and back, and the PS's loss there and back.
    [
        (True, True, 4 * 40 + 5 * 48, 4 * 40 + 5 * 48),
        (False, True, 3 * 40 + 6 * 48, 3 * 40 + 6 * 48),
        (False, False, 3 * 40 + 6 * 48, 3 * 40 + 5 * 48),
    ],
)
def test_the_least_bytes_of_a_step(loss: bool, embeds: bool, down: int, up: int) -> None:
    stages = [PlannedStage(n, n + 1, (n, n + 5), loss and n == 2) for n in range(3)]
    assert step_work(3, 2, stages, embeds=embeds).floor_bytes(4) == (down, up)


def test_the_least_bytes_of_a_step_whose_loss_is_in_slices() -> None:
    """Of two slices each has 8 bytes and 10 elements; both get the last output, and return it."""
    stages = [PlannedStage(n, n + 1, (n,)) for n in range(3)]
    work = step_work(3, 2, stages, slices=slices_of([(5,), (6,)]))
    assert work.floor_bytes(4) == (3 * 40 + 2 * 8 + 8 * 48, 5 * 40 + 8 * 48)


def test_a_device_lost_while_its_sums_travel_costs_its_share() -> None:
    work = step_work(LAYERS, 6, stages_of([], [(1, 2)], True))
    trial = Trial(work, 2)

    def sums_are_asked() -> bool:
        last = [device.orders[-1] for device in trial.fleet.waiting.values()]
        return len(last) == 2 and all(isinstance(order.name, tuple) for order, _, _ in last)

    while not sums_are_asked():
        trial.answer(min(trial.fleet.waiting, key=lambda d: -len(trial.fleet.devices[d].orders)))
    trial.lose(2)
    check(trial.finish(), work)


def test_a_step_ends_when_too_many_devices_fail() -> None:
    work = step_work(LAYERS, 2, stages_of([], [(1, 2, 3, 4)], True))
    trial = Trial(work, 6)
    for device in range(1, MAX_FAILURES + 1):
        trial.fail(device)
    outcome = trial.fleet.told[-1]
    assert isinstance(outcome, StepFailed)
    assert "device 1: it is tired" in outcome.reason


def test_a_step_ends_when_every_device_that_is_there_failed() -> None:
    work = step_work(LAYERS, 2, stages_of([2], [(1,), (2,)], True))
    trial = Trial(work, 2)
    trial.fail(2)
    assert not trial.step.ended
    trial.fail(1)
    outcome = trial.fleet.told[-1]
    assert isinstance(outcome, StepFailed)
    assert "device 1: it is tired" in outcome.reason
    assert "device 2: it is tired" in outcome.reason


def test_a_device_is_asked_for_few_sums_at_once() -> None:
    """It holds what it was asked for twice until that is sent."""
    rows = 2_000_000  # of 20 bytes
    work = step_work(LAYERS, 1, stages_of([], [(1,)], False), rows)
    trial = Trial(work, 1)
    device = trial.fleet.devices[1]
    most_awaited = most_held = 0
    while not trial.step.ended:
        for batch in list(trial.outputs):
            trial.give(batch)
        awaited = sum(
            found.nbytes
            for order, _, found in device.orders
            if order.request.kind is RequestKind.SUMS and found is not None
        )
        most_awaited = max(most_awaited, awaited)
        most_held = max(most_held, sum(device.sizes.values()) + awaited)
        trial.answer(1)
    result = trial.fleet.told[-1]
    assert isinstance(result, StepResult)
    for layer in range(LAYERS):
        ((*parts,),) = result.gradients[layer, "w"]
        starts = [part.value[0] for part in parts]
        assert starts == sorted(starts)
        assert sum(part.nbytes for part in parts) == 20 * rows
    assert 2**20 < most_awaited <= 16 * 2**20
    assert most_held < (LAYERS + 1) * 20 * rows


def test_a_stage_without_devices_waits_and_says_so_once() -> None:
    work = step_work(LAYERS, 2, stages_of([2], [(1,), (2,)], True))
    trial = Trial(work, 2)
    del trial.fleet.devices[2]
    trial.fleet.devices.pop(1)
    said = [*trial.step.lost(2), *trial.step.lost(1), *trial.step.changed()]
    notes = [note.text for note in said if isinstance(note, Note)]
    assert notes == ["layers 3 to 4 wait for a device that can run them"]
    trial.join(7)
    check(trial.finish(), work)


def test_parameters_stay_on_devices_between_steps_and_the_rest_is_dropped() -> None:
    stages = stages_of([2], [(1,), (2,)], True)
    first = step_work(LAYERS, 2, stages)
    trial = Trial(first, 2)
    trial.finish()
    again = step_work(LAYERS, 2, stages)
    # The first two layers are frozen: the same arrays as before.
    layers = [*first.layers[:2], *again.layers[2:]]
    work = replace(again, layers=layers)
    before = dict(trial.fleet.devices[1].held)
    trial.step = StageStep(
        work, trial.stores, lambda: rates_of(trial.fleet.devices), Names(500, 500)
    )
    trial.fleet.told.clear()
    trial._do(trial.step.begin())
    parameters = {id for id, held in before.items() if held in ("w0", "w1")}
    assert parameters <= trial.fleet.devices[1].held.keys()
    check(trial.finish(), work)


@pytest.mark.parametrize("kept", [KeptBatches(), KeptBatches(1)])
def test_a_device_holds_masks_only_while_it_computes_with_them(kept: KeptBatches) -> None:
    stages = stages_of([2], [(1, 2), (3,)], True)
    trial = Trial(step_work(LAYERS, 12, stages, kept_batches={1: kept, 2: kept}), 3)
    most = 0
    while not trial.step.ended:
        trial.answer(min(trial.fleet.waiting))
        for device in trial.fleet.devices.values():
            most = max(most, sum(value[0] == "mask" for value in device.held.values()))
    assert most == kept.inputs
    check(trial.fleet.told[-1], trial.step.work)


def test_what_stands_out_is_held_back_until_it_is_resolved() -> None:
    """Device 1 has the first stage, device 2 the second; neither is known yet."""
    work = step_work(LAYERS, 2, stages_of([2], [(1,), (2,)], True))
    trial = Trial(work, 2)

    while not trial.suspects:
        trial.shout(1)
    (suspect,) = trial.suspects
    assert suspect.device == 1
    assert list(suspect.record.x) == list(suspect.record.y) == [0]
    while trial.fleet.devices[1].orders:  # the other micro-batch is held back as well
        trial.shout(1)
    assert not trial.fleet.devices[2].orders
    trial.resolve("right")
    assert trial.fleet.devices[2].orders
    check(trial.finish(), work)


def test_what_is_wrong_is_asked_of_another_device() -> None:
    work = step_work(LAYERS, 2, stages_of([], [(1, 2)], True))
    trial = Trial(work, 3)
    while not trial.suspects:
        trial.shout(1)
    trial.resolve("wrong")
    result = trial.finish()
    check(result, work)
    assert all(1 not in record.backward_by.values() for record in result.records)
    assert all(sums.device != 1 for record in result.records for sums in record.sums)


def test_once_a_step_diverged_nothing_is_held_back() -> None:
    work = step_work(LAYERS, 4, stages_of([2], [(1,), (2,)], True))
    trial = Trial(work, 2)
    trial.volume = float("inf")
    while not trial.suspects:
        trial.shout(1)
    trial.resolve("right")
    while not trial.step.ended:
        trial.shout(min(trial.fleet.waiting))
    assert trial.resolved == 1
    check(trial.fleet.told[-1], work)
