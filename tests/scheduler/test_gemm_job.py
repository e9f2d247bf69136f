"""A GEMM as work: tasks that cover it, partial sums in the order of k, operands that are held."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave import arrays
from cleave.arrays import Array, Buffer, DType
from cleave.fleet.product import Output
from cleave.gemm import Block, Gemm, Span
from cleave.machine.backends import Compute, NumpyBackend, StoredArray, execute
from cleave.planner.plan import (
    DeviceRates,
    ElementBytes,
    Plan,
    Planner,
    Residency,
)
from cleave.planner.tiles.planner import TilePlanner
from cleave.scheduler import events
from cleave.scheduler.tiles.gemm_job import GemmJob, MatrixRef
from cleave.scheduler.tiles.scheduler import Scheduler
from cleave.scheduler.tiles.tasks import ArrayRef, Task
from tests.examples import examples
from tests.planner.fakes import OneDevice
from tests.scheduler.test_scheduler import BoxPlanner

FP32 = ElementBytes(4, 4)
A, B = 101, 102
A_AS_IT_LIES, B_AS_IT_LIES = MatrixRef(A, False), MatrixRef(B, False)
seeds = st.integers(0, 2**32 - 1)
gemms = st.builds(Gemm, *[st.integers(1, 9)] * 3)


def _fleet(devices: int, memory_bytes: int = 2**30) -> list[DeviceRates]:
    return [DeviceRates(i + 1, 1e6, 1e5, 1e9, 0.0, memory_bytes) for i in range(devices)]


def _job(
    gemm: Gemm,
    planner: Planner,
    *,
    a: MatrixRef = A_AS_IT_LIES,
    b: MatrixRef = B_AS_IT_LIES,
    element: ElementBytes = FP32,
    dtype: str = "fp32",
    out: str = "fp32",
) -> GemmJob:
    return GemmJob(1, gemm, a, b, element, dtype, out, planner)


def _tasks(job: GemmJob, devices: int = 3) -> list[tuple[int, Task]]:
    return list(job.assign(_fleet(devices), Scheduler().device_memory))


@given(gemms, seeds, st.booleans(), st.booleans())
def test_units_do_every_multiplication_once(
    gemm: Gemm, seed: int, turn_a: bool, turn_b: bool
) -> None:
    job = _job(
        gemm,
        BoxPlanner(seed),
        a=MatrixRef(A, turn_a),
        b=MatrixRef(B, turn_b),
        dtype="bf16",
        out="bf16",
        element=ElementBytes(2, 2),
    )
    times = np.zeros((gemm.m, gemm.n, gemm.k), np.int8)
    stored: dict[tuple[int, Span, Span], ArrayRef] = {}  # the same region has one name
    for _, task in _tasks(job):
        block: Block = task.gemm.block
        assert task.flops == block.flops
        assert task.gemm.partial == (block.k.size < gemm.k)
        assert task.gemm.out == ("fp32" if task.gemm.partial else "bf16")
        assert task.output_bytes == block.elements * (4 if task.gemm.partial else 2)
        assert (task.gemm.transpose_a, task.gemm.transpose_b) == (turn_a, turn_b)
        names = [(x.operand, x.rows, x.columns) for x in task.inputs]
        expected = []
        for k in block.pieces:
            expected.append((A, *((k, block.m) if turn_a else (block.m, k))))
            expected.append((B, *((block.n, k) if turn_b else (k, block.n))))
            times[block.m.start : block.m.stop, block.n.start : block.n.stop, k.start : k.stop] += 1
        assert names == expected
        assert all(x.nbytes == x.rows.size * x.columns.size * 2 for x in task.inputs)
        assert all(stored.setdefault(n, x) is x for n, x in zip(names, task.inputs, strict=True))
    assert (times == 1).all()
    assert len({x.id for x in stored.values()}) == len(stored)


# --- partial sums ---


def _block(a: Array, b: Array, task: Task) -> Buffer:
    """What a device answers: the sum of the products of the pieces."""
    block: Block = task.gemm.block
    left, right = Buffer(a, DType.FP32), Buffer(b, DType.FP32)
    pairs = [
        (_in_store(left.region(block.m, k)), _in_store(right.region(k, block.n)))
        for k in block.pieces
    ]
    order = Compute(
        1, pairs, False, False, block.m.size, block.n.size, DType(task.gemm.out), block.flops
    )
    return execute(NumpyBackend(), order)


def _in_store(buffer: Buffer) -> StoredArray:
    return StoredArray(*buffer.shape, buffer.dtype, buffer, buffer.nbytes)


def _slab_by_slab(gemm: Gemm, answers: Iterable[tuple[Task, Buffer]]) -> Array:
    """Partial sums added in the order of k, in fp32."""
    total = np.zeros((gemm.m, gemm.n), np.float32)
    for task, answer in sorted(answers, key=lambda pair: pair[0].gemm.block.k):
        block = task.gemm.block
        target = total[block.m.start : block.m.stop, block.n.start : block.n.stop]
        if block.k.start == 0:
            target[...] = answer.array
        else:
            target += answer.array
    return total


def _in_any_order(
    job: GemmJob, out: DType, answers: list[tuple[Task, Buffer]], random: Random
) -> Array:
    """Answers arrive in any order, and are put in place in one that the work allows."""
    result = arrays.empty(job.gemm.m, job.gemm.n, out)
    output = Output(result)
    coming = answers.copy()
    random.shuffle(coming)
    placed = 0
    while coming:
        assert not job.complete
        for task, payload in job.arrived(*coming.pop()):
            output.place(task.gemm, payload)
            placed += 1
    assert job.complete
    assert placed == len(answers)
    output.finish()
    return result.array


@given(gemms, seeds)
def test_partial_sums_do_not_depend_on_the_order_of_arrival(gemm: Gemm, seed: int) -> None:
    rng = np.random.default_rng(seed)
    a = rng.standard_normal((gemm.m, gemm.k), np.float32) * np.float32(10.0 ** rng.integers(-4, 4))
    b = rng.standard_normal((gemm.k, gemm.n), np.float32)
    jobs = [_job(gemm, BoxPlanner(seed)) for _ in range(3)]
    assigned = [[task for _, task in _tasks(job)] for job in jobs]
    answers = [[(task, _block(a, b, task)) for task in tasks] for tasks in assigned]
    expected = _slab_by_slab(gemm, answers[0])
    for i, job in enumerate(jobs):
        got = _in_any_order(job, DType.FP32, answers[i], Random(seed + i))
        assert np.array_equal(got.view(np.uint32), expected.view(np.uint32))
    np.testing.assert_allclose(expected, a @ b, rtol=1e-3, atol=1e-3 * np.abs(a).max())


# --- what devices hold already ---


class _Spy:
    """Remembers what it was offered; plans like another."""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.offered: list[Residency] = []

    def plan(
        self,
        gemm: Gemm,
        element: ElementBytes,
        devices: Sequence[DeviceRates],
        residencies: Sequence[Residency] = (),
    ) -> Plan:
        self.offered = list(residencies)
        return self.planner.plan(gemm, element, devices, residencies)


def _holding(job: GemmJob, devices: int) -> Scheduler:
    """A scheduler whose devices hold what `work` needed."""
    scheduler = Scheduler()
    for rates in _fleet(devices):
        scheduler.handle(events.DeviceReady(rates), 0.0)
    scheduler.handle(events.Submitted(job), 0.0)
    return scheduler


def _check_residency(residency: Residency, gemm: Gemm) -> None:
    times = np.zeros((gemm.m, gemm.n, gemm.k), np.int8)
    for cut in residency.tiles.values():
        t = cut.tile
        times[t.m.start : t.m.stop, t.n.start : t.n.stop, t.k.start : t.k.stop] += 1
        for side, cuts in ((t.m, cut.m_cuts), (t.n, cut.n_cuts), (t.k, cut.k_cuts)):
            assert sum(c.size for c in cuts) == side.size
    assert (times == 1).all()


@settings(max_examples=examples(40))
@given(gemms, seeds, st.integers(1, 3), st.integers(0, 3), st.integers(1, 9), st.booleans())
def test_offered_residencies_cover_the_gemm_and_name_what_is_held(
    gemm: Gemm, seed: int, devices: int, turns: int, other_side: int, as_left: bool
) -> None:
    """Whatever the first plan was, a second GEMM of one of its operands is offered only covers."""
    first = _job(gemm, BoxPlanner(seed) if seed % 2 else TilePlanner())
    scheduler = _holding(first, devices)
    held_operand, (rows, columns) = (A, (gemm.m, gemm.k)) if turns & 1 else (B, (gemm.k, gemm.n))
    turned = bool(turns & 2)
    if turned:
        rows, columns = columns, rows
    known, new = MatrixRef(held_operand, turned), MatrixRef(103, False)
    spy = _Spy(TilePlanner())
    if as_left:
        second = Gemm(rows, other_side, columns)
        job = _job(second, spy, a=known, b=new)
    else:
        second = Gemm(other_side, columns, rows)
        job = _job(second, spy, a=new, b=known)
    tasks = list(job.assign(_fleet(devices), scheduler.device_memory))
    assert sum(task.flops for _, task in tasks) == second.flops
    for residency in spy.offered:
        _check_residency(residency, second)
        held = scheduler.device_memory.holders(held_operand)
        for device, cut in residency.tiles.items():
            names = {(x.rows, x.columns) for x in held[device]}
            if as_left:
                wanted = {known.region(m, k) for m in cut.m_cuts for k in cut.k_cuts}
            else:
                wanted = {known.region(k, n) for n in cut.n_cuts for k in cut.k_cuts}
            assert wanted <= names
            total = sum(x.nbytes for x in held[device])
            assert residency.held_bytes[device] == total


def test_strips_that_are_held_are_not_cut_into_more_blocks_than_their_size_asks_for() -> None:
    """Four strips of 1024 rows: blocks of 8 MiB are half as wide as the new side."""
    scheduler = _holding(_job(Gemm(4096, 64, 64), OneDevice(1, rows=4)), 1)
    spy = _Spy(TilePlanner())
    list(
        _job(Gemm(4096, 4096, 64), spy, b=MatrixRef(103, False)).assign(
            _fleet(1), scheduler.device_memory
        )
    )
    (residency,) = spy.offered
    assert [m.size for m in residency.tiles[1].m_cuts] == [1024] * 4
    assert [n.size for n in residency.tiles[1].n_cuts] == [2048] * 2
