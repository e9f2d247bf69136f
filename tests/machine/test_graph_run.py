"""Running graphs on what a device keeps, and returning rows of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave import arrays
from cleave.arrays import DType
from cleave.device.core import DeviceCore
from cleave.machine.backends import StoredArray
from cleave.machine.graph_narrowing import narrowed
from cleave.machine.graph_run import (
    Concatenated,
    FetchRun,
    GraphInput,
    GraphRun,
    Kept,
    StoredGraph,
    StoredIndices,
    fetch,
    run_graph,
)
from cleave.machine.graph_session import GraphError, GraphSession
from cleave.machine.onnx_graph import ArrayType, Node, written
from cleave.protocol import messages
from tests.examples import examples
from tests.onnx_models import adding

SIX: Final = np.arange(6, dtype=np.float32).reshape(2, 3)


def _session(model: bytes, given: Sequence[DType | None], _: Any = None) -> GraphSession:
    return GraphSession(narrowed(model, given), threads=1)


def _stored(model: bytes) -> StoredGraph:
    return StoredGraph(model, len(model))


def _totals() -> StoredGraph:
    """y = 2x, and total + x, as a backward pass has a gradient and the sums of others."""
    two = ArrayType([2, 3])
    nodes = [Node("Add", ["x", "x"], ["y"]), Node("Add", ["x", "sum"], ["new"])]
    return _stored(written(nodes, {"x": two, "sum": two}, {"y": two, "new": two}))


def _put(values: npt.NDArray[np.float32], dtype: DType = DType.FP32) -> StoredArray:
    payload = arrays.Buffer(arrays.narrow(values, dtype), dtype).pack()
    rows, columns = values.shape
    return StoredArray(rows, columns, dtype, payload, len(payload))


def _kept(value: npt.NDArray[Any]) -> Kept:
    return Kept(value.nbytes, value)


def _run(
    graph: StoredGraph, inputs: Sequence[GraphInput], outputs: Sequence[Kept | None]
) -> list[Any]:
    """Run a graph; return the values of its outputs."""
    seconds = run_graph(GraphRun(1, graph, inputs, outputs, 0), _session)
    assert seconds > 0
    return [output and output.value for output in outputs]


W: Final = np.array([[10, 20, 30]], np.float32)


# --- inputs -----------------------------------------------------------------------------------


def test_inputs_and_outputs_are_in_the_order_of_the_graph() -> None:
    (y,) = _run(_stored(adding()), [_put(SIX), _put(W)], [Kept(24)])
    np.testing.assert_array_equal(y, SIX + W)
    with pytest.raises(GraphError, match="input w"):
        _run(_stored(adding()), [_put(W), _put(SIX)], [Kept(12)])


def test_an_input_of_any_size_cannot_be_zeros() -> None:
    with pytest.raises(GraphError, match=r"x cannot be zeros.*batch"):
        _run(_stored(adding()), [None, _put(W)], [Kept(24)])


@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP16])
def test_16_bit_arrays_are_widened_before_anything_is_computed(dtype: DType) -> None:
    x = np.array([[1, 256, 2**-8]], np.float32)  # of all dtypes
    w = np.array([[2**-8, 1, 1]], np.float32)
    (y,) = _run(_stored(adding()), [_put(x, dtype), _put(w, dtype)], [Kept(12)])
    assert y.dtype == np.float32
    np.testing.assert_array_equal(y, x + w)  # none of which 8 bits hold


@pytest.mark.parametrize("shape", [(2, 3), (1, 6), (6, 1), (3, 2)])
def test_an_array_takes_the_shape_of_its_input_and_the_batch_its_size(
    shape: tuple[int, int],
) -> None:
    (y,) = _run(_stored(adding()), [_put(SIX.reshape(shape)), _put(W.T)], [Kept(24)])
    np.testing.assert_array_equal(y, SIX + W)


@pytest.mark.parametrize(
    ("x", "w", "name"), [((1, 7), (1, 3), "x"), ((2, 3), (1, 2), "w"), ((2, 3), (2, 3), "w")]
)
def test_an_array_that_does_not_fit_its_input_is_refused(
    x: tuple[int, int], w: tuple[int, int], name: str
) -> None:
    given = [_put(np.zeros(shape, np.float32)) for shape in (x, w)]
    with pytest.raises(GraphError, match=f"input {name} has the shape"):
        _run(_stored(adding()), given, [Kept(24)])


def test_integers_and_truth_values_are_inputs() -> None:
    nodes = [
        Node("Gather", ["table", "rows"], ["found"]),
        Node("Where", ["mask", "found", "table"], ["y"]),
    ]
    table = ArrayType([2, 3])
    types = {"table": table, "rows": ArrayType([2], "int64"), "mask": ArrayType([2, 1], "bool")}
    graph = _stored(written(nodes, types, {"y": table}))
    rows = StoredIndices(np.array([1, 0], "<i8").tobytes(), np.dtype("<i8"), 16)
    mask = StoredIndices(b"\x01\x00", np.dtype("?"), 2)
    (y,) = _run(graph, [_put(SIX), rows, mask], [Kept(24)])
    np.testing.assert_array_equal(y, SIX[[1, 1]])
    with pytest.raises(GraphError, match="cannot be run"):
        _run(graph, [_put(SIX), _put(np.zeros((1, 2), np.float32)), mask], [Kept(24)])
    with pytest.raises(GraphError, match="cannot be run"):
        _run(graph, [_put(SIX), None, mask], [Kept(24)])  # zeros are fp32


@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16])
def test_arrays_one_after_another_are_one_input(dtype: DType) -> None:
    parts = [_put(SIX[:1], dtype), _put(SIX[:0], dtype), _put(SIX, dtype)]
    whole = Concatenated(parts, 3, 3, dtype, 9 * dtype.itemsize)
    for _ in range(2):  # the second time from one piece
        (y,) = _run(_stored(adding()), [whole, _put(W)], [Kept(36)])
        np.testing.assert_array_equal(y, SIX[[0, 0, 1]] + W)
        np.testing.assert_array_equal(_fetched(whole, 1, 2, 3), SIX)


def test_a_device_puts_the_parts_of_an_array_in_the_order_of_their_names() -> None:
    core = DeviceCore(2**20, ["graphs"])
    for message in (
        messages.Welcome(1, features=("graphs",)),
        messages.Put(2, 2, 3, "fp32", SIX.tobytes()),
        messages.Put(3, 1, 3, "fp32", W.tobytes()),
        messages.Concat(4, (3, 2)),
    ):
        core.received(message)
    (order,) = core.received(messages.Fetch(1, 4, 0, 3, 3, "fp32"))
    assert isinstance(order, FetchRun)
    assert bytes(fetch(order)) == np.concatenate([W, SIX]).tobytes()


# --- outputs ----------------------------------------------------------------------------------


def test_what_one_run_keeps_later_ones_take() -> None:
    """Sums begin as zeros, and each run makes the next array of them."""
    graph, total = _totals(), None
    for _ in range(3):
        total, before = Kept(24), total
        _run(graph, [_put(SIX), before], [None, total])
    assert total is not None
    np.testing.assert_array_equal(total.value, 3 * SIX)


@pytest.mark.parametrize("sizes", [(24, 23), (48, 24), (0, 24)])
def test_all_outputs_are_kept_or_none(sizes: tuple[int, int]) -> None:
    y, new = Kept(sizes[0]), Kept(sizes[1])
    with pytest.raises(GraphError, match="as announced"):
        _run(_totals(), [_put(SIX), None], [y, new])
    assert (y.value, new.value) == (None, None)


@pytest.mark.parametrize(
    ("inputs", "outputs"), [(1, 2), (3, 2), (2, 1), (2, 3), (0, 0)], ids=lambda n: str(n)
)
def test_a_run_names_every_input_and_output(inputs: int, outputs: int) -> None:
    with pytest.raises(GraphError, match=f"2 inputs and 2 outputs, not {inputs} and {outputs}"):
        _run(_totals(), [_put(SIX)] * inputs, [None] * outputs)


def test_what_a_failed_run_was_to_make_is_not_there() -> None:
    y = Kept(1)
    with pytest.raises(GraphError, match="as announced"):
        _run(_stored(adding()), [_put(SIX), None], [y])
    later = Kept(24)
    with pytest.raises(GraphError, match="an array is missing, because the task"):
        _run(_stored(adding()), [y, None], [later])
    assert later.value is None
    with pytest.raises(GraphError, match="an array is missing, because the task"):
        fetch(FetchRun(2, later, 0, 1, 3, DType.FP32))


# --- graphs -----------------------------------------------------------------------------------


def test_a_graph_is_made_ready_once() -> None:
    made = []

    def make(model: bytes, given: Sequence[DType | None], _: Any) -> GraphSession:
        made.append(bytes(model))
        return _session(model, given)

    graph = _stored(adding())
    for _ in range(3):
        run_graph(GraphRun(1, graph, [_put(SIX), None], [None], 0), make)
    assert made == [adding()]


# --- fetch ------------------------------------------------------------------------------------


def _fetched(
    array: StoredArray | Concatenated | Kept,
    first: int,
    rows: int,
    columns: int,
    out: DType = DType.FP32,
) -> npt.NDArray[Any]:
    """Rows of an array as they are sent."""
    order = FetchRun(1, array, first, rows, columns, out)
    payload = fetch(order)
    assert len(payload) == order.result_bytes
    return arrays.unpack(payload, rows, columns, out).array


def test_some_rows_of_an_array_are_fetched() -> None:
    value = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    rows = value.reshape(6, 4)
    np.testing.assert_array_equal(_fetched(_kept(value), 0, 6, 4), rows)
    np.testing.assert_array_equal(_fetched(_kept(value), 2, 3, 4), rows[2:5])
    np.testing.assert_array_equal(_fetched(_kept(value), 1, 1, 12), value[1].reshape(1, 12))
    assert _fetched(_kept(value), 6, 0, 4).size == 0
    scalar = np.array(2.5, np.float32)
    np.testing.assert_array_equal(_fetched(_kept(scalar), 0, 1, 1), [[2.5]])


@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16, DType.FP16])
def test_a_put_array_is_fetched_as_it_was_put(dtype: DType) -> None:
    put = _put(SIX, dtype)
    np.testing.assert_array_equal(_fetched(put, 1, 1, 3), SIX[1:])
    assert bytes(fetch(FetchRun(1, put, 0, 2, 3, dtype))) == bytes(put.payload)


def test_fetched_rows_are_rounded_once_to_nearest_even() -> None:
    value = np.array(
        [[9, 9, 9, 9], [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -3.4e38]], np.float32
    )
    found = _fetched(_kept(value), 1, 1, 4, DType.BF16)
    # 1, 1 + 2**-6, 1 + 2**-7, and the largest number below -infinity
    assert found.tolist() == [[0x3F80, 0x3F82, 0x3F81, 0xFF80]]
    half = np.array([[1 + 2**-11, 65519, 65520]], np.float32)
    assert _fetched(_kept(half), 0, 1, 3, DType.FP16).tolist() == [[1.0, 65504.0, float("inf")]]


@pytest.mark.parametrize(
    ("first", "rows", "columns"),
    [
        (0, 3, 3),
        (1, 2, 3),
        (2, 1, 3),
        (3, 0, 3),
        (0, 1, 4),
        (0, 1, 7),
        (2**62, 1, 3),
        (0, 2**62, 3),
    ],
)
def test_rows_that_are_not_there_are_not_fetched(first: int, rows: int, columns: int) -> None:
    for array in (_kept(SIX), _put(SIX)):
        with pytest.raises(GraphError, match=rf"no rows {first} to {first + rows} of {columns} "):
            fetch(FetchRun(1, array, first, rows, columns, DType.FP32))


@pytest.mark.parametrize("dtype", ["<i8", "?", "<f8"])
def test_only_fp32_is_fetched(dtype: str) -> None:
    with pytest.raises(GraphError, match="no rows"):
        fetch(FetchRun(1, _kept(SIX.astype(dtype)), 0, 2, 3, DType.FP32))


# --- sums in place ----------------------------------------------------------------------------


def _gradients(rows: int, columns: int) -> StoredGraph:
    """new = sum + x^T d, as a backward pass adds a gradient."""
    nodes = [
        Node("Transpose", ["x"], ["turned"]),
        Node("MatMul", ["turned", "d"], ["gradient"]),
        Node("Add", ["sum", "gradient"], ["new"]),
    ]
    total = ArrayType([rows, columns])
    types = {"x": ArrayType(["batch", rows]), "d": ArrayType(["batch", columns]), "sum": total}
    return _stored(written(nodes, types, {"new": total}))


@settings(max_examples=examples(20), deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_sums_in_place_are_equal_to_the_last_bit_and_stay_where_they_are(
    rows: int, columns: int, runs: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    graph, nbytes = _gradients(rows, columns), 4 * rows * columns
    apart: Kept | None = None
    place: Kept | None = None
    memory = set()
    for _ in range(runs):
        x, d = (_put(random.standard_normal((5, n), np.float32)) for n in (rows, columns))
        after = Kept(nbytes)
        _run(graph, [x, d, apart], [after])
        replacing = Kept(nbytes, replaces=place)
        _run(graph, [x, d, place], [replacing])
        assert place is None or place.value is None
        assert after.value is not None
        assert replacing.value is not None
        np.testing.assert_array_equal(replacing.value, after.value)
        memory.add(replacing.value.ctypes.data)
        apart, place = after, replacing
    assert len(memory) == 1


def test_a_run_that_fails_ends_the_sum_that_it_was_to_replace() -> None:
    before = _kept(np.ones((2, 3), np.float32))
    after = Kept(24, replaces=before)
    wrong = _put(np.ones((5, 7), np.float32))
    with pytest.raises(GraphError):
        run_graph(GraphRun(1, _gradients(2, 3), [wrong, wrong, before], [after], 0), _session)
    for sums in (before, after):
        with pytest.raises(GraphError, match="an array is missing"):
            fetch(FetchRun(2, sums, 0, 2, 3, DType.FP32))


def test_what_a_result_shows_is_not_written_any_more() -> None:
    x, d = (_put(np.ones((5, n), np.float32)) for n in (2, 3))
    before = _kept(np.ones((2, 3), np.float32))
    result = fetch(FetchRun(1, before, 0, 2, 3, DType.FP32))
    (found,) = _run(_gradients(2, 3), [x, d, before], [Kept(24, replaces=before)])
    np.testing.assert_array_equal(found, np.full((2, 3), 6))
    np.testing.assert_array_equal(np.frombuffer(result, np.float32), np.ones(6))


def test_an_array_that_was_put_is_never_written() -> None:
    x, d = (_put(np.ones((5, n), np.float32)) for n in (2, 3))
    put = _put(np.ones((2, 3), np.float32))
    (found,) = _run(_gradients(2, 3), [x, d, put], [Kept(24)])
    np.testing.assert_array_equal(found, np.full((2, 3), 6))
    np.testing.assert_array_equal(np.frombuffer(put.payload, np.float32), np.ones(6))


@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP16])
def test_a_parameter_may_change_its_dtype_between_runs(dtype: DType) -> None:
    graph = _stored(adding())
    for now in (dtype, DType.FP32, dtype):
        (y,) = _run(graph, [_put(SIX, DType.FP32), _put(W, now)], [Kept(24)])
        np.testing.assert_array_equal(y, SIX + W)
