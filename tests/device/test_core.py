"""The device's state machine, one message at a time."""

from typing import Any

import pytest

from cleave.arrays import DType
from cleave.device.core import Action, DeviceCore
from cleave.machine.backends import Compute
from cleave.protocol import messages


def _put(name: int, rows: int, columns: int, dtype: DType = DType.FP32) -> messages.Put:
    payload = bytes(rows * columns * dtype.itemsize)
    return messages.Put(name, rows, columns, dtype.value, payload)


def _run(
    run: int,
    *inputs: int,
    transpose_a: bool = False,
    transpose_b: bool = False,
    out: str = "fp32",
    op: str = "matmul",
) -> messages.Run:
    return messages.Run(run, op, inputs, transpose_a, transpose_b, out)


def _core(*puts: messages.Put, memory_bytes: int = 10_000) -> DeviceCore:
    core = DeviceCore(memory_bytes)
    for put in puts:
        assert core.received(put) == []
    return core


def _only(actions: list[Action]) -> Any:
    (action,) = actions
    return action


def test_a_run_is_computed_and_answered() -> None:
    core = _core(_put(1, 2, 3), _put(2, 3, 5))
    order = _only(core.received(_run(7, 1, 2)))
    assert isinstance(order, Compute)
    assert (order.run, order.rows, order.columns, order.out) == (7, 2, 5, DType.FP32)
    assert order.flops == 2 * 2 * 3 * 5
    assert not core.idle
    result = _only(core.computed(7, b"x" * 40, 0.5))
    assert result == messages.Result(7, 2, 5, "fp32", 0.5, b"x" * 40)
    assert core.idle
    assert (core.blocks, core.flops) == (1, 60)


@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_shapes_of_transposed_pairs(transpose_a: bool, transpose_b: bool) -> None:
    a1, a2 = ((3, 2), (4, 2)) if transpose_a else ((2, 3), (2, 4))
    b1, b2 = ((5, 3), (5, 4)) if transpose_b else ((3, 5), (4, 5))
    core = _core(_put(1, *a1), _put(2, *b1), _put(3, *a2), _put(4, *b2))
    run = _run(1, 1, 2, 3, 4, transpose_a=transpose_a, transpose_b=transpose_b)
    order = _only(core.received(run))
    assert (order.rows, order.columns) == (2, 5)
    assert order.flops == 2 * 2 * 5 * (3 + 4)
    assert [(a.rows, b.rows) for a, b in order.pairs] == [(a1[0], b1[0]), (a2[0], b2[0])]


def test_an_array_dropped_under_a_run_is_still_multiplied() -> None:
    core = _core(_put(1, 2, 3), _put(2, 3, 5))
    order = _only(core.received(_run(1, 1, 2)))
    core.received(messages.Drop((1, 2)))
    assert core.occupied_bytes == 0
    assert order.pairs[0][0].rows == 2
    assert isinstance(_only(core.computed(1, b"", 0.0)), messages.Result)


@pytest.mark.parametrize("ending", ["cancelled", "failed"])
def test_results_that_never_come_take_no_memory(ending: str) -> None:
    core = _core(_put(1, 2, 3), _put(2, 3, 5), memory_bytes=24 + 60 + 40)
    for run in range(5):
        assert isinstance(_only(core.received(_run(run, 1, 2))), Compute)
        if ending == "failed":
            core.failed(run, "boom")
        else:
            core.received(messages.Cancel((run,)))
            core.computed(run, b"", 0.0)


def test_draining_is_said_once_and_what_is_running_is_answered() -> None:
    core = _core(_put(1, 2, 3), _put(2, 3, 5))
    core.received(_run(1, 1, 2))
    assert core.drain() == [messages.Drain()]
    assert core.drain() == []
    assert isinstance(_only(core.computed(1, b"", 0.0)), messages.Result)
