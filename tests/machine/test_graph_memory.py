"""The memory that a run of a graph works in, found before it runs."""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
import pytest
from onnxruntime import GraphOptimizationLevel, InferenceSession, SessionOptions

from cleave.machine.graph_arrays import UnboundedError
from cleave.machine.graph_memory import GivenInput, GraphMemory
from cleave.machine.graph_session import GraphSession
from cleave.machine.onnx_graph import ArrayType, Node, written
from tests.vectors.graph_runs import Run, all_runs, sound_runs

_NUMPY = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(bool)": np.bool_}


def _peak(run: Run) -> int:
    given = [
        GivenInput(one[0], narrow=True) if isinstance(one, list) else GivenInput(one)
        for one in run.inputs
    ]
    return GraphMemory(run.model).peak_bytes(given, run.kept)


@pytest.mark.parametrize("run", all_runs(), ids=lambda run: run.name)
def test_the_peak_of_a_run_is_known_before_it_or_it_is_refused(run: Run) -> None:
    if isinstance(run.expected, int):
        assert _peak(run) == run.expected
        return
    with pytest.raises(UnboundedError) as caught:
        _peak(run)
    assert caught.value.refusal.value == run.expected
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("run", sound_runs(), ids=lambda run: run.name)
def test_runs_that_are_not_refused_are_graphs_that_onnx_runtime_runs(run: Run) -> None:
    options = SessionOptions()
    options.graph_optimization_level = GraphOptimizationLevel.ORT_DISABLE_ALL
    session = InferenceSession(run.model, options)
    feed: dict[str, Any] = {}
    for given, count in zip(session.get_inputs(), run.inputs, strict=True):
        shape = [size if isinstance(size, int) else -1 for size in given.shape]
        count = count[0] if isinstance(count, list) else count
        elements = int(np.prod(shape)) if count is None else count
        feed[given.name] = np.zeros(elements, _NUMPY[given.type]).reshape(shape)
    session.run(None, feed)


def test_many_operations_take_little_time() -> None:
    """A graph has 4096 at most; each with the largest rank is the slowest that there can be."""
    shape: list[int | str] = ["batch", *[1] * 31]
    nodes = [Node("Add", [f"a{n}", f"a{n}"], [f"a{n + 1}"]) for n in range(4095)]
    model = written(nodes, {"a0": ArrayType(shape)}, {"a4095": ArrayType(shape)})
    began_s = time.process_time()
    assert GraphMemory(model).peak_bytes([GivenInput(10)], [True]) == 80
    assert time.process_time() - began_s < 20


def test_a_peak_is_found_once_for_each_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    row = ArrayType(["batch", 4])
    memory = GraphMemory(written([Node("Neg", ["x"], ["y"])], {"x": row}, {"y": row}))
    assert [memory.peak_bytes([GivenInput(n)], [False]) for n in (4, 8)] == [16, 32]
    monkeypatch.setattr(memory, "_peak", None)
    assert [memory.peak_bytes([GivenInput(n)], [False]) for n in (4, 8)] == [16, 32]


def test_constants_are_not_worked_out_before_a_run() -> None:
    """What follows from constants alone would be held to the end, however large it is."""
    size = np.array([2**28, 2**20], "<i8")
    nodes = [
        Node("ConstantOfShape", ["size"], ["wide"]),
        Node("ReduceSum", ["wide"], ["sum"]),
        Node("Add", ["x", "sum"], ["y"]),
    ]
    row = ArrayType(["batch", 1])
    GraphSession(written(nodes, {"x": row}, {"y": row}, {"size": size}))


@pytest.mark.skipif(sys.platform != "linux", reason="reads a process's memory as Linux says it")
@pytest.mark.parametrize(
    ("operation", "inputs", "attributes"),
    [
        ("Where", "c x x", {}),
        ("Softmax", "x", {"axis": 1}),
        ("Sum", "x x x x", {}),
        ("ScatterElements", "x places x", {}),
        ("GatherElements", "x places", {}),
        ("ReduceLogSumExp", "x axis", {}),
        ("TopK", "x ten", {"axis": 0}),
        ("Gelu", "x", {}),
        ("CumSum", "x one", {}),
        ("Concat", "x x", {"axis": 0}),
        ("Expand", "x size", {}),
        ("Transpose", "x", {}),
    ],
)
def test_an_operation_takes_no_more_memory_than_that(
    operation: str, inputs: str, attributes: dict[str, int | str]
) -> None:
    from pathlib import Path

    from benchmarks.graph_memory import resident_bytes

    rows = 3000
    row: list[int | str] = ["batch", 1024]
    arrays: dict[str, Any] = {
        "x": np.ones((rows, 1024), np.float32),
        "c": np.ones((rows, 1024), np.bool_),
        "places": np.zeros((rows, 1024), np.int64),
    }
    constants: dict[str, Any] = {
        "axis": np.array([1], "<i8"), "ten": np.array([10], "<i8"), "one": np.array(1, "<i8"),
        "size": np.array([4, 1, 1], "<i8"),
    }  # fmt: skip
    names = inputs.split()
    types = {"x": "float32", "c": "bool", "places": "int64"}
    outputs = ["y", "at"] if operation == "TopK" else ["y"]
    model = written(
        [Node(operation, names, outputs, attributes)],
        {name: ArrayType(row, types[name]) for name in dict.fromkeys(names) if name in arrays},
        {"y": ArrayType(["a", "b", "c"] if operation == "Expand" else ["a", "b"])},
        {name: constants[name] for name in names if name in constants},
    )
    given = {name: arrays[name] for name in dict.fromkeys(names) if name in arrays}
    planned = GraphMemory(model).peak_bytes([GivenInput(a.size) for a in given.values()], [False])
    session = GraphSession(model, threads=1, shares_memory=False)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_bytes("VmRSS")
    session.run_into(given, {})
    assert resident_bytes("VmHWM") - before <= planned + 8 * 2**20
