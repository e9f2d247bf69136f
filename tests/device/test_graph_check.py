"""What of a model a device refuses before ONNX Runtime sees it."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import (
    AttributeProto,
    GraphProto,
    ModelProto,
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

MOST: Final = limits.MAX_GRAPH_NODES


def _model(**graph: Any) -> ModelProto:
    """y = x + w as a model that can be changed."""
    model = ModelProto.FromString(adding())
    for name, values in graph.items():
        getattr(model.graph, name).extend(values)
    return model


def _inside(depth: int) -> GraphProto:
    """A graph in which others stand, `depth` in all."""
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "inner", [], [])
    for _ in range(depth - 1):
        node = helper.make_node("If", ["c"], ["y"], then_branch=graph, else_branch=graph)
        graph = helper.make_graph([node], "outer", [], [])
    return graph


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


@pytest.mark.parametrize("model", [b"", b"no model", adding()[:-9], b"\x08\x0a"])
def test_what_is_no_model_is_refused(model: bytes) -> None:
    with pytest.raises(GraphError, match="it is no ONNX model"):
        check_graph(model)


# --- what graphs do not have ------------------------------------------------------------------


def _contrib() -> ModelProto:
    return _model(node=[helper.make_node("Gelu", ["x"], ["z"], domain="com.microsoft")])


def _import_alone() -> ModelProto:
    model = _model()
    model.opset_import.append(helper.make_opsetid("ai.onnx.ml", 3))
    return model


def _function() -> ModelProto:
    model = _model()
    model.functions.append(
        helper.make_function("", "Own", ["a"], ["b"], [], [helper.make_opsetid("", 18)])
    )
    return model


def _training() -> ModelProto:
    model = _model()
    model.training_info.add()
    return model


def _external(**how: Any) -> TensorProto:
    tensor = TensorProto(name="c", data_type=TensorProto.FLOAT, dims=[1], raw_data=bytes(4))
    for name, value in how.items():
        if name == "location":
            tensor.data_location = value
        else:
            tensor.external_data.add(key="location", value=value)
    return tensor


def _constant(tensor: TensorProto) -> ModelProto:
    return _model(node=[helper.make_node("Constant", [], ["c"], value=tensor)])


def _sparse() -> ModelProto:
    values = numpy_helper.from_array(np.ones(1, np.float32), "c")
    indices = numpy_helper.from_array(np.zeros(1, np.int64))
    return _model(sparse_initializer=[helper.make_sparse_tensor(values, indices, [2**40])])


def _sparse_attribute() -> ModelProto:
    sparse = _sparse().graph.sparse_initializer[0]
    return _model(node=[helper.make_node("Constant", [], ["c"], sparse_value=sparse)])


def _list_of_arrays() -> ModelProto:
    arrays = helper.make_sequence_type_proto(helper.make_tensor_type_proto(1, None))
    return _model(input=[helper.make_value_info("many", arrays)])


def _tensors(*tensors: TensorProto) -> ModelProto:
    attribute = AttributeProto(name="many", type=AttributeProto.TENSORS, tensors=tensors)
    node = helper.make_node("Neg", ["x"], ["z"])
    node.attribute.append(attribute)
    return _model(node=[node])


REFUSED: dict[str, tuple[Callable[[], ModelProto], str]] = {
    "an operation of another domain": (_contrib, "default domain alone.*'com.microsoft'"),
    "another domain that no operation uses": (_import_alone, "'ai.onnx.ml'"),
    "functions": (_function, "no functions of its own"),
    "training": (_training, "how it is trained"),
    "a file's name": (lambda: _model(initializer=[_external(file="a")]), "reads no files"),
    "a file's place": (lambda: _model(initializer=[_external(location=1)]), "reads no files"),
    "a file in an operation": (lambda: _constant(_external(file="a")), "reads no files"),
    "a file among several": (
        lambda: _tensors(_external(), _external(file="a")),
        "reads no files",
    ),
    "a sparse constant": (_sparse, "no sparse constants"),
    "a sparse constant of an operation": (_sparse_attribute, "no sparse constants"),
    "a list as input": (_list_of_arrays, "are arrays"),
    **{
        name: (
            lambda name=name: _model(node=[helper.make_node(name, [], ["z"])]),  # type: ignore[misc]
            f"no operation {name}$",
        )
        for name in sorted(REFUSED_OPERATIONS)
    },
}


OF_WHOLE_MODELS: Final = ("another domain that no operation uses", "functions", "training")


@pytest.mark.parametrize("what", REFUSED)
def test_what_graphs_do_not_have_is_refused(what: str) -> None:
    """Also inside another graph, and with a graph after it: readers put the two together."""
    make, reason = REFUSED[what]
    model = make().SerializeToString()
    models = [model, model + adding()]
    if what not in OF_WHOLE_MODELS:
        inner = make().graph
        node = helper.make_node("If", ["c"], ["y"], then_branch=_inside(1), else_branch=inner)
        models.append(_model(node=[node]).SerializeToString())
    for each in models:
        with pytest.raises(GraphError, match=reason):
            check_graph(each)


# --- limits -----------------------------------------------------------------------------------


def test_a_graph_has_a_limited_number_of_operations() -> None:
    nodes = [helper.make_node("Neg", ["x"], [f"y{n}"]) for n in range(MOST - 1)]
    check_graph(_model(node=nodes).SerializeToString())
    nodes.append(helper.make_node("Neg", ["x"], ["z"]))
    with pytest.raises(GraphError, match=f"more than {MOST} operations"):
        check_graph(_model(node=nodes).SerializeToString())


def test_operations_of_graphs_inside_are_counted() -> None:
    inner = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])] * (MOST // 2), "", [], [])
    node = helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner)
    with pytest.raises(GraphError, match=f"more than {MOST} operations"):
        check_graph(_model(node=[node]).SerializeToString())


def test_graphs_stand_in_each_other_only_so_deep() -> None:
    opsets = [helper.make_opsetid("", 18)]
    deepest = limits.MAX_GRAPH_DEPTH
    check_graph(helper.make_model(_inside(deepest), opset_imports=opsets).SerializeToString())
    with pytest.raises(GraphError, match=f"more than {deepest} deep"):
        check_graph(
            helper.make_model(_inside(deepest + 1), opset_imports=opsets).SerializeToString()
        )


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


def _seeds() -> list[bytes]:
    made = [make().SerializeToString() for make, _ in REFUSED.values()]
    return [adding(), _scanning().SerializeToString(), *made]


SEEDS: Final = _seeds()


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


@given(st.integers(0, 2**32).map(_mutated))
def test_what_is_no_graph_for_another_reader_is_refused(data: bytes) -> None:
    model = _read(data)
    if model is None:
        return
    try:
        _assert_is_graph(model)
    except AssertionError:
        with pytest.raises(GraphError):
            check_graph(data)


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
            with pytest.raises(GraphError, match="are arrays"):
                check_graph(model)
