"""Multiplying whole tiles gives what multiplying block by block gives."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave import arrays
from cleave.arrays import Buffer, DType
from cleave.fleet.product import Output
from cleave.gemm import Gemm
from cleave.machine.backends import Compute, NumpyBackend, StoredArray
from cleave.planner.plan import DeviceRates, ElementBytes
from cleave.scheduler.tiles.gemm_job import GemmJob, MatrixRef
from cleave.scheduler.tiles.scheduler import Scheduler
from cleave.scheduler.tiles.tasks import Task
from emulator.deferred import DeferredOutput, DeferredProduct
from tests.scheduler.test_scheduler import BoxPlanner

FLEET = [DeviceRates(i, 1e6, 1e6, 1e9) for i in (1, 2, 3)]


class Counting(NumpyBackend):
    """Counts its multiplications."""

    def __init__(self) -> None:
        self.calls = 0

    def matmul(self, a: Buffer, b: Buffer, out: Buffer, *, accumulate: bool = False) -> None:
        self.calls += 1
        super().matmul(a, b, out, accumulate=accumulate)


def _buffer(values: Any, dtype: DType) -> Buffer:
    return Buffer(arrays.narrow(values.astype(np.float32), dtype), dtype)


def _product(task: Task, operands: tuple[Buffer, Buffer], backend: Any, copy: bool) -> Any:
    """What an emulated device answers, of strips that are views of the operands, or copies."""
    stored = []
    for i, name in enumerate(task.inputs):
        region = operands[i % 2].region(name.rows, name.columns)
        rows, columns = region.shape
        payload: Any = bytes(region.pack()) if copy else region
        stored.append(StoredArray(rows, columns, region.dtype, payload, region.nbytes))
    detail = task.gemm
    order = Compute(
        1,
        list(zip(stored[::2], stored[1::2], strict=True)),
        detail.transpose_a,
        detail.transpose_b,
        detail.block.m.size,
        detail.block.n.size,
        DType(detail.out),
        task.flops,
    )
    return DeferredProduct(order, backend)


@given(
    gemm=st.builds(Gemm, *[st.integers(1, 10)] * 3),
    seed=st.integers(0, 2**32 - 1),
    turn_a=st.booleans(),
    turn_b=st.booleans(),
    copies=st.sampled_from([0.0, 0.1, 1.0]),
    kinds=st.sampled_from([(DType.FP32, DType.FP32), (DType.BF16, DType.FP32)]),
)
def test_any_plan_in_any_order(
    gemm: Gemm, seed: int, turn_a: bool, turn_b: bool, copies: float, kinds: tuple[DType, DType]
) -> None:
    random, rng = Random(seed), np.random.default_rng(seed)
    dtype, out_dtype = kinds
    a, b = rng.integers(-2, 3, (gemm.m, gemm.k)), rng.integers(-2, 3, (gemm.k, gemm.n))
    operands = _buffer(a.T if turn_a else a, dtype), _buffer(b.T if turn_b else b, dtype)
    job = GemmJob(
        1,
        gemm,
        MatrixRef(1, turn_a),
        MatrixRef(2, turn_b),
        ElementBytes(dtype.itemsize, out_dtype.itemsize),
        dtype.value,
        out_dtype.value,
        BoxPlanner(seed),
    )
    tasks = [task for _, task in job.assign(FLEET, Scheduler().device_memory)]
    random.shuffle(tasks)
    out = arrays.empty(gemm.m, gemm.n, out_dtype)
    out.array.view(np.uint8)[...] = 0x7F
    output = DeferredOutput(out)
    for task in tasks:
        product = _product(task, operands, NumpyBackend(), random.random() < copies)
        real = random.random() < copies / 2
        output.place(task.gemm, product.compute() if real else product)
    output.finish()
    assert np.array_equal(out.float32(), a @ b)


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize(("turn_a", "turn_b"), [(False, False), (True, False), (False, True)])
def test_a_tile_is_multiplied_in_one_call(dtype: DType, turn_a: bool, turn_b: bool) -> None:
    from cleave.planner.tiles.planner import TilePlanner

    rng = np.random.default_rng(0)
    a, b = rng.integers(-2, 3, (40, 7)), rng.integers(-2, 3, (7, 50))
    operands = _buffer(a.T if turn_a else a, dtype), _buffer(b.T if turn_b else b, dtype)
    refs = MatrixRef(1, turn_a), MatrixRef(2, turn_b)
    element = ElementBytes(dtype.itemsize, dtype.itemsize)
    slow = [DeviceRates(i, 1e2, 1e2, 1e3) for i in (1, 2, 3)]
    job = GemmJob(1, Gemm(40, 50, 7), *refs, element, dtype.value, dtype.value, TilePlanner())
    tasks = [task for _, task in job.assign(slow, Scheduler().device_memory)]
    assert job.plan is not None
    assert len(tasks) > len(job.plan.tiles)
    backend = Counting()
    out, blockwise = (arrays.empty(40, 50, dtype) for _ in range(2))
    output, plain = DeferredOutput(out), Output(blockwise)
    for task in tasks:
        output.place(task.gemm, _product(task, operands, backend, False))
        plain.place(task.gemm, _product(task, operands, NumpyBackend(), False).compute())
    assert backend.calls == 0
    output.finish()
    plain.finish()
    assert backend.calls == len(job.plan.tiles)
    assert np.array_equal(out.float32(), a @ b)
    assert np.array_equal(out.array, blockwise.array)
