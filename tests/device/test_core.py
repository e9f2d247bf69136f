"""The device's state machine, one message at a time. No graph is run, and none is looked at."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.arrays import DType
from cleave.device.core import Action, DeviceCore
from cleave.errors import ProtocolError
from cleave.machine.backends import Compute, StoredArray
from cleave.machine.graph_run import FetchRun, GraphRun, Kept
from cleave.protocol import limits, messages
from cleave.protocol.codec import decode
from cleave.protocol.features import ALL
from cleave.protocol.messages import Message

GRAPH = messages.Graph(9, bytes(100))
X = messages.Put(1, 2, 3, "fp32", bytes(24))
RUN = messages.RunGraph(1, 9, (1,), (10,), (40,), 5000)
FETCH = messages.Fetch(2, 10, 1, 2, 5, "bf16")
INTEGERS = messages.Put(3, 1, 2, "int64", bytes(16))


WELCOME = messages.Welcome(1, features=("graphs",))


def _core(
    *received: Message,
    memory_bytes: int = 1000,
    graphs: bool = True,
    welcome: messages.Welcome = WELCOME,
) -> DeviceCore:
    """A core that was welcomed, and has received some messages."""
    core = DeviceCore(memory_bytes, ["graphs"] if graphs else [])
    for message in (welcome, *received):
        core.received(message)
    return core


def _only(actions: list[Action]) -> Any:
    (action,) = actions
    return action


def test_a_graph_is_run_on_what_was_put_and_answered() -> None:
    core = _core(GRAPH, X)
    order = _only(core.received(RUN))
    assert isinstance(order, GraphRun)
    assert order.graph.model == GRAPH.payload
    (x,), (output,) = order.inputs, order.outputs
    assert isinstance(x, StoredArray)
    assert (x.rows, x.columns, x.dtype, x.payload) == (2, 3, DType.FP32, X.payload)
    assert output is not None
    assert (output.nbytes, output.value) == (40, None)
    assert not core.idle
    assert core.computed(1, b"", 0.5) == [messages.Computed(1, 0.5)]
    assert core.idle
    assert core.flops == 5000
    assert core.computed(1, b"", 0.5) == []


def test_what_a_server_says_of_operations_is_not_more_than_any_device_does() -> None:
    core = _core(GRAPH, X)
    core.received(replace(RUN, flops=2**63))
    core.computed(1, b"", 0.5)
    assert core.flops == 10**15


def test_what_a_run_makes_is_what_later_ones_take_before_it_is_answered() -> None:
    core = _core(GRAPH, X)
    first = _only(core.received(RUN))
    second = _only(core.received(messages.RunGraph(2, 9, (10, 1), (11,), (8,))))
    fetched = _only(core.received(replace(FETCH, id=3)))
    assert second.inputs[0] is first.outputs[0]
    assert fetched.array is first.outputs[0]


def test_an_id_of_zero_stands_for_zeros_among_inputs_and_for_nothing_among_outputs() -> None:
    core = _core(GRAPH, X)
    order = _only(core.received(messages.RunGraph(1, 9, (0, 1, 0), (0, 10, 0, 11), (8, 12))))
    assert [x is None for x in order.inputs] == [True, False, True]
    assert [output and output.nbytes for output in order.outputs] == [None, 8, None, 12]
    assert core.occupied_bytes == 100 + 24 + 8 + 12


# --- memory -----------------------------------------------------------------------------------


def test_what_a_run_needs_may_be_dropped_before_it_is_answered() -> None:
    core = _core(GRAPH, X)
    order = _only(core.received(RUN))
    core.received(messages.Drop((9, 1, 10)))
    assert core.occupied_bytes == 0
    core.received(messages.Put(2, 250, 1, "fp32", bytes(1000)))  # all of the memory
    assert order.inputs[0].payload == X.payload
    assert order.graph.model == GRAPH.payload
    assert core.computed(1, b"", 0.5) == [messages.Computed(1, 0.5)]
    core.received(messages.Drop((2,)))
    # The same may come again.
    core.received(GRAPH)
    core.received(X)
    assert isinstance(_only(core.received(replace(RUN, id=2))), GraphRun)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "graph", "run", "drop"]), st.integers(1, 5), st.integers(0, 30)
        ),
        max_size=40,
    )
)
def test_occupied_bytes_are_those_of_all_that_is_kept(steps: list[tuple[str, int, int]]) -> None:
    core = _core(messages.Graph(99, b""), memory_bytes=60)
    held: dict[int, int] = {}
    for run, (what, name, size) in enumerate(steps):
        message: Message
        match what:
            case "drop":
                core.received(messages.Drop((name,)))
                held.pop(name, None)
                assert core.occupied_bytes == sum(held.values())
                continue
            case "put":
                message = messages.Put(name, 1, size, "bool", bytes(size))
            case "graph":
                message = messages.Graph(name, bytes(size))
            case _:
                message = messages.RunGraph(run, 99, (), (name,), (size,))
        if name in held or sum(held.values()) + size > 60:
            with pytest.raises(ProtocolError):
                core.received(message)
        else:
            core.received(message)
            held[name] = size
        assert core.occupied_bytes == sum(held.values()) <= 60


# --- what ends the session --------------------------------------------------------------------


def test_a_graph_over_the_limit_ends_the_session() -> None:
    memory_bytes = 2 * limits.MAX_GRAPH_BYTES
    largest = messages.Graph(9, bytes(limits.MAX_GRAPH_BYTES))
    assert _core(largest, memory_bytes=memory_bytes).occupied_bytes == limits.MAX_GRAPH_BYTES
    with pytest.raises(ProtocolError, match=str(limits.MAX_GRAPH_BYTES)):
        _core(messages.Graph(9, bytes(limits.MAX_GRAPH_BYTES + 1)), memory_bytes=memory_bytes)


# --- arrays in parts ---------------------------------------------------------------------------


CONCAT = messages.Concat(4, (2, 1))


def test_a_run_goes_on_with_what_becomes_part_of_an_array() -> None:
    core = _core(GRAPH, X)
    order = _only(core.received(RUN))
    core.received(messages.Concat(4, (1,)))
    assert order.inputs[0].payload == X.payload


WITHOUT = {
    "not offered": {"graphs": False},
    "not agreed on": {"welcome": messages.Welcome(1, features=("measure", "other"))},
}
"""How a session comes to have no graphs: it takes both ends to agree on them."""


@pytest.mark.parametrize("how", WITHOUT.values(), ids=WITHOUT)
@pytest.mark.parametrize("message", [GRAPH, RUN, FETCH, CONCAT], ids=lambda m: m.TYPE)
def test_a_session_without_the_feature_has_none_of_its_messages(how: Any, message: Message) -> None:
    with pytest.raises(ProtocolError, match=f"{message.TYPE} belongs to a feature"):
        _core(X, message, **how)


@pytest.mark.parametrize("message", [GRAPH, RUN, FETCH, INTEGERS], ids=lambda m: m.TYPE)
def test_nothing_is_agreed_on_before_the_welcome(message: Message) -> None:
    with pytest.raises(ProtocolError):
        DeviceCore(1000, ["graphs"]).received(message)


def test_runs_of_all_kinds_are_counted_together() -> None:
    core = _core(GRAPH, X, RUN)
    for run in range(2, limits.MAX_RUNS_IN_FLIGHT + 1):
        core.received(messages.Fetch(run, 1, 0, 0, 1, "fp32"))
    with pytest.raises(ProtocolError, match=f"{limits.MAX_RUNS_IN_FLIGHT} runs are already"):
        core.received(replace(RUN, id=5000, outputs=(11,)))


# --- what cannot be run -----------------------------------------------------------------------


def test_a_failed_run_leaves_its_outputs_without_a_value_until_they_are_dropped() -> None:
    core = _core(GRAPH, X, RUN)
    assert core.failed(1, "it is too hot") == [messages.TaskError(1, "it is too hot")]
    assert core.idle
    assert core.occupied_bytes == 100 + 24 + 40
    with pytest.raises(ProtocolError, match="twice"):
        core.received(replace(X, id=10))
    # What needs it is an order as any other, which fails when it is its turn.
    order = _only(core.received(replace(RUN, id=2, inputs=(10,), outputs=(11,))))
    assert [x.value for x in order.inputs] == [None]
    core.received(messages.Drop((10,)))
    assert core.occupied_bytes == 100 + 24 + 40
    assert isinstance(_only(core.received(replace(RUN, id=3))), GraphRun)


def test_a_cancelled_run_is_not_answered_and_its_outputs_stay_taken() -> None:
    core = _core(GRAPH, X, RUN)
    assert core.received(messages.Cancel((1,))) == []
    assert core.idle
    assert core.computed(1, b"", 0.5) == []
    assert core.failed(1, "no") == []
    assert core.occupied_bytes == 100 + 24 + 40


# --- fetch ------------------------------------------------------------------------------------


def test_rows_of_an_array_are_returned_in_the_dtype_asked_for() -> None:
    core = _core(GRAPH, X, RUN)
    order = _only(core.received(FETCH))
    assert isinstance(order, FetchRun)
    assert isinstance(order.array, Kept)
    assert (order.first_row, order.rows, order.columns, order.out) == (1, 2, 5, DType.BF16)
    assert core.computed(1, b"", 0.5) == [messages.Computed(1, 0.5)]
    payload = bytes(20)
    assert core.computed(2, payload, 0.25) == [messages.Result(2, 2, 5, "bf16", 0.25, payload)]
    assert core.idle


def test_a_result_that_fits_no_message_is_refused() -> None:
    core = _core(X, memory_bytes=2**40)
    for rows in (2**26, 2**63 - 1):
        error = _only(core.received(messages.Fetch(2, 1, 0, rows, 4, "fp32")))
        assert isinstance(error, messages.TaskError)
        assert "does not fit in a message" in error.reason


# --- outputs that replace inputs --------------------------------------------------------------

AGAIN = messages.RunGraph(2, 9, (1, 10), (10,), (40,))


def test_an_output_may_replace_an_input_and_counts_once() -> None:
    core = _core(GRAPH, X)
    first = _only(core.received(RUN))
    taken = core.occupied_bytes
    early = _only(core.received(replace(FETCH, id=3)))
    second = _only(core.received(AGAIN))
    late = _only(core.received(replace(FETCH, id=4)))
    assert core.occupied_bytes == taken
    assert second.inputs[1] is second.outputs[0].replaces is first.outputs[0] is early.array
    assert late.array is second.outputs[0]
    core.received(messages.Drop((10,)))
    assert core.occupied_bytes == taken - 40


def test_what_a_run_without_graph_was_to_replace_has_no_value() -> None:
    core = _core(GRAPH, X)
    first = _only(core.received(RUN))
    refused = _only(core.received(replace(AGAIN, graph=8)))
    assert isinstance(refused, messages.TaskError)
    fetched = _only(core.received(replace(FETCH, id=3)))
    assert fetched.array is not first.outputs[0]
    assert fetched.array.value is None


# --- arrays from before -----------------------------------------------------------------------


def test_of_outputs_only_those_that_their_runs_have_made_are_held() -> None:
    keeps = replace(WELCOME, features=("graphs", "keeps"), arrays="A")
    core = DeviceCore(1000, keeps.features)
    for message in (keeps, GRAPH, X):
        core.received(message)
    for run, output in enumerate((10, 11, 12), start=1):
        core.received(replace(RUN, id=run, outputs=(output,)))
        core.computed(run, b"", 0.5)
    core.received(replace(RUN, id=4, inputs=(11,), outputs=(11,)))  # not answered
    core.received(replace(RUN, id=5, outputs=(13,)))
    core.failed(5, "it is too hot")
    core.received(replace(RUN, id=6, outputs=(14,)))
    core.received(messages.Cancel((6,)))
    core.received(replace(RUN, id=7, graph=8, inputs=(12,), outputs=(12,)))  # refused
    assert core.held is not None
    assert {*core.held.store} == {1, 9, 10}


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


def _tile_core(*puts: messages.Put, memory_bytes: int = 10_000) -> DeviceCore:
    core = DeviceCore(memory_bytes)
    for put in puts:
        assert core.received(put) == []
    return core


def test_a_run_is_computed_and_answered() -> None:
    core = _tile_core(_put(1, 2, 3), _put(2, 3, 5))
    order = _only(core.received(_run(7, 1, 2)))
    assert isinstance(order, Compute)
    assert (order.run, order.rows, order.columns, order.out) == (7, 2, 5, DType.FP32)
    assert order.flops == 2 * 2 * 3 * 5
    assert not core.idle
    result = _only(core.computed(7, b"x" * 40, 0.5))
    assert result == messages.Result(7, 2, 5, "fp32", 0.5, b"x" * 40)
    assert core.idle
    assert (core.blocks, core.flops) == (1, 60)


def test_an_array_dropped_under_a_run_is_still_multiplied() -> None:
    core = _tile_core(_put(1, 2, 3), _put(2, 3, 5))
    order = _only(core.received(_run(1, 1, 2)))
    core.received(messages.Drop((1, 2)))
    assert core.occupied_bytes == 0
    assert order.pairs[0][0].rows == 2
    assert isinstance(_only(core.computed(1, b"", 0.0)), messages.Result)


@pytest.mark.parametrize("ending", ["cancelled", "failed"])
def test_results_that_never_come_take_no_memory(ending: str) -> None:
    core = _tile_core(_put(1, 2, 3), _put(2, 3, 5), memory_bytes=24 + 60 + 40)
    for run in range(5):
        assert isinstance(_only(core.received(_run(run, 1, 2))), Compute)
        if ending == "failed":
            core.failed(run, "boom")
        else:
            core.received(messages.Cancel((run,)))
            core.computed(run, b"", 0.0)


def test_draining_is_said_once_and_what_is_running_is_answered() -> None:
    core = _tile_core(_put(1, 2, 3), _put(2, 3, 5))
    core.received(_run(1, 1, 2))
    assert core.drain() == [messages.Drain()]
    assert core.drain() == []
    assert isinstance(_only(core.computed(1, b"", 0.0)), messages.Result)


def test_every_message_to_a_device_is_handled() -> None:
    """A device offers every feature, so it must handle the messages of each."""
    tests = Path(__file__).parents[1]
    document = (tests.parent / "docs" / "protocol.md").read_text()
    received = set(re.findall(r"^\| \[`(\w+)`\]\(\S+\) \| PS → device \|", document, re.M))
    received.remove("measured")  # `DeviceSession` handles it
    assert {"put", "fetch", "cancel"} < received
    vectors = json.loads((tests / "vectors" / "messages.json").read_text())["vectors"]
    for name in received:
        vector = next(each for each in vectors if each["type"] == name)
        message = decode(bytes.fromhex(vector["header"] + vector.get("payload", "")))
        core = DeviceCore(1000, ALL)
        core.received(messages.Welcome(1, features=ALL))
        said = ""
        try:
            core.received(message)
        except ProtocolError as error:  # the message may, for example, name an unknown graph
            said = str(error)
        assert "does not expect" not in said
