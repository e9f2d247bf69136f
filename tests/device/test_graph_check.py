"""What of a model a device refuses before ONNX Runtime sees it."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import (
    AttributeProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    TypeProto,
    helper,
    numpy_helper,
)

from cleave.device.graph_check import REFUSED_OPERATIONS, check_graph
from cleave.machine.graph_session import GraphError, GraphSession
from cleave.machine.onnx_graph import content, integer
from cleave.protocol import limits
from tests.onnx_models import adding
from tests.protocol.vectors import load, octets

MOST: Final = limits.MAX_GRAPH_NODES


def _model(**graph: Any) -> ModelProto:
    """y = x + w as a model that can be changed."""
    model = ModelProto.FromString(adding())
    for name, values in graph.items():
        getattr(model.graph, name).extend(values)
    return model


def _scanning() -> ModelProto:
    """The sums of x's rows up to each, by a graph inside the graph."""
    value = helper.make_tensor_value_info
    row = [TensorProto.FLOAT, [3]]
    body = helper.make_graph(
        [
            helper.make_node("Add", ["before", "row"], ["after"]),
            helper.make_node("Identity", ["after"], ["sum"]),
        ],
        "body",
        [value("before", *row), value("row", *row)],
        [value("after", *row), value("sum", *row)],
    )
    graph = helper.make_graph(
        [helper.make_node("Scan", ["w", "x"], ["last", "y"], body=body, num_scan_inputs=1)],
        "scanning",
        [value("x", TensorProto.FLOAT, ["batch", 3]), value("w", *row)],
        [value("y", TensorProto.FLOAT, ["batch", 3])],
    )
    opsets = [helper.make_opsetid("", 18)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def test_a_graph_inside_a_graph_passes_and_runs() -> None:
    model = _scanning().SerializeToString()
    check_graph(model)
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    found = GraphSession(model, threads=1).run({"x": x, "w": np.zeros(3, np.float32)})
    np.testing.assert_array_equal(found["y"], np.cumsum(x, axis=0))


# --- what graphs do not have ------------------------------------------------------------------

VECTORS = {vector["name"]: vector for vector in load("graphs")}
NO_MODEL = dict.fromkeys(("nothing", "no-graph", "cut-off", "group"), "not an ONNX model")
OF_WHOLE_MODELS = {
    "other-domain-first": "'com.microsoft'",  # protobuf's own library keeps the last domain alone
    "other-domain-imported": "'ai.onnx.ml'",
    "function": "contains functions",
    "training": "training information",
}
OF_GRAPHS = {
    **dict.fromkeys(
        ("other-domain", "other-domain-inside"), "default domain are allowed.*'com.microsoft'"
    ),
    **dict.fromkeys(("file", "file-of-no-name", "file-of-an-operation"), "is in another file"),
    **dict.fromkeys(("sparse-constant", "sparse-value"), "sparse constants"),
    **dict.fromkeys(("constant-too-large", "constant-of-negative-size"), "larger than its"),
    "list-as-input": "not a tensor",
    **{f"operation-{name}": f"forbidden operation {name}$" for name in REFUSED_OPERATIONS},
    "graphs-too-deep": f"more than {limits.MAX_GRAPH_DEPTH} deep",
    "too-many-operations": f"more than {MOST} operations",
}
REASONS = NO_MODEL | OF_WHOLE_MODELS | OF_GRAPHS


@pytest.mark.parametrize(
    "name", [name for name, vector in VECTORS.items() if not vector["is_graph"]]
)
def test_what_graphs_do_not_have_is_refused(name: str) -> None:
    """Also inside another graph, and with a graph after it: readers put the two together."""
    model = octets(VECTORS[name]["model"])
    models = [model]
    if name not in NO_MODEL:
        models.append(model + adding())
    if name in OF_GRAPHS:
        inner = ModelProto.FromString(model).graph
        other = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "other", [], [])
        node = helper.make_node("If", ["c"], ["y"], then_branch=other, else_branch=inner)
        models.append(_model(node=[node]).SerializeToString())
    for each in models:
        with pytest.raises(GraphError, match=REASONS[name]):
            check_graph(each)


def test_no_tensor_among_several_is_in_a_file() -> None:
    outside = TensorProto(name="c", data_location=TensorProto.EXTERNAL)
    many = AttributeProto(name="many", type=AttributeProto.TENSORS, tensors=[outside])
    model = _model(node=[NodeProto(op_type="Neg", attribute=[many])])
    with pytest.raises(GraphError, match="is in another file"):
        check_graph(model.SerializeToString())


# --- limits -----------------------------------------------------------------------------------


def test_operations_of_graphs_inside_are_counted() -> None:
    inner = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])] * (MOST // 2), "", [], [])
    node = helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner)
    with pytest.raises(GraphError, match=f"more than {MOST} operations"):
        check_graph(_model(node=[node]).SerializeToString())


def test_a_model_of_any_depth_is_survived() -> None:
    """Each level has an operation with an attribute that is a graph again."""
    graph = b""
    for _ in range(3000):
        graph = content(1, content(5, content(6, graph)))
    with pytest.raises(GraphError, match="deep"):
        check_graph(content(7, graph))


@pytest.mark.parametrize("sizes", [(2**40,), (2**32, 2**32), (3, 2**62, 3), (-1,), (2,) * 9])
def test_a_constant_is_no_larger_than_its_bytes(sizes: tuple[int, ...]) -> None:
    wrong = TensorProto(name="c", data_type=TensorProto.FLOAT, dims=sizes)
    with pytest.raises(GraphError, match="larger than its"):
        check_graph(_model(initializer=[wrong]).SerializeToString())


@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 5, 3), (0, 2**40), (2**40, 0)])
@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.bool_])
def test_constants_of_any_shape_pass(shape: tuple[int, ...], dtype: type) -> None:
    right = numpy_helper.from_array(np.ones(shape, dtype), "c")
    check_graph(_model(initializer=[right]).SerializeToString())


# --- any bytes --------------------------------------------------------------------------------


SEEDS: Final = [
    adding(),
    _scanning().SerializeToString(),
    *(octets(VECTORS[name]["model"]) for name in OF_WHOLE_MODELS | OF_GRAPHS),
]


def _mutated(seed: int) -> bytes:
    """A model in which bytes are changed, cut, or put from another."""
    chance = random.Random(seed)
    data = bytearray(chance.choice(SEEDS))
    for _ in range(chance.randrange(1, 5)):
        at = chance.randrange(len(data) + 1)
        match chance.randrange(4):
            case 0 if at < len(data):
                data[at] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))
            case 1:
                del data[at : at + chance.randrange(4)]
            case 2:
                other = chance.choice(SEEDS)
                begin = chance.randrange(len(other))
                data[at:at] = other[begin : begin + chance.randrange(40)]
            case _:
                data += integer(chance.randrange(1, 30), chance.randrange(-3, 2**40))
    return bytes(data)


@given(st.binary(max_size=200) | st.integers(0, 2**32).map(_mutated))
def test_any_bytes_are_refused_or_are_a_graph(data: bytes) -> None:
    """Nothing else is raised, and what passes is what another reader takes for a graph, too."""
    try:
        check_graph(data)
    except GraphError:
        return
    model = _read(data)
    if model is not None:  # it looks at parts that are not looked at here
        _assert_is_graph(model)


def _read(data: bytes) -> ModelProto | None:
    """The model as protobuf's own library reads it; None where it is none for it."""
    try:
        return ModelProto.FromString(data)
    except Exception as error:
        if type(error).__name__ != "DecodeError":  # of a library without types
            raise
        return None


def _assert_is_graph(model: ModelProto) -> None:
    assert not model.functions
    assert not model.training_info
    assert {opset.domain for opset in model.opset_import} <= {"", "ai.onnx"}
    graphs = list(_graphs(model.graph, 1))
    assert sum(len(graph.node) for graph, _ in graphs) <= MOST
    for graph, depth in graphs:
        assert depth <= limits.MAX_GRAPH_DEPTH
        assert not graph.sparse_initializer
        tensors = list(graph.initializer)
        for value in (*graph.input, *graph.output):
            assert value.type.WhichOneof("value") in (None, "tensor_type")
        for node in graph.node:
            assert node.domain in ("", "ai.onnx")
            assert node.op_type not in REFUSED_OPERATIONS
            for attribute in node.attribute:
                assert not attribute.HasField("sparse_tensor")
                assert not attribute.sparse_tensors
                tensors += [attribute.t, *attribute.tensors]
        for tensor in tensors:
            assert not tensor.external_data
            assert tensor.data_location == TensorProto.DEFAULT


def _graphs(graph: GraphProto, depth: int) -> Iterator[tuple[GraphProto, int]]:
    yield graph, depth
    for node in graph.node:
        for attribute in node.attribute:
            inner = [attribute.g] if attribute.HasField("g") else []
            for each in (*inner, *attribute.graphs):
                yield from _graphs(each, depth + 1)


@pytest.mark.slow
def test_a_check_keeps_nothing_of_the_model() -> None:
    large = numpy_helper.from_array(np.ones(900_000, np.float32), "c")
    sizes = TensorProto(name="d", dims=[1] * 200_000)
    model = _model(initializer=[large, sizes]).SerializeToString()
    tracemalloc.start()
    try:
        check_graph(model)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 50_000


def test_types_beside_arrays_are_known() -> None:
    """Every kind of type that ONNX has besides arrays is refused as input."""
    for kind in TypeProto.DESCRIPTOR.oneofs_by_name["value"].fields:
        value = content(2, content(kind.number, b""))
        model = content(7, content(11, value))
        if kind.name == "tensor_type":
            check_graph(model)
        else:
            with pytest.raises(GraphError, match="not a tensor"):
                check_graph(model)
