"""Audits find devices that lie, and accuse no honest one."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.stage_audits import (
    DTYPES,
    LEVELS,
    ROUNDINGS,
    Device,
    Honest,
    Kept,
    Liar,
    Lie,
    Where,
    by_device,
    huge,
    lies,
    trained_steps,
)
from cleave import graph_names as names
from cleave.arrays import Array, DType
from cleave.machine.graph_choice import open_in_torch
from cleave.machine.graph_session import GraphError, GraphSession
from cleave.machine.torch_session import TorchSession
from cleave.scheduler.stages.outcomes import PassDone, StepResult
from cleave.training.stages.audits import AuditCounters, Auditor
from tests.graphs.models import TOKENS, plain_gradients, small_model
from tests.training.runs import nightly
from tests.training.test_staged import (
    KEPT,
    EvenStages,
    SlicedLoss,
    assert_close,
    batches,
    rows,
    staged,
)
from tests.training.test_suspicion import Place, Scaled, activation, fleet_of, sums

pytestmark = pytest.mark.slow


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16])
def test_slices_of_the_loss_are_audited(dtype: DType) -> None:
    """Devices 1 and 2 have layers; in the second fleet device 1 has a slice, and lies."""
    model = small_model("llama")
    (ids,) = batches(1)
    with fleet_of() as fleet:
        auditor = Auditor(1.0, random.Random(1))
        found = staged(model, fleet, auditor=auditor, dtype=dtype, planner=SlicedLoss(2, KEPT))
        found.gradients(rows(ids))
        assert auditor.counters.faults == 0
        assert auditor.counters.outputs == 4
    for lie in (activation, sums):
        notes: list[str] = []
        with fleet_of(Scaled(lie, 1.01)) as fleet:
            auditor = Auditor(100.0, random.Random(1))  # everything
            planner = SlicedLoss(2, KEPT, first=True)
            found = staged(model, fleet, auditor=auditor, planner=planner, note=notes.append)
            found.gradients(rows(ids))
            assert auditor.counters.faults > 0
            assert any("of slice 1 of 2 of the loss is off" in note for note in notes), notes


@pytest.mark.parametrize("lie", [activation, sums])
def test_a_liar_is_caught_before_its_lie_is_used(lie: Place) -> None:
    model = small_model("opt")
    plain = copy.deepcopy(model)
    notes: list[str] = []
    with fleet_of(Scaled(lie, 1.01), devices=3) as fleet:
        # One micro-batch a device has half a chance for its sums: more steps until it is drawn.
        auditor = Auditor(1.0, random.Random(3))
        found = staged(model, fleet, loss=False, auditor=auditor, note=notes.append)
        for ids in batches(12):
            model.zero_grad()
            plain.zero_grad()
            before = auditor.counters.faults
            loss = found.gradients(rows(ids))
            if auditor.counters.faults > before:
                break
        assert auditor.counters.faults > 0
        assert fleet.device_count == 2
        assert any("device 1 is quarantined: the" in note for note in notes)
        assert loss == pytest.approx(plain_gradients(plain, ids), rel=1e-6)
        assert_close(model, plain, 3e-6)


@pytest.mark.parametrize("devices", [2, 4])
def test_audits_begin_while_devices_work(devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of everything, each micro-batch is repeated once for its sums, and one for its outputs."""
    repeats: list[int] = []
    repeat = Auditor.repeat

    def counted(self: Auditor, work: Any, record: Any, batch: int, *others: Any) -> Any:
        repeats.append(len(record.x))
        return repeat(self, work, record, batch, *others)

    monkeypatch.setattr(Auditor, "repeat", counted)
    model = small_model("opt")
    with fleet_of(devices=devices) as fleet:
        auditor = Auditor(100.0, random.Random(1))  # everything
        found = staged(model, fleet, loss=False, auditor=auditor)
        found.gradients(rows(batches(1)[0]))  # afterwards, no values are unusual
        auditor.counters = AuditCounters()
        repeats.clear()
        found.gradients(rows(batches(1)[0]))
        assert found.plan is not None
        parts = sum(len(stage.devices) for stage in found.plan.planned)
    assert auditor.counters.faults == 0
    assert auditor.counters.outputs >= parts
    assert len(repeats) == auditor.counters.sums + auditor.counters.outputs
    # Each in its own pass, before the stage was done. Only an output audit can come later, of a
    # device that did less than its share.
    assert repeats.count(1) >= len(repeats) - (parts if devices > 2 else 0)
    assert repeats.count(1) >= auditor.counters.sums


@pytest.mark.parametrize("passes", [1, 2, 3, 4, 7, 12])
def test_each_pass_of_a_shared_stage_may_be_audited(passes: int) -> None:
    """Four devices share twelve micro-batches. One of them runs `passes`."""
    trials, rate, share = 4000, 0.3, 3
    auditor = Auditor(rate, random.Random(passes))
    at_once, due = [0] * passes, 0
    for _ in range(trials):
        watch = auditor.watch([1, 2, 3, 4], 12)[1]
        for number in range(passes):
            at_once[number] += number in watch.outputs
            watch.outputs.discard(number)
            watch.batches.add(number)
        due += watch.output_is_due
    # At the end, one of all passes is audited.
    chances = [(each + due / passes) / trials for each in at_once]
    wanted = rate / min(passes, share)
    spread = 4 * (wanted / trials) ** 0.5
    if passes <= share or not passes % share:
        assert chances == pytest.approx([wanted] * passes, abs=spread)
    assert min(chances) > rate / passes - spread


def test_the_servers_own_device_is_not_audited() -> None:
    auditor = Auditor(100.0, random.Random(1))  # everything
    kept = Kept(0.0)
    with fleet_of(devices=3) as fleet:
        staged(small_model("opt"), fleet, loss=False, auditor=kept).gradients(rows(batches(1)[0]))
    work, result = kept.step
    devices = {d for record in result.records for d in record.backward_by.values()}
    watches = [auditor.watch(devices, 4, trusted=devices) for _ in result.records]
    assert not any(watch.selected for watch in watches[0].values())
    assert not auditor.faults(work, result, watches=watches)
    assert auditor.counters == AuditCounters()


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("lies", [False, True])
def test_sums_of_watched_passes_are_judged(*, again: bool, lies: bool) -> None:
    """`again`: the device lost its sums, and repeats a pass."""
    kept = Kept(0.0)
    with fleet_of(devices=3) as fleet:
        staged(small_model("opt"), fleet, loss=False, auditor=kept).gradients(rows(batches(1)[0]))
    work, result = kept.step
    record = result.records[0]
    sums = record.sums[0]
    auditor = Auditor(100.0, random.Random(1))  # everything
    watches = auditor.watch([sums.device], len(sums.batches))
    passes = [*sorted(sums.batches), *(sorted(sums.batches)[:1] if again else [])]
    for batch in passes:
        done = PassDone(0, sums.device, batch, record, {})
        assert not auditor.passed(work, done, watches[sums.device])
    if lies:
        wrong = {key: (2 * np.frombuffer(v, np.float32)).tobytes() for key, v in sums.found.items()}
        sums = replace(sums, found=wrong)
    found = auditor.faults_of(work, replace(record, sums=[sums]), {}, watches)
    assert [fault.device for fault in found] == ([sums.device] if lies else [])


def test_a_device_that_repeats_passes_moves_no_audit() -> None:
    kept = Kept(0.0)
    with fleet_of(devices=2) as fleet:
        staged(small_model("opt"), fleet, loss=False, auditor=kept).gradients(rows(batches(1)[0]))
    work, result = kept.step
    record = result.records[0]
    (device,), count = {each.device for each in record.sums}, len(record.x)
    drawn = set()
    for seed in range(20):
        auditor = Auditor(1.0, random.Random(seed))
        watch = auditor.watch([device], count)[device]
        watch.sums = False
        (wanted,), seen = watch.outputs, []
        drawn.add(wanted)
        for batch in [0, 0, *range(count)]:
            before = auditor.counters.outputs
            auditor.passed(work, PassDone(0, device, batch, record, {}), watch)
            seen += [batch] * (auditor.counters.outputs - before)
        assert seen == [wanted]
    assert drawn == set(range(count))


def test_the_chance_of_escape_is_as_stated() -> None:
    """A device doubles all of its outputs. A third of its steps are audited."""

    def double(found: dict[Any, Array], limit: float, rng: np.random.Generator) -> Any:
        return {name: 2 * values for name, values in found.items()}

    lie = Lie("outputs doubled", double, Where.OUTPUT)
    steps = trained_steps(small_model("opt"), DType.FP32, 2, EvenStages(loss=False), 1)
    liars = [Liar(step, Device(1, LEVELS[-1], 0.0), 1) for step in steps]
    records = [(liar.work, liar.record(lie)) for liar in liars]
    auditor = Auditor(1 / 3, random.Random(1))
    caught = 0
    trials = 40
    for device in range(trials):
        lied = [(work, [by_device(record, device)]) for work, record in records]
        caught += any(auditor.faults(work, StepResult({}, {}, {}, by)) for work, by in lied)
    expected = 1 - (1 - 1 / 3) ** 2
    spread = 3.5 * (expected * (1 - expected) / trials) ** 0.5
    assert abs(caught / trials - expected) < spread


class OtherKernel(GraphSession):
    """Rounds otherwise: what goes into a layer differs by what rounding does."""

    random = np.random.default_rng(1)

    def run(
        self, given: Mapping[str, Array], wanted: Sequence[str] | None = None
    ) -> dict[str, Array]:
        moved = {}
        for name in (names.X, names.DY):
            if name in given:
                signs = self.random.choice(np.array([-1, 1], np.float32), given[name].shape)
                moved[name] = given[name] * (1 + np.float32(2**-22) * signs)
        return super().run({**given, **moved}, wanted)


def put_at_a_kink(model: Any, ids: torch.Tensor) -> None:
    """Have rounding decide, for one token, of every unit of the first MLP whether ReLU stops it."""
    seen: list[torch.Tensor] = []
    mlp = model.model.decoder.layers[0].fc1
    with mlp.register_forward_pre_hook(lambda module, given: seen.append(given[0])):
        model(input_ids=ids)
    token = seen[0].reshape(ids.numel(), -1)[TOKENS + TOKENS // 2].detach()
    with torch.no_grad():
        mlp.bias.copy_(-(mlp.weight.double() @ token.double()))


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_who_rounds_otherwise_at_a_kink_is_not_accused_and_who_lies_there_is(
    factor: float,
) -> None:
    model = small_model("opt")
    (ids,) = batches(1)
    put_at_a_kink(model, ids)

    def other(model: bytes, given: Any, products: Any) -> OtherKernel:
        return OtherKernel(model)

    with fleet_of(Scaled(activation, factor), devices=3) as fleet:
        auditor = Auditor(100.0, random.Random(1), other)  # everything
        staged(model, fleet, loss=False, auditor=auditor).gradients(rows(ids))
        assert auditor.counters.again > 0  # rounding alone does not explain it
        assert factor > 1 or not auditor.counters.faults
        assert fleet.device_count == (2 if factor > 1 else 3)


@pytest.mark.parametrize("lie", [None, activation])
def test_an_accelerator_that_fails_in_an_audit_is_replaced_by_the_cpu(lie: Place | None) -> None:
    class OutOfMemory(TorchSession):
        def run(self, given: Any, wanted: Any = None) -> Any:
            raise GraphError("the graph cannot be run: out of memory")

    def failing(model: bytes, given: Any, products: Any) -> OutOfMemory:
        return OutOfMemory(model)

    (ids,) = batches(1)
    with fleet_of(*([] if lie is None else [Scaled(lie, 1.3)]), devices=3) as fleet:
        auditor = Auditor(100.0, random.Random(1), failing)  # everything
        staged(small_model("opt"), fleet, loss=False, auditor=auditor).gradients(rows(ids))
        assert auditor.counters.outputs > 0
        assert bool(auditor.counters.faults) == (lie is not None)


@pytest.mark.parametrize("family", ["opt", nightly("llama"), nightly("gpt2")])
@pytest.mark.parametrize("lie", [None, activation, sums])
def test_products_in_bf16_are_not_accused_and_do_not_hide_lies(
    family: str, lie: Place | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Emulated devices compute products in bf16, and audits in fp32, with ReLU's kinks."""
    opened: list[DType | None] = []

    def in_torch(model: bytes, given: Sequence[DType | None], products: DType | None) -> Any:
        opened.append(products)
        return open_in_torch("cpu", model, given, products)

    monkeypatch.setattr("emulator.realtime.open_in_process", in_torch)
    monkeypatch.setattr("emulator.virtual.open_in_process", in_torch)
    model = small_model(family)
    (ids,) = batches(1)
    liars = [] if lie is None else [Scaled(lie, 1.3)]
    with fleet_of(*liars, devices=3) as fleet:
        auditor = Auditor(100.0, random.Random(1))  # everything
        found = staged(model, fleet, auditor=auditor, dtype=DType.BF16, loss=False)
        found.gradients(rows(ids))
        assert opened
        assert set(opened) == {DType.BF16}
        # The server finds out how the devices round. Then little is in doubt.
        assert lie is not None or auditor.counters.again < auditor.counters.outputs
        assert bool(auditor.counters.faults) == (lie is not None)


@pytest.mark.parametrize(("seeds", "dtypes"), [(1, [DType.BF16]), nightly(2, DTYPES)])
def test_every_kind_of_lie_is_caught_within_twenty_audits(
    seeds: int, dtypes: Sequence[DType]
) -> None:
    found = lies(seeds, dtypes, ["opt", "llama"])
    assert [(one.lie, one.audits) for one in found if not one.met] == []


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("opt", DType.BF16), nightly("gpt2", DType.FP32), nightly("huge", DType.BF16)],
)
def test_honest_devices_of_many_kinds_are_not_accused(family: str, dtype: DType) -> None:
    """The gradients of biases of keys are nothing but rounding."""
    model = huge(small_model("opt")) if family == "huge" else small_model(family)
    steps = trained_steps(model, dtype, 2, EvenStages(loss=False), 3)
    kinds = [Device(1, LEVELS[n], by) for n, by in enumerate(ROUNDINGS)]
    found = Honest()
    found.audit(steps, kinds, 40)
    assert found.sums >= 40
    assert found.repeated > 0
    assert found.accused == 0
