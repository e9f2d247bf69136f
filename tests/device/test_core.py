"""The device's state machine, one message at a time."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.arrays import DType
from cleave.device.core import Action, DeviceCore
from cleave.errors import ProtocolError
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


STORE = (
    _put(1, 2, 3),
    _put(2, 3, 5),
    _put(3, 4, 5),
    _put(4, 3, 6),
    _put(5, 3, 5, DType.BF16),
    _put(6, 2, 2),
)
IMPOSSIBLE = {
    "unknown array": _run(1, 1, 99),
    "unknown first array": _run(1, 99, 2),
    "depths differ": _run(1, 1, 3),
    "depths differ, transposed": _run(1, 1, 2, transpose_a=True),
    "dtypes differ": _run(1, 1, 5),
    "odd inputs": _run(1, 1),
    "no inputs": _run(1),
    "three inputs": _run(1, 1, 2, 1),
    "sums of different shapes": _run(1, 1, 2, 1, 4),
    "unknown op": _run(1, 1, 2, op="attention"),
    "result of a 16-bit dtype that no input has": _run(1, 1, 2, out="bf16"),
}


@pytest.mark.parametrize("run", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_what_cannot_be_run_is_answered_with_a_task_error(run: messages.Run) -> None:
    core = _core(*STORE)
    error = _only(core.received(run))
    assert isinstance(error, messages.TaskError)
    assert error.id == 1
    assert error.reason
    assert core.idle
    # The session goes on, and the same id may be used for a run that can be done.
    assert isinstance(_only(core.received(_run(1, 1, 2))), Compute)


def test_memory_is_counted_to_the_byte() -> None:
    core = _core(_put(1, 2, 3), _put(2, 3, 5, DType.BF16), memory_bytes=24 + 30 + 4)
    assert core.occupied_bytes == 54
    core.received(_put(3, 1, 1))
    with pytest.raises(ProtocolError, match="does not fit"):
        core.received(_put(4, 1, 1, DType.FP16))


def test_a_dropped_array_frees_its_memory_and_is_unknown() -> None:
    core = _core(_put(1, 2, 3), _put(2, 3, 5), memory_bytes=24 + 60 + 40)
    assert core.received(messages.Drop((1, 55))) == []
    assert core.occupied_bytes == 60
    assert isinstance(_only(core.received(_run(1, 1, 2))), messages.TaskError)
    core.received(messages.Drop((1, 1)))
    assert core.occupied_bytes == 60
    core.received(_put(1, 2, 3))
    assert isinstance(_only(core.received(_run(2, 1, 2))), Compute)


def test_an_array_dropped_under_a_run_is_still_multiplied() -> None:
    core = _core(_put(1, 2, 3), _put(2, 3, 5))
    order = _only(core.received(_run(1, 1, 2)))
    core.received(messages.Drop((1, 2)))
    assert core.occupied_bytes == 0
    assert order.pairs[0][0].rows == 2
    assert isinstance(_only(core.computed(1, b"", 0.0)), messages.Result)


def test_results_that_are_not_answered_take_memory() -> None:
    core = _core(_put(1, 2, 3), _put(2, 3, 5), memory_bytes=24 + 60 + 40 + 39)
    assert isinstance(_only(core.received(_run(1, 1, 2))), Compute)
    error = _only(core.received(_run(2, 1, 2)))
    assert isinstance(error, messages.TaskError)
    with pytest.raises(ProtocolError, match="does not fit"):
        core.received(_put(3, 1, 10))
    core.computed(1, b"", 0.0)
    core.received(_put(3, 1, 10))
    assert isinstance(_only(core.received(_run(3, 1, 2, out="fp32"))), messages.TaskError)
    core.received(messages.Drop((3,)))
    assert isinstance(_only(core.received(_run(4, 1, 2))), Compute)


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


def test_an_array_sent_twice_breaks_the_protocol() -> None:
    core = _core(_put(1, 2, 3))
    with pytest.raises(ProtocolError, match="twice"):
        core.received(_put(1, 2, 3))


def test_a_run_asked_for_twice_breaks_the_protocol() -> None:
    core = _core(_put(1, 2, 3), _put(2, 3, 5))
    core.received(_run(1, 1, 2))
    with pytest.raises(ProtocolError, match="twice"):
        core.received(_run(1, 1, 2))


@pytest.mark.parametrize("length", [0, 23, 25])
@pytest.mark.parametrize("kind", [bytes, lambda data: memoryview(data)])
def test_a_payload_of_the_wrong_length_breaks_the_protocol(length: int, kind: Any) -> None:
    with pytest.raises(ProtocolError, match="bytes"):
        _core(messages.Put(1, 2, 3, "fp32", kind(bytes(length))))


def test_an_unknown_dtype_breaks_the_protocol() -> None:
    with pytest.raises(ProtocolError, match="unknown dtype"):
        _core(messages.Put(1, 2, 3, "int8", bytes(6)))


def test_a_cancelled_run_is_not_answered() -> None:
    core = _core(_put(1, 2, 3), _put(2, 3, 5))
    for run in (1, 2, 3):
        core.received(_run(run, 1, 2))
    assert core.received(messages.Cancel((1, 2, 77))) == []
    assert core.computed(1, b"", 0.0) == []
    assert core.failed(2, "boom") == []
    assert not core.idle
    assert len(core.computed(3, b"", 0.0)) == 1
    assert core.idle
    assert core.blocks == 1


def test_a_result_is_sent_once() -> None:
    core = _core(_put(1, 2, 3), _put(2, 3, 5))
    core.received(_run(1, 1, 2))
    assert len(core.computed(1, b"", 0.0)) == 1
    assert core.computed(1, b"", 0.0) == []
    assert core.failed(1, "boom") == []


def test_a_backend_that_fails_is_reported() -> None:
    core = _core(_put(1, 2, 3), _put(2, 3, 5))
    core.received(_run(1, 1, 2))
    assert core.failed(1, "out of memory") == [messages.TaskError(1, "out of memory")]
    assert core.idle


def test_draining_is_said_once_and_what_is_running_is_answered() -> None:
    core = _core(_put(1, 2, 3), _put(2, 3, 5))
    core.received(_run(1, 1, 2))
    assert core.drain() == [messages.Drain()]
    assert core.drain() == []
    assert isinstance(_only(core.computed(1, b"", 0.0)), messages.Result)


def test_welcome_comes_once() -> None:
    core = _core()
    assert core.received(messages.Welcome(device=3)) == []
    assert core.welcome is not None
    assert core.welcome.device == 3
    with pytest.raises(ProtocolError, match="welcome"):
        core.received(messages.Welcome(device=3))


@pytest.mark.parametrize(
    "message", [messages.Heartbeat(), messages.Drain(), messages.TaskError(1, "")]
)
def test_messages_of_devices_are_not_for_devices(message: Any) -> None:
    with pytest.raises(ProtocolError, match=message.TYPE):
        _core().received(message)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 4)), max_size=40))
def test_occupied_bytes_are_those_of_the_stored_arrays(steps: list[tuple[bool, int, int]]) -> None:
    core = DeviceCore(60)
    held: dict[int, int] = {}
    for is_put, name, size in steps:
        if not is_put:
            core.received(messages.Drop((name,)))
            held.pop(name, None)
        elif name in held or sum(held.values()) + 4 * size > 60:
            with pytest.raises(ProtocolError):
                core.received(_put(name, 1, size))
        else:
            core.received(_put(name, 1, size))
            held[name] = 4 * size
        assert core.occupied_bytes == sum(held.values()) <= 60
