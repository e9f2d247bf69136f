"""The scheduler alone, event by event: any order of join, loss, late, double and wrong answers.

A model of the fleet does what the instructions say with real numbers: devices keep the arrays they
were sent, results are computed from these alone, outputs are put together as the runtimes do. Links
of the real thing keep the order of messages to one device, so commands are carried out at once;
what is under way when a run is cancelled or a device is lost comes later, or never. In the end
everything is answered fairly, and every work must be right; none may fail, whatever the devices
did, and none may be said to be stuck without a reason that its history has.

`CLEAVE_EXAMPLES=2000 pytest tests/scheduler/test_scheduler_machine.py` looks for longer.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cleave import arrays
from cleave.arrays import Array, Buffer, DType
from cleave.fleet.product import Output
from cleave.gemm import Gemm, Span
from cleave.planner.plan import DeviceRates, ElementBytes, Planner
from cleave.planner.tiles.planner import TilePlanner
from cleave.scheduler import events
from cleave.scheduler.events import Event
from cleave.scheduler.instructions import (
    Done,
    Drained,
    Failed,
    Instruction,
    Overdue,
    Place,
    SendArray,
    SendCancel,
    SendDrop,
    SendRun,
    Stuck,
)
from cleave.scheduler.tiles import scheduler as scheduler_module
from cleave.scheduler.tiles.gemm_job import GemmJob, GemmTask, MatrixRef
from cleave.scheduler.tiles.scheduler import MAX_FAILURES, Scheduler
from cleave.scheduler.tiles.tasks import ArrayRef, Task
from tests.examples import examples
from tests.scheduler.test_scheduler import BoxPlanner

EXAMPLES = int(os.environ.get("CLEAVE_EXAMPLES", "20"))
ALL = tuple(d.value for d in DType)
HEALTHY_BYTES = 10_000  # holds any GEMM of this test several times
WRONG: Final = object()
"""The payload of answers that must never be used."""


@dataclass
class Calculator:
    """A device: what it was sent, and the runs it has not answered with what they give."""

    rates: DeviceRates
    draining: bool = False
    arrays: dict[int, ArrayRef] = field(default_factory=dict)
    contents: dict[int, Array] = field(default_factory=dict)
    runs: dict[int, Task] = field(default_factory=dict)
    products: dict[int, Buffer] = field(default_factory=dict)

    def check_memory(self) -> None:
        held = sum(a.nbytes for a in self.arrays.values())
        results = sum(u.output_bytes for u in self.runs.values())
        assert held + results <= self.rates.memory_bytes, "the device's memory is exceeded"

    def multiply(self, task: Task, matrices: dict[int, Buffer]) -> Buffer:
        """The sum of the products, from what this device holds."""
        detail: GemmTask = task.detail
        parts = [self.contents[array.id] for array in task.inputs]
        total: Any = 0.0
        for a, b in zip(parts[::2], parts[1::2], strict=True):
            total = total + (a.T if detail.transpose_a else a) @ (b.T if detail.transpose_b else b)
        out = DType(detail.out)
        product = Buffer(arrays.narrow(total, out), out)
        assert product.nbytes == task.output_bytes
        return product


@dataclass
class Product:
    """A submitted GEMM: what it must become and how far it is."""

    job: GemmJob
    operands: tuple[int, int]
    output: Output
    expected: Array
    depth: Array  # by element, how much of k is summed
    needs_bytes: int  # of a device that could do it all
    smallest: int  # least memory of any device that it met
    faults: int = 0
    ended: bool = False


class Model:
    """The runtime of a scheduler, and all its devices."""

    def __init__(self) -> None:
        self.scheduler = Scheduler()
        self.now_s = 0.0
        self.devices: dict[int, Calculator] = {}
        self.products: dict[int, Product] = {}
        self.matrices: dict[int, Buffer] = {}
        self.late: list[tuple[int, int]] = []  # answers nobody waits for, by device and run
        self.regions: dict[int, tuple[int, Span, Span]] = {}  # by name
        self.runs_named: set[int] = set()
        self.accepted: Counter[int] = Counter()
        self.planner = TilePlanner()
        self._ids = count(1)

    def tell(self, event: Event) -> None:
        for command in self.scheduler.handle(event, self.now_s):
            self._carry_out(command)

    # --- commands ---

    def _carry_out(self, command: Instruction) -> None:
        match command:
            case SendArray(device, array):
                self._store(self.devices[device], array)
            case SendRun(device, run, task):
                self._run(self.devices[device], run, task)
            case SendDrop(device, ids):
                self._drop(self.devices[device], ids)
            case SendCancel(device, runs):
                for run in runs:
                    del self.devices[device].runs[run]
                    self.late.append((device, run))
            case Place(task, payload):
                assert payload is not WRONG, "an answer that nobody asked for is used"
                self._place(task, payload)
            case Done(job):
                self._finished(self.products[job])
            case Failed(job, reason):
                raise AssertionError(f"job {job} fails: {reason}")
            case Stuck(job, reason):
                self._stuck(self.products[job], reason)
            case Drained(device):
                gone = self.devices.pop(device)
                assert gone.draining
                assert not gone.runs, "it is let go before it answered"
            case Overdue(device):
                assert device in self.devices
            case _:
                raise AssertionError(f"unknown command {command}")

    def _store(self, device: Calculator, array: ArrayRef) -> None:
        assert array.id not in device.arrays, "sent twice"
        region = (array.operand, array.rows, array.columns)
        assert self.regions.setdefault(array.id, region) == region, "a name is used again"
        source = self.matrices[array.operand].region(array.rows, array.columns)
        assert source.nbytes == array.nbytes
        device.arrays[array.id] = array
        device.contents[array.id] = source.float32().copy()
        device.check_memory()

    def _run(self, device: Calculator, run: int, task: Task) -> None:
        assert run not in self.runs_named, "a run's name is used again"
        assert not device.draining, "a draining device gets something new"
        assert not self.products[task.job].ended
        self.runs_named.add(run)
        device.products[run] = device.multiply(task, self.matrices)  # of what it holds, or KeyError
        device.runs[run] = task
        device.check_memory()

    def _drop(self, device: Calculator, ids: Sequence[int]) -> None:
        used = {array.id for task in device.runs.values() for array in task.inputs}
        for name in ids:
            assert name not in used, "dropped while a run needs it"
            del device.arrays[name], device.contents[name]

    def _finished(self, product: Product) -> None:
        assert not product.ended
        product.ended = True
        assert (product.depth == product.job.gemm.k).all(), "finished with elements missing"
        product.output.finish()
        assert np.array_equal(product.output.out.float32(), product.expected)

    def _stuck(self, product: Product, reason: str) -> None:
        assert not product.ended
        assert self.scheduler.stuck(product.job.id) == reason
        if "memory" in reason:
            assert product.smallest < product.needs_bytes, f"every device had the memory: {reason}"
        else:
            assert reason
            assert product.faults >= MAX_FAILURES, f"only {product.faults} faults: {reason}"

    # --- events ---

    def join(self, memory_bytes: int, speed: float = 1.0, dtypes: Sequence[str] = ALL) -> None:
        rates = DeviceRates(
            next(self._ids), 1e6 * speed, 1e5 * speed, 1e9 * speed, 0.0, memory_bytes, tuple(dtypes)
        )
        self.devices[rates.device] = Calculator(rates)
        for product in self.products.values():
            product.smallest = min(product.smallest, memory_bytes)
        self.tell(events.DeviceReady(rates))

    def lose(self, device: int) -> None:
        self.late += [(device, run) for run in self.devices.pop(device).runs]
        self.tell(events.DeviceLost(device))

    def drain(self, device: int) -> None:
        self.devices[device].draining = True
        self.tell(events.DeviceDraining(device))

    def matrix(self, rows: int, columns: int, dtype: DType, random: Random) -> int:
        """A new operand of small integers, so that sums are exact in every dtype."""
        rng = np.random.default_rng(random.randrange(2**32))
        values = rng.integers(-2, 3, (rows, columns)).astype(np.float32)
        operand = next(self._ids)
        self.matrices[operand] = Buffer(arrays.narrow(values, dtype), dtype)
        return operand

    def submit(
        self, a: int, b: int, turns: tuple[bool, bool], out: DType, planner: Planner
    ) -> None:
        left, right = self.matrices[a].float32(), self.matrices[b].float32()
        left, right = left.T if turns[0] else left, right.T if turns[1] else right
        gemm = Gemm(left.shape[0], right.shape[1], left.shape[1])
        dtype = self.matrices[a].dtype
        element = ElementBytes(dtype.itemsize, out.itemsize)
        refs = MatrixRef(a, turns[0]), MatrixRef(b, turns[1])
        job = GemmJob(next(self._ids), gemm, *refs, element, dtype.value, out.value, planner)
        whole = (gemm.m + gemm.n) * gemm.k * element.sent + gemm.m * gemm.n * 4
        target = arrays.empty(gemm.m, gemm.n, out)
        target.array.view(np.uint8)[...] = 0x7F
        self.products[job.id] = Product(
            job,
            (a, b),
            Output(target),
            left @ right,
            np.zeros((gemm.m, gemm.n), np.int64),
            int(whole / 0.9) + 1,
            min((d.rates.memory_bytes for d in self.devices.values()), default=2**40),
        )
        self.tell(events.Submitted(job))

    @property
    def running(self) -> list[tuple[int, int]]:
        """Runs that devices have not answered."""
        return [(i, run) for i, device in self.devices.items() for run in device.runs]

    def answer(self, device: int, run: int) -> None:
        del self.devices[device].runs[run]
        self.late.append((device, run))  # it may be said once more
        product = self.devices[device].products.pop(run)
        self.tell(events.ResultArrived(device, run, product))

    def fail(self, device: int, run: int, reason: str = "boom") -> None:
        task = self.devices[device].runs.pop(run)
        self.late.append((device, run))
        self.products[task.job].faults += 1
        self.tell(events.RunFailed(device, run, reason))

    def _place(self, task: Task, payload: Any) -> None:
        """Carry out a `Place`, as runtimes do."""
        product = self.products[task.job]
        assert not product.ended
        block = task.detail.block
        depth = product.depth[block.m.start : block.m.stop, block.n.start : block.n.stop]
        assert (depth == block.k.start).all(), "placed twice, or not in the order of k"
        depth += block.k.size
        product.output.place(task.detail, payload)

    def pass_time(self, took_s: float) -> None:
        self.now_s += took_s
        tick: Any = getattr(events, "Tick", None)
        if tick is not None:
            self.tell(tick())

    @property
    def releasable(self) -> list[int]:
        used = {o for t in self.products.values() if not t.ended for o in t.operands}
        return [operand for operand in self.matrices if operand not in used]

    def release(self, operand: int) -> None:
        del self.matrices[operand]
        self.tell(events.OperandReleased(operand))

    # --- the end ---

    def step(self, random: Random) -> bool:
        """Something that a healthy fleet does; False when nothing is left to do."""
        if not self.running:
            return False
        self.now_s += 1e-3
        self.answer(*random.choice(self.running))
        return True

    def settle(self, random: Random) -> None:
        """With a healthy device there and everything answered, everything ends."""
        for patience in range(4):
            for _ in range(20_000):
                if not self.step(random):
                    break
            else:
                raise AssertionError("it goes on for ever")
            if all(product.ended for product in self.products.values()):
                break
            if not patience:
                self.join(HEALTHY_BYTES)
            self.pass_time(1e4)
        stuck = [product.job.id for product in self.products.values() if not product.ended]
        assert not stuck, f"works {stuck} are stuck"
        draining = [i for i, device in self.devices.items() if device.draining]
        assert not draining, f"devices {draining} have answered everything and are not let go"

    def check_nothing_is_left(self) -> None:
        for operand in list(self.matrices):
            self.release(operand)
        self.tell(events.Paused())
        assert self.scheduler.idle
        assert self.scheduler.blank
        assert self.scheduler.leftovers() == []
        kept = {i: list(d.arrays) for i, d in self.devices.items() if d.arrays}
        assert not kept, f"devices keep what nobody can name any more: {kept}"


seeds = st.integers(0, 2**32 - 1)
sides = st.integers(1, 8)


class AnyOrder(RuleBasedStateMachine):
    """Every event in any order."""

    least_bytes, most_bytes = 60, 2000
    most_devices = 6

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()

    # --- devices ---

    @rule(share=st.floats(0, 1), speed=st.sampled_from([0.01, 1.0, 1.0, 100.0]), seed=seeds)
    def join(self, share: float, speed: float, seed: int) -> None:
        if len(self.model.devices) < self.most_devices:
            memory_bytes = int(self.least_bytes + share * (self.most_bytes - self.least_bytes))
            self.model.join(memory_bytes, speed, ALL if seed % 4 else ("fp32",))

    @precondition(lambda self: self.model.devices)
    @rule(seed=seeds)
    def lose(self, seed: int) -> None:
        self.model.lose(_one(seed, self.model.devices))

    @precondition(lambda self: self.model.devices)
    @rule(seed=seeds)
    def drain(self, seed: int) -> None:
        self.model.drain(_one(seed, self.model.devices))

    @rule(device=st.integers(10**6, 10**7))
    def events_of_unknown_devices(self, device: int) -> None:
        self.model.tell(events.DeviceDraining(device))
        self.model.tell(events.DeviceLost(device))
        self.model.tell(events.RunFailed(device, 1, "never heard of it"))
        self.model.tell(events.ResultArrived(device, 1, WRONG))

    # --- work ---

    @rule(m=sides, n=sides, k=sides, turns=st.tuples(st.booleans(), st.booleans()), seed=seeds)
    def submit(self, m: int, n: int, k: int, turns: tuple[bool, bool], seed: int) -> None:
        random = Random(seed)
        dtype = random.choice([DType.FP32, DType.BF16])
        a = self.model.matrix(*((k, m) if turns[0] else (m, k)), dtype, random)
        b = self.model.matrix(*((n, k) if turns[1] else (k, n)), dtype, random)
        self._submit(a, b, turns, random)

    @precondition(lambda self: self.model.matrices)
    @rule(side=sides, turned=st.booleans(), as_left=st.booleans(), seed=seeds)
    def submit_what_devices_hold(self, side: int, turned: bool, as_left: bool, seed: int) -> None:
        random = Random(seed)
        known = _one(seed, self.model.matrices)
        buffer = self.model.matrices[known]
        rows, columns = reversed(buffer.shape) if turned else buffer.shape
        if random.random() < 0.2:
            self._submit(known, known, (turned, not turned), random)
        elif as_left:
            other = self.model.matrix(columns, side, buffer.dtype, random)
            self._submit(known, other, (turned, False), random)
        else:
            other = self.model.matrix(side, rows, buffer.dtype, random)
            self._submit(other, known, (False, turned), random)

    def _submit(self, a: int, b: int, turns: tuple[bool, bool], random: Random) -> None:
        boxes = random.random() < 0.95
        planner: Planner = BoxPlanner(random.randrange(2**32)) if boxes else self.model.planner
        out = random.choice([DType.FP32, self.model.matrices[a].dtype])
        self.model.submit(a, b, turns, out, planner)

    @precondition(lambda self: self.model.releasable)
    @rule(seed=seeds)
    def release(self, seed: int) -> None:
        self.model.release(_one(seed, self.model.releasable))

    @rule(operand=st.integers(10**6, 10**7))
    def release_unknown(self, operand: int) -> None:
        self.model.tell(events.OperandReleased(operand))

    @rule()
    def pause(self) -> None:
        self.model.tell(events.Paused())

    @rule(took_s=st.sampled_from([1e-6, 0.1, 10.0, 1e5]))
    def time_passes(self, took_s: float) -> None:
        self.model.pass_time(took_s)

    # --- answers ---

    @rule(seed=seeds, steps=st.integers(1, 40))
    def things_go_on(self, seed: int, steps: int) -> None:
        random = Random(seed)
        for _ in range(steps):
            if not self.model.step(random):
                break

    @precondition(lambda self: self.model.running)
    @rule(seed=seeds, steps=st.integers(1, 10))
    def answer_without_assembling(self, seed: int, steps: int) -> None:
        for _ in range(steps):
            if self.model.running:
                self.model.answer(*_one(seed, self.model.running))

    @precondition(lambda self: self.model.running)
    @rule(seed=seeds, most=st.sampled_from([1, 1, 3, 30]))
    def fail(self, seed: int, most: int) -> None:
        for _ in range(most):
            if self.model.running:
                self.model.fail(*_one(seed, self.model.running))

    @precondition(lambda self: self.model.running)
    @rule(seed=seeds)
    def lie_and_be_quarantined(self, seed: int) -> None:
        device, run = _one(seed, self.model.running)
        self.model.fail(device, run, "a wrong result: row 1 is off")
        if device in self.model.devices:
            self.model.lose(device)

    @precondition(lambda self: self.model.late)
    @rule(seed=seeds, failed=st.booleans())
    def answer_late_or_twice(self, seed: int, failed: bool) -> None:
        device, run = _one(seed, self.model.late)
        late = self.model.scheduler.counters.late
        if failed:
            self.model.tell(events.RunFailed(device, run, "late"))
        else:
            self.model.tell(events.ResultArrived(device, run, WRONG))
        assert self.model.scheduler.counters.late == late + 1

    @precondition(lambda self: self.model.running and len(self.model.devices) > 1)
    @rule(seed=seeds, failed=st.booleans())
    def answer_for_another(self, seed: int, failed: bool) -> None:
        owner, run = _one(seed, self.model.running)
        other = _one(seed, [d for d in self.model.devices if d != owner])
        if failed:
            self.model.tell(events.RunFailed(other, run, "not mine"))
        else:
            self.model.tell(events.ResultArrived(other, run, WRONG))

    # --- always ---

    @invariant()
    def accounts_are_within_limits(self) -> None:
        self.model.scheduler.validate()
        for product in self.model.products.values():
            assert (product.depth <= product.job.gemm.k).all()

    def teardown(self) -> None:
        self.model.settle(Random(0))
        self.model.check_nothing_is_left()


def _one(seed: int, of: Any) -> Any:
    choices = list(of)
    return choices[seed % len(choices)]


class CrowdedDevices(AnyOrder):
    """Few devices that hold about one GEMM: tasks wait for room, and arrays make way."""

    least_bytes, most_bytes = 350, 800
    most_devices = 3


class RoomyDevices(AnyOrder):
    """No device is too small: then only failing runs may fail a job."""

    least_bytes, most_bytes = 1200, 6000


@pytest.mark.parametrize("machine", [AnyOrder, RoomyDevices])
@pytest.mark.parametrize("drop_bytes", [64, 2**20])
def test_any_order_of_events(
    machine: type[AnyOrder], drop_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`drop_bytes`: also with devices that are told at once what they may forget."""
    monkeypatch.setattr(scheduler_module, "_DROP_BATCH_BYTES", drop_bytes)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples(EXAMPLES),
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink],
            report_multiple_bugs=False,
        ),
    )


def test_of_two_reasons_that_one_event_gives_the_last_is_told() -> None:
    machine = AnyOrder()
    machine.join(seed=1, share=0.0, speed=0.01)
    machine.submit(k=7, m=1, n=7, seed=0, turns=(False, False))  # its model compares what is told
    machine.teardown()


def _random_history(machine: AnyOrder, random: Random, steps: int) -> None:
    """A long history of the machine's rules, dealt by weight rather than by hypothesis."""
    model = machine.model
    for _ in range(steps):
        seed, flag = random.randrange(2**32), random.random() < 0.5
        turns = (random.random() < 0.5, flag)
        shape = [random.randint(1, 8) for _ in range(3)]
        match random.choice(_DEAL):
            case "join":
                machine.join(random.random(), random.choice([0.01, 1.0, 100.0]), seed)
            case "lose" if model.devices:
                machine.lose(seed)
            case "drain" if model.devices:
                machine.drain(seed)
            case "submit":
                machine.submit(shape[0], shape[1], shape[2], turns, seed)
            case "again" if model.matrices:
                machine.submit_what_devices_hold(shape[0], *turns, seed)
            case "release" if model.releasable:
                machine.release(seed)
            case "fail" if model.running:
                machine.fail(seed, random.choice([1, 1, 3, 30]))
            case "lie" if model.running:
                machine.lie_and_be_quarantined(seed)
            case "late" if model.late:
                machine.answer_late_or_twice(seed, flag)
            case "other" if model.running and len(model.devices) > 1:
                machine.answer_for_another(seed, flag)
            case "answer" if model.running:
                machine.answer_without_assembling(seed, random.randint(1, 10))
            case "time":
                machine.time_passes(random.choice([1e-3, 1.0, 1e4]))
            case "pause":
                machine.pause()
            case _:
                machine.things_go_on(seed, random.randint(1, 15))
        machine.accounts_are_within_limits()
    machine.teardown()


_DEAL = (
    *["join", "lose", "submit", "again", "answer", "go on"] * 4,
    *["drain", "release", "fail", "late", "other", "time"] * 2,
    *["lie", "pause"],
)


@pytest.mark.slow
@pytest.mark.parametrize("machine", [AnyOrder, CrowdedDevices, RoomyDevices])
def test_many_long_histories(machine: type[AnyOrder], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "_DROP_BATCH_BYTES", 200)
    for seed in range(2 * EXAMPLES):
        try:
            _random_history(machine(), Random(seed), 60)
        except Exception as error:
            raise AssertionError(f"the history of seed {seed} fails: {error}") from error
