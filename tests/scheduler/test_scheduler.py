"""Scheduler, GEMM work, session manager, device core and output together, on random histories.

A runtime of the test's own delivers messages in the order of each link but otherwise in any order,
through the real codec. Devices join, vanish, drain, fail and answer nonsense. Whatever happens,
every GEMM must end with exactly the right product; nothing may fail, nor be stuck while a healthy
device is there; and when all is released, nothing may be left in the tables.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from random import Random

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
from cleave.device.core import DeviceCore, Order
from cleave.errors import PlanError
from cleave.fleet.product import Output
from cleave.gemm import Block, Gemm, Span, Tile, TileCut
from cleave.machine.backends import Compute, NumpyBackend, execute
from cleave.planner.plan import (
    DeviceRates,
    ElementBytes,
    Plan,
    PlannedTile,
    Planner,
    PsRates,
    Residency,
)
from cleave.planner.tiles.planner import TilePlanner
from cleave.protocol import limits, messages
from cleave.protocol.codec import decode, encode
from cleave.protocol.messages import Message, Op, Role
from cleave.scheduler.instructions import Close, Done, Failed, Instruction, Place, Send
from cleave.scheduler.sessions import reputation
from cleave.scheduler.sessions.session import DeviceState
from cleave.scheduler.sessions.session_manager import SessionManager
from cleave.scheduler.tiles import reassignment as lateness
from cleave.scheduler.tiles import scheduler as scheduler_module
from cleave.scheduler.tiles.gemm_job import GemmJob, MatrixRef
from cleave.scheduler.tiles.load import DeviceLoad
from cleave.scheduler.tiles.scheduler import HOLD_MOST_S, HOLD_S, MAX_FAILURES
from cleave.scheduler.tiles.tasks import GemmTask, Task
from tests.examples import examples
from tests.invariants import check_state, leftovers
from tests.planner.fakes import FakePlanner

ALL = tuple(DType)
ROOMY = (1200, 4000)  # bytes: any GEMM of the test fits as one tile, several do not
TIGHT = (60, 700)


@pytest.fixture(autouse=True)
def _no_least_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices of a few bytes: the histories of small GEMMs are those of large ones.

    None that is set aside is tried, for a trial needs some kilobytes.
    """
    monkeypatch.setattr(limits, "MIN_DEVICE_MEMORY_BYTES", 0)
    monkeypatch.setattr(reputation, "MOST_TRIAL_S", 1e12)
    monkeypatch.setattr(reputation, "TRIAL_S", 1e12)


@pytest.fixture
def _often_recut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work is cut anew after losses, and found overdue, in GEMMs of a few elements too."""
    monkeypatch.setattr(scheduler_module, "_RECUT_FROM_S", -1.0)
    monkeypatch.setattr(lateness, "OVERDUE_S", 0.01)


@pytest.fixture
def _never_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices that only fail stay, as those do that fail only some of what they are asked."""
    monkeypatch.setattr(reputation, "ASIDE_AFTER", 10**9)


class BoxPlanner:
    """Random plans: boxes in all three dimensions, cut anyhow, to any device; or what is held."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)

    def plan(
        self,
        gemm: Gemm,
        element: ElementBytes,
        devices: Sequence[DeviceRates],
        residencies: Sequence[Residency] = (),
    ) -> Plan:
        if residencies and self.random.random() < 0.7:
            chosen = self.random.choice(list(residencies))
            return _plan(gemm, list(chosen.tiles.items()))
        ids = sorted(d.device for d in devices)
        whole = Tile(Span(0, gemm.m), Span(0, gemm.n), Span(0, gemm.k))
        boxes = self._split(whole, self.random.randrange(4))
        self.random.shuffle(boxes)
        tiles = [(self.random.choice(ids), self._cut(box)) for box in boxes]
        return _plan(gemm, tiles, self.random.choice([-1e9, 1.0]))  # the former is taken

    def _split(self, tile: Tile, depth: int) -> list[Tile]:
        sides = {"m": tile.m, "n": tile.n, "k": tile.k}
        name = self.random.choice("mnk")
        if not depth or sides[name].size < 2:
            return [tile]
        side = sides[name]
        middle = self.random.randrange(side.start + 1, side.stop)
        boxes = []
        for half in (Span(side.start, middle), Span(middle, side.stop)):
            boxes += self._split(Tile(**(sides | {name: half})), depth - 1)
        return boxes

    def _cut(self, tile: Tile) -> TileCut:
        return TileCut(tile, *(self._cuts(side) for side in (tile.m, tile.n, tile.k)))

    def _cuts(self, side: Span) -> tuple[Span, ...]:
        inner = range(side.start + 1, side.stop)
        chosen = self.random.sample(inner, min(len(inner), self.random.randrange(3)))
        bounds = sorted({*side, *chosen})
        return tuple(Span(a, b) for a, b in pairwise(bounds))


def _plan(gemm: Gemm, tiles: list[tuple[int, TileCut]], makespan_s: float = 1.0) -> Plan:
    return Plan(gemm, tuple(PlannedTile(d, cut, 0, 0, 0.0) for d, cut in tiles), makespan_s)


@dataclass
class Peer:
    """A device, its links, and what its backend has to do."""

    id: int
    core: DeviceCore
    down: deque[bytes] = field(default_factory=deque)
    up: deque[bytes] = field(default_factory=deque)
    orders: list[Compute] = field(default_factory=list)


@dataclass
class Product:
    """A submitted GEMM and what it must become."""

    job: GemmJob
    operands: tuple[int, int]
    output: Output
    expected: Array
    needs_bytes: int  # of a device that could do it all
    done: bool = False


@dataclass
class Matrix:
    """An operand as it lies in memory."""

    id: int
    values: Array
    buffer: Buffer


class Harness:
    """Moves messages one at a time, as the test says."""

    def __init__(self) -> None:
        self.manager = SessionManager()
        self.peers: dict[int, Peer] = {}
        self.products: dict[int, Product] = {}
        self.matrices: dict[int, Matrix] = {}
        self.faults: Counter[int] = Counter()  # by task, real failures that the PS was told of
        self.smallest: dict[int, int] = {}  # by job, least memory of any device in its life
        self.task_of: dict[int, Task] = {}  # keeps tasks alive, so that ids stay unique
        self.now_s = 0.0
        self._ids = count(1)
        self._backend = NumpyBackend()
        self.planner = TilePlanner(PsRates())

    # --- what happens to the fleet ---

    def join(self, memory_bytes: int, speed: float = 1.0, dtypes: Sequence[DType] = ALL) -> int:
        peer = Peer(next(self._ids), DeviceCore(memory_bytes))
        self.peers[peer.id] = peer
        self.manager.opened(peer.id, self.now_s)
        hello = messages.Hello(
            Role.DEVICE,
            ops=(Op.MATMUL.value,),
            dtypes=tuple(d.value for d in dtypes),
            memory_bytes=memory_bytes,
            flops_per_s=1e9 * speed,
            downlink_bytes_per_s=1e6 * speed,
            uplink_bytes_per_s=1e5 * speed,
        )
        self._up(peer, hello)
        for product in self.unfinished():
            self.smallest[product] = min(self.smallest[product], memory_bytes)
        return peer.id

    def lose(self, device: int) -> None:
        del self.peers[device]
        self._obey(self.manager.closed(device, "lost", self.now_s))

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self._obey(self.manager.tick(self.now_s))

    def drain(self, device: int) -> None:
        peer = self.peers[device]
        for message in peer.core.drain():
            assert not isinstance(message, Order)
            self._up(peer, message)

    # --- work ---

    def matrix(self, rows: int, columns: int, dtype: DType, seed: int) -> Matrix:
        values = np.random.default_rng(seed).integers(-2, 3, (rows, columns)).astype(np.float32)
        matrix = Matrix(next(self._ids), values, Buffer(arrays.narrow(values, dtype), dtype))
        self.matrices[matrix.id] = matrix
        return matrix

    def submit(
        self, a: Matrix, b: Matrix, *, turn_a: bool, turn_b: bool, out: DType, planner: Planner
    ) -> int:
        left, right = (a.values.T if turn_a else a.values), (b.values.T if turn_b else b.values)
        gemm = Gemm(left.shape[0], right.shape[1], left.shape[1])
        element = ElementBytes(a.buffer.dtype.itemsize, out.itemsize)
        refs = MatrixRef(a.id, turn_a), MatrixRef(b.id, turn_b)
        job = GemmJob(
            next(self._ids), gemm, *refs, element, a.buffer.dtype.value, out.value, planner
        )
        whole = (gemm.m + gemm.n) * gemm.k * element.sent + gemm.m * gemm.n * 4
        target = arrays.empty(gemm.m, gemm.n, out)
        target.array.view(np.uint8)[...] = 0x7F
        product = Product(job, (a.id, b.id), Output(target), left @ right, int(whole / 0.9) + 1)
        self.products[job.id] = product
        self.smallest[job.id] = min(
            (p.core.memory_bytes for p in self.peers.values()), default=9**9
        )
        self._obey(self.manager.submit(job, a.buffer, b.buffer, self.now_s))
        return job.id

    def unfinished(self) -> list[int]:
        return [i for i, product in self.products.items() if not product.done]

    def in_use(self, matrix: int) -> bool:
        return any(matrix in self.products[i].operands for i in self.unfinished())

    def release(self, matrix: int) -> None:
        del self.matrices[matrix]
        self._obey(self.manager.release(matrix, self.now_s))

    def pause(self) -> None:
        """Nothing is submitted for now, and an operand that nobody knows is released."""
        self._obey(self.manager.pause(self.now_s))
        self._obey(self.manager.release(10**9, self.now_s))

    # --- one step of anything ---

    def steps(self) -> list[tuple[str, int]]:
        """What may happen next."""
        found: list[tuple[str, int]] = []
        for peer in self.peers.values():
            found += [("down", peer.id)] * bool(peer.down)
            found += [("up", peer.id)] * bool(peer.up)
            found += [("compute", peer.id)] * bool(peer.orders)
        return found

    def step(self, random: Random) -> bool:
        """Do one of the possible steps; False when there is none."""
        steps = self.steps()
        if not steps:
            return False
        self.now_s += 0.001
        kind, which = random.choice(steps)
        match kind:
            case "down":
                self._deliver_down(self.peers[which])
            case "up":
                self._deliver_up(self.peers[which])
            case _:
                peer = self.peers[which]
                self._compute(peer, peer.orders.pop(random.randrange(len(peer.orders))))
        return True

    def _deliver_down(self, peer: Peer) -> None:
        message = decode(peer.down.popleft())
        assert not isinstance(message, messages.Error), f"a healthy device was refused: {message}"
        if isinstance(message, messages.Bye):
            return
        for action in peer.core.received(message):  # raises when it breaks the protocol
            if isinstance(action, Compute):
                peer.orders.append(action)
            else:
                raise AssertionError(f"the device could not do what it was asked: {action}")

    def _compute(self, peer: Peer, order: Compute) -> None:
        payload = bytes(execute(self._backend, order).pack())
        for message in peer.core.computed(order.run, payload, 0.001):
            assert not isinstance(message, Order)
            self._up(peer, message)

    def _deliver_up(self, peer: Peer) -> None:
        message = decode(peer.up.popleft())
        session = self.manager.sessions.get(peer.id)
        if session is not None and isinstance(message, messages.TaskError | messages.Result):
            task = session.expected.get(message.id)
            if task is not None and _is_fault(message, task):
                self.task_of[id(task)] = task
                self.faults[id(task)] += 1
        self._obey(self.manager.received(peer.id, message, self.now_s))

    def _up(self, peer: Peer, message: Message) -> None:
        peer.up.append(b"".join(encode(message)))

    def _obey(self, orders: Sequence[Instruction]) -> None:
        for order in orders:
            match order:
                case Send(session, message):
                    if session in self.peers:
                        self.peers[session].down.append(b"".join(encode(message)))
                case Close(session):
                    self.peers.pop(session, None)
                case Place(task, payload):
                    self.products[task.job].output.place(task.gemm, payload)
                case Done(job):
                    product = self.products[job]
                    assert not product.done
                    product.output.finish()
                    product.done = True
                    assert np.array_equal(product.output.out.float32(), product.expected)
                case Failed(job, reason):
                    raise AssertionError(f"job {job} fails: {reason}")
        for job in self.unfinished():
            if reason := self.manager.scheduler.stuck(job):
                self._check_stuck(job, reason)

    def _check_stuck(self, job: int, reason: str) -> None:
        product = self.products[job]
        if "memory" in reason:
            assert self.smallest[job] < product.needs_bytes, (
                f"every device had the memory: {reason}"
            )
        else:
            assert "failed on" in reason
            tasks = [u for u in self.task_of.values() if u.job == job]
            assert max((self.faults[id(u)] for u in tasks), default=0) >= MAX_FAILURES, reason

    # --- misbehaviour ---

    def fail(self, device: int, random: Random) -> None:
        peer = self.peers[device]
        order = peer.orders.pop(random.randrange(len(peer.orders)))
        for message in peer.core.failed(order.run, "boom"):
            assert not isinstance(message, Order)
            self._up(peer, message)

    def answer_wrongly(self, device: int, random: Random) -> None:
        peer = self.peers[device]
        order = peer.orders.pop(random.randrange(len(peer.orders)))
        rows, columns, out = order.rows, order.columns, order.out
        match random.randrange(3):
            case 0:
                rows += 1
            case 1:
                columns += 1
            case _:
                out = DType.BF16 if out is not DType.BF16 else DType.FP32
        payload = bytes(rows * columns * out.itemsize)
        for message in peer.core.computed(order.run, b"", 0.0):
            assert isinstance(message, messages.Result)
            self._up(peer, messages.Result(order.run, rows, columns, out.value, 0.0, payload))

    def repeat(self, device: int, random: Random) -> None:
        """Send something again that is already on its way."""
        peer = self.peers[device]
        again = [data for data in peer.up if not isinstance(decode(data), messages.Hello)]
        if again:
            peer.up.append(random.choice(again))

    def answer_unasked(self, device: int, run: int) -> None:
        peer = self.peers[device]
        self._up(peer, messages.Result(run, 1, 1, "fp32", 0.0, bytes(4)))
        self._up(peer, messages.TaskError(run + 1, "never heard of it"))

    # --- the end ---

    def _go_on(self, random: Random) -> None:
        for _ in range(20_000):
            if not self.step(random):
                return
        raise AssertionError("it goes on for ever")

    def settle(self, random: Random) -> None:
        """With a healthy device there, everything must come to an end."""
        self._go_on(random)
        if not any(len(rates.dtypes) == len(ALL) for rates in self.manager.scheduler.rates):
            self.join(10_000)
            self.settle(random)
            return
        if self.unfinished():  # what is kept back is tried again, and by a newcomer at once
            self.join(10_000)
            for _ in range(5):
                self._go_on(random)
                for session in self.manager.sessions.values():
                    session.heard_s = self.now_s + HOLD_MOST_S
                self.pass_time(HOLD_MOST_S)
        stuck = self.unfinished()
        assert not stuck, f"stuck with {self.manager.ready_devices} devices ready"
        draining = [p.id for p in self.peers.values() if p.core.draining]
        assert not draining, f"devices {draining} have answered everything and are not let go"

    def check_empty(self) -> None:
        """Nothing is submitted, nothing named: nothing may be kept."""
        assert leftovers(self.manager) == []


def _is_fault(message: messages.TaskError | messages.Result, task: Task) -> bool:
    if isinstance(message, messages.TaskError):
        return True
    block = task.gemm.block
    shape = (block.m.size, block.n.size, task.gemm.out)
    return (message.rows, message.columns, message.dtype) != shape


seeds = st.integers(0, 2**32 - 1)
sides = st.integers(1, 8)
dtypes = st.sampled_from(DType)


class History(RuleBasedStateMachine):
    """Joins, losses, drains, GEMMs and releases in any order, of devices that do as they should."""

    memory = ROOMY
    mixed_outputs = False

    def __init__(self) -> None:
        super().__init__()
        self.runtime = Harness()

    def _some(self, seed: int, of: Sequence[int]) -> int:
        return of[seed % len(of)]

    @property
    def _computing(self) -> list[int]:
        return [p.id for p in self.runtime.peers.values() if p.orders]

    @rule(
        share=st.floats(0, 1),
        speed=st.sampled_from([0.1, 1.0, 1.0, 30.0]),
        dtypes=st.sampled_from([ALL, ALL, (DType.FP32,)]),
    )
    def join(self, share: float, speed: float, dtypes: Sequence[DType]) -> None:
        if len(self.runtime.peers) < 6:
            low, high = self.memory
            self.runtime.join(int(low + share * (high - low)), speed, dtypes)

    @precondition(lambda self: self.runtime.peers)
    @rule(seed=seeds)
    def lose(self, seed: int) -> None:
        self.runtime.lose(self._some(seed, list(self.runtime.peers)))

    @precondition(lambda self: any(p.core.welcome for p in self.runtime.peers.values()))
    @rule(seed=seeds)
    def drain(self, seed: int) -> None:
        self.runtime.drain(
            self._some(seed, [p.id for p in self.runtime.peers.values() if p.core.welcome])
        )

    @rule(m=sides, n=sides, k=sides, turns=st.integers(0, 3), dtype=dtypes, seed=seeds)
    def submit(self, m: int, n: int, k: int, turns: int, dtype: DType, seed: int) -> None:
        random = Random(seed)
        turn_a, turn_b = bool(turns & 1), bool(turns & 2)
        a = self.runtime.matrix(*((k, m) if turn_a else (m, k)), dtype, seed)
        b = self.runtime.matrix(*((n, k) if turn_b else (k, n)), dtype, seed + 1)
        self._submit(a, b, turn_a, turn_b, random)

    @precondition(lambda self: self.runtime.matrices)
    @rule(which=seeds, side=sides, turned=st.booleans(), as_left=st.booleans(), seed=seeds)
    def submit_again(self, which: int, side: int, turned: bool, as_left: bool, seed: int) -> None:
        """A GEMM of an operand that devices may hold already, maybe with itself."""
        random = Random(seed)
        known = self.runtime.matrices[self._some(which, list(self.runtime.matrices))]
        if random.random() < 0.2:
            self._submit(known, known, turned, not turned, random)
            return
        rows, columns = known.values.T.shape if turned else known.values.shape
        dtype = known.buffer.dtype
        if as_left:
            other = self.runtime.matrix(columns, side, dtype, seed)
            self._submit(known, other, turned, False, random)
        else:
            other = self.runtime.matrix(side, rows, dtype, seed)
            self._submit(other, known, False, turned, random)

    def _submit(self, a: Matrix, b: Matrix, turn_a: bool, turn_b: bool, random: Random) -> None:
        planner: Planner = self.runtime.planner
        if random.random() < 0.6:
            planner = BoxPlanner(random.randrange(2**32))
        out = random.choice([DType.FP32, a.buffer.dtype]) if self.mixed_outputs else DType.FP32
        self.runtime.submit(a, b, turn_a=turn_a, turn_b=turn_b, out=out, planner=planner)

    @rule(seed=seeds)
    def release(self, seed: int) -> None:
        free = [i for i in self.runtime.matrices if not self.runtime.in_use(i)]
        if free:
            self.runtime.release(self._some(seed, free))

    @rule(seed=seeds, steps=st.integers(1, 60))
    def run_a_while(self, seed: int, steps: int) -> None:
        random = Random(seed)
        for _ in range(steps):
            if not self.runtime.step(random):
                break

    @rule(seconds=st.sampled_from([0.02, 0.02, 3.0, 13.0]))
    def time_passes(self, seconds: float) -> None:
        """Others help with what is overdue; who is silent for too long is lost."""
        self.runtime.pass_time(seconds)

    @precondition(lambda self: self.runtime.peers)
    @rule(seed=seeds, run=st.integers(0, 2**40))
    def late_and_unasked_answers(self, seed: int, run: int) -> None:
        """Answers nobody waits for change nothing."""
        device = self._some(seed, list(self.runtime.peers))
        if self.runtime.peers[device].core.welcome:
            self.runtime.repeat(device, Random(seed))
            self.runtime.answer_unasked(device, 2**41 + run)

    @precondition(lambda self: self._computing)
    @rule(seed=seeds)
    def answer_for_another(self, seed: int) -> None:
        owner = self._some(seed, self._computing)
        others = [p for p in self.runtime.peers.values() if p.id != owner and p.core.welcome]
        if others:
            run = self.runtime.peers[owner].orders[0].run
            self.runtime.answer_unasked(others[seed % len(others)].id, run)

    @rule()
    def pause(self) -> None:
        self.runtime.pause()

    @invariant()
    def the_books_are_right(self) -> None:
        check_state(self.runtime.manager)

    def teardown(self) -> None:
        random = Random(0)
        self.runtime.settle(random)
        for matrix in list(self.runtime.matrices):
            self.runtime.release(matrix)
        self.runtime.settle(random)
        self.runtime.check_empty()


class Troubles(History):
    """The same with devices that fail, answer nonsense, or have hardly any memory."""

    mixed_outputs = True

    @precondition(lambda self: self._computing)
    @rule(seed=seeds)
    def fail(self, seed: int) -> None:
        self.runtime.fail(self._some(seed, self._computing), Random(seed))

    @precondition(lambda self: self._computing)
    @rule(seed=seeds)
    def answer_wrongly(self, seed: int) -> None:
        self.runtime.answer_wrongly(self._some(seed, self._computing), Random(seed))

    @precondition(lambda self: self._computing)
    @rule(seed=seeds, steps=st.integers(5, 60))
    def fail_all_the_time(self, seed: int, steps: int) -> None:
        random = Random(seed)
        for _ in range(steps):
            if self._computing and random.random() < 0.5:
                self.runtime.fail(random.choice(self._computing), random)
            elif not self.runtime.step(random):
                break


class TightTroubles(Troubles):
    memory = TIGHT


def _run(machine: type[History], thorough: int, *, shrink: bool = True) -> None:
    phases = set(Phase) if shrink else {Phase.reuse, Phase.generate}
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples(thorough),
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=phases,
            report_multiple_bugs=False,
        ),
    )


@pytest.mark.usefixtures("_often_recut")
@pytest.mark.parametrize("drop_bytes", [64, 2**20])
@pytest.mark.parametrize("machine", [History, Troubles, TightTroubles])
def test_any_history(
    machine: type[History], drop_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`drop_bytes`: also with devices that are told at once what they may forget."""
    monkeypatch.setattr(scheduler_module, "_DROP_BATCH_BYTES", drop_bytes)
    _run(machine, 20, shrink=machine is History)


# --- single histories ---


@dataclass
class FixedPlanner(FakePlanner):
    """The boxes it is told, as rows of C: device, first row, last row."""

    shares: list[tuple[int, int, int]]

    def planned(self, gemm: Gemm, devices: Sequence[DeviceRates]) -> Plan:
        if {device for device, _, _ in self.shares} - {rates.device for rates in devices}:
            raise PlanError("a device that is told to do a share is not there")
        n, k = Span(0, gemm.n), Span(0, gemm.k)
        tiles = []
        for device, start, stop in self.shares:
            tile = Tile(Span(start, stop), n, k)
            tiles.append((device, TileCut(tile, (tile.m,), (n,), (k,))))
        return _plan(gemm, tiles)


def _settled(runtime: Harness, *, but: Sequence[int] = ()) -> None:
    """Deliver and compute everything, except on some devices."""
    random = Random(0)
    while steps := [s for s in runtime.steps() if s[1] not in but]:
        kind, which = random.choice(steps)
        peer = runtime.peers.get(which)
        if kind == "compute" and peer is not None:
            runtime._compute(peer, peer.orders.pop())
        elif peer is not None:
            (runtime._deliver_down if kind == "down" else runtime._deliver_up)(peer)


def _submit(runtime: Harness, rows: int, *shares: tuple[int, int, int]) -> Product:
    """C of rows x 4, depth 4. A share of r rows needs 32 r + 64 bytes on its device."""
    a = runtime.matrix(rows, 4, DType.FP32, 1)
    b = runtime.matrix(4, 4, DType.FP32, 2)
    planner = FixedPlanner(list(shares))
    job = runtime.submit(a, b, turn_a=False, turn_b=False, out=DType.FP32, planner=planner)
    return runtime.products[job]


def _joined(runtime: Harness, *memories: int, speed: float = 1.0) -> list[int]:
    ids = [runtime.join(memory, speed) for memory in memories]
    _settled(runtime)
    return ids


def _fails_everywhere(runtime: Harness, devices: Sequence[int], product: Product) -> int:
    """Devices fail a task until none of them is asked any more; returns how often they did."""
    failed = 0
    while any(runtime.peers[device].down for device in devices):
        for device in devices:
            _computing(runtime, device)
            while runtime.peers[device].orders:
                runtime.fail(device, Random(0))
                failed += 1
            while runtime.peers[device].up:
                runtime._deliver_up(runtime.peers[device])
        assert failed < 100
    assert not product.done
    return failed


@pytest.mark.parametrize("devices", [1, 2, 6])
@pytest.mark.usefixtures("_never_set_aside")
def test_a_unit_that_always_fails_waits_and_is_tried_ever_later(devices: int) -> None:
    runtime = Harness()
    every = _joined(runtime, *[1000] * devices)
    product = _submit(runtime, 4, (every[0], 0, 4))
    assert _fails_everywhere(runtime, every, product) == max(devices, MAX_FAILURES)
    reason = runtime.manager.scheduler.stuck(product.job.id)
    assert "boom" in reason
    for wait_s in (HOLD_S, 2 * HOLD_S, 4 * HOLD_S):
        _hear_all(runtime, wait_s)
        runtime.pass_time(wait_s - 0.1)
        assert not any(peer.down for peer in runtime.peers.values())
        runtime.pass_time(0.2)
        assert 1 <= _fails_everywhere(runtime, every, product) <= devices
    _hear_all(runtime, 8 * HOLD_S)
    runtime.pass_time(8 * HOLD_S)
    _settled(runtime)
    assert product.done
    assert not runtime.manager.scheduler.stuck(product.job.id)


def _hear_all(runtime: Harness, for_s: float) -> None:
    for session in runtime.manager.sessions.values():
        session.heard_s = runtime.now_s + for_s


@pytest.mark.usefixtures("_never_set_aside")
def test_what_every_device_failed_a_newcomer_does_at_once() -> None:
    runtime = Harness()
    every = _joined(runtime, 1000, 1000)
    product = _submit(runtime, 4, (every[0], 0, 4))
    _fails_everywhere(runtime, every, product)
    (newcomer,) = _joined(runtime, 1000)
    _settled(runtime)
    assert product.done
    assert runtime.manager.sessions[newcomer].counters.blocks == 1


def _computing(runtime: Harness, *devices: int) -> None:
    """Deliver what was sent to some devices, and nothing else."""
    for device in devices:
        while runtime.peers[device].down:
            runtime._deliver_down(runtime.peers[device])


def test_a_newcomer_takes_some_of_what_is_running() -> None:
    runtime = Harness()
    (first,) = _joined(runtime, 4000, speed=0.5)
    product = _submit(runtime, 8, *((first, row, row + 1) for row in range(8)))
    _computing(runtime, first)
    (second,) = _joined_quietly(runtime, 4000)
    _settled(runtime, but=[first])
    assert not product.done
    answered = runtime.manager.sessions[second].counters.blocks
    assert 2 <= answered < 8
    _settled(runtime)
    assert product.done
    assert runtime.manager.scheduler.counters.results == 8
    assert runtime.manager.sessions[first].counters.blocks == 8 - answered  # the rest was cancelled


def _joined_quietly(runtime: Harness, memory: int) -> list[int]:
    """A device joins; what others have to do stays undone."""
    device = runtime.join(memory, 1.0)
    runtime._deliver_up(runtime.peers[device])
    return [device]


def test_what_is_overdue_is_given_to_others_before_a_device_is_lost() -> None:
    runtime = Harness()
    first, second = _joined(runtime, 4000, 4000)
    product = _submit(runtime, 4, (first, 0, 2), (second, 2, 4))
    _settled(runtime, but=[first])
    assert not product.done
    runtime.pass_time(2 * lateness.OVERDUE_S)  # the plan said one second
    runtime.pass_time(0.1)
    _settled(runtime, but=[first])
    assert product.done
    assert first in runtime.peers
    assert runtime.manager.scheduler.counters.speculative == 1
    session = runtime.manager.sessions[first]
    assert runtime.manager.state(session) is DeviceState.OVERDUE
    assert session.reason
    # It gets nothing new, until it answers again.
    assert [r.device for r in runtime.manager.scheduler.rates] == [second]
    _settled(runtime)
    assert runtime.manager.state(session) is DeviceState.READY
    assert len(runtime.manager.scheduler.rates) == 2


def test_who_is_silent_for_long_for_so_many_blocks_gets_help_before_it_is_overdue() -> None:
    runtime = Harness()
    devices = _joined(runtime, *[4000] * 4)
    silent, others = devices[0], devices[1:]
    parts = [(silent, row, row + 1) for row in range(9)]
    product = _submit(runtime, 12, *parts, *((d, 9 + i, 10 + i) for i, d in enumerate(others)))
    _settled(runtime, but=[silent])
    runtime.pass_time(lateness.OVERDUE_S + 0.1)  # the plan said one second for nine blocks
    session = runtime.manager.sessions[silent]
    assert runtime.manager.state(session) is not DeviceState.OVERDUE
    _settled(runtime, but=[silent])
    assert product.done
    assert runtime.manager.scheduler.counters.speculative == 9


def test_many_small_blocks_before_do_not_make_a_long_one_late() -> None:
    load = DeviceLoad(DeviceRates(1, 1e9, 1e9, flops_per_s=1e9))
    one = Span(0, 1)
    detail = GemmTask(Block(one, one, (one,)), 0, False, False, False, "fp32")
    load.asked(0, Task(1, (), 20 * 10**9, 0, detail), 0, 0.0)
    for run in range(1, 1000):
        load.asked(run, Task(2, (), 10**6, 0, detail), 0, 0.0)
    assert load.longest_silence_s(0.0) >= 20.0


def test_where_all_are_slower_than_predicted_nobody_is_helped_early() -> None:
    runtime = Harness()
    devices = _joined(runtime, *[4000] * 4)
    product = _submit(
        runtime,
        12,
        *((d, 3 * i + j, 3 * i + j + 1) for i, d in enumerate(devices) for j in range(3)),
    )
    runtime.pass_time(lateness.OVERDUE_S + 0.5)
    assert runtime.manager.scheduler.counters.speculative == 0
    _settled(runtime)
    assert product.done
