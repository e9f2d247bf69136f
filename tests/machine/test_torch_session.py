"""Graphs in PyTorch, against ONNX Runtime on the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final
from unittest import mock

import numpy as np
import numpy.typing as npt
import onnx
import pytest
import torch
from hypothesis import example
from hypothesis import given as drawn
from hypothesis import strategies as st
from onnx import TensorProto, helper
from onnxruntime import GraphOptimizationLevel, InferenceSession, SessionOptions

from cleave import arrays
from cleave.arrays import DType
from cleave.graphs.noise import with_narrow_products
from cleave.machine.backends import StoredArray
from cleave.machine.graph_choice import MakeGraph, open_in_torch
from cleave.machine.graph_narrowing import narrowed
from cleave.machine.graph_operations import _RULES
from cleave.machine.graph_run import FetchRun, GraphRun, Kept, StoredGraph, fetch, run_graph
from cleave.machine.graph_session import GraphError, GraphSession
from cleave.machine.graph_trials import LARGEST_ERROR, accuracy
from cleave.machine.onnx_graph import ArrayType, Node, written
from cleave.machine.torch_fusion import fused
from cleave.machine.torch_session import TorchSession
from tests.graphs.models import TOKENS, graphs_of, small_model
from tests.vectors.graph_runs import sound_runs

Array = npt.NDArray[Any]
Given = Mapping[str, Array]

_NUMPY: Final = {
    "tensor(float)": np.float32,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(bool)": np.bool_,
    "tensor(uint8)": np.uint8,
}


def _by_onnx_runtime(model: bytes, feed: Given) -> list[Array]:
    options = SessionOptions()
    options.graph_optimization_level = GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    found: list[Array] = InferenceSession(model, options).run(None, dict(feed))
    return found


def _assert_alike(found: Given, wanted: Sequence[Array], within: float = 1e-5) -> None:
    for mine, theirs in zip(found.values(), wanted, strict=True):
        assert mine.shape == theirs.shape
        assert mine.dtype == theirs.dtype
        np.testing.assert_allclose(mine, theirs, rtol=within, atol=within)


# --- operations ---------------------------------------------------------------------------------

_RANDOM: Final = np.random.default_rng(7)


def _floats(*shape: int) -> Array:
    return _RANDOM.standard_normal(shape).astype(np.float32)


def _whole(*numbers: int) -> Array:
    return np.array(numbers, np.int64)


X: Final = _floats(2, 3, 4)
UNIT: Final = np.tanh(X)
INTEGERS: Final = np.array([[7, -7, 3], [1, 0, -2]], np.int64)
TRUTHS: Final = X > 0
AXIS: Final = _whole(1)

CASES: Final[list[tuple[str, list[Any], dict[str, Any]]]] = [
    *((name, [X], {}) for name in (
        "Abs", "Atan", "Asinh", "Ceil", "Cos", "Cosh", "Erf", "Exp", "Floor", "Neg", "Relu",
        "Round", "Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Softsign", "Tan", "Tanh",
        "HardSwish", "Mish", "Identity", "IsNaN", "Shape", "Size", "Gelu", "Elu", "Celu", "Selu",
        "LeakyRelu", "HardSigmoid", "ThresholdedRelu", "Softmax", "LogSoftmax", "Flatten",
        "Transpose", "Squeeze", "ArgMax", "ArgMin", "IsInf",
    )),
    *((name, [UNIT], {}) for name in ("Acos", "Asin", "Atanh")),
    *((name, [np.abs(X) + 1], {}) for name in ("Acosh", "Log", "Reciprocal", "Sqrt")),
    *((name, [X, X[0]], {}) for name in ("Add", "Sub", "Mul", "Div", "Max", "Min", "Sum")),
    *((name, [X, UNIT], {}) for name in (
        "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual",
    )),
    *((name, [TRUTHS, ~TRUTHS[0]], {}) for name in ("And", "Or", "Xor")),
    *((name, [INTEGERS, INTEGERS[::-1]], {}) for name in (
        "BitwiseAnd", "BitwiseOr", "BitwiseXor",
    )),
    *((f"Reduce{name}", [np.abs(X), AXIS], {"keepdims": keep}) for keep in (0, 1) for name in (
        "L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare",
    )),
    ("ReduceSum", [X], {}),
    ("ReduceSum", [X], {"noop_with_empty_axes": 1}),
    ("ReduceProd", [np.abs(X), _whole(0, -1)], {"keepdims": 0}),
    ("ArgMax", [np.round(X)], {"axis": -1, "keepdims": 0, "select_last_index": 1}),
    ("BitShift", [np.abs(INTEGERS).astype(np.uint8), np.full((2, 3), 2, np.uint8)],
     {"direction": "LEFT"}),
    ("BitShift", [np.abs(INTEGERS).astype(np.uint8), np.full((2, 3), 1, np.uint8)],
     {"direction": "RIGHT"}),
    ("BitwiseNot", [INTEGERS], {}),
    ("Cast", [X * 3], {"to": TensorProto.INT64}),
    ("Cast", [INTEGERS], {"to": TensorProto.BOOL}),
    ("CastLike", [INTEGERS, X], {}),
    ("Clip", [X, np.float32(-0.5), np.float32(0.25)], {}),
    ("Concat", [X, X[:1]], {"axis": 0}),
    ("Constant", [], {"value_ints": [1, 2, 3]}),
    ("Constant", [], {"value_float": 0.5}),
    ("ConstantOfShape", [_whole(2, 3)], {}),
    ("Conv", [_floats(2, 4, 9), _floats(6, 2, 3), _floats(6)],
     {"pads": [2, 1], "strides": [2], "group": 2}),
    ("Conv", [_floats(1, 2, 6, 7), _floats(3, 2, 2, 3)],
     {"pads": [1, 0, 0, 2], "dilations": [1, 2]}),
    ("CumSum", [X, np.array(1)], {}),
    ("CumSum", [X, np.array(-1)], {"exclusive": 1, "reverse": 1}),
    ("Div", [INTEGERS, np.array([[2, 2, -2]])], {}),
    ("Mod", [INTEGERS, np.array([[3, 3, -2]])], {}),
    ("Mod", [X, UNIT], {"fmod": 1}),
    ("Expand", [X[:1], _whole(2, 1, 1)], {}),
    ("Gather", [X, _whole(2, -1, 0).reshape(1, 3)], {"axis": 1}),
    ("GatherElements", [X, np.array([[[0, -1, 1, 0]]])], {"axis": 0}),
    ("GatherND", [X, np.array([[0, -1], [1, 2]])], {}),
    ("GatherND", [X, np.array([[2], [-3]])], {"batch_dims": 1}),
    ("Gelu", [X], {"approximate": "tanh"}),
    ("Gemm", [_floats(3, 2), _floats(4, 3), _floats(4)],
     {"transA": 1, "transB": 1, "alpha": 0.5, "beta": 2.0}),
    ("HardSigmoid", [X], {"alpha": 0.3, "beta": 0.4}),
    ("LayerNormalization", [X, _floats(4), _floats(4)], {}),
    ("LayerNormalization", [X, _floats(3, 4)], {"axis": 1, "epsilon": 1e-3}),
    ("LeakyRelu", [X], {"alpha": 0.3}),
    ("LogSoftmax", [X], {"axis": 0}),
    ("MatMul", [X, _floats(2, 4, 5)], {}),
    ("MatMul", [X, _floats(4)], {}),
    ("Not", [TRUTHS], {}),
    ("PRelu", [X, np.abs(_floats(4))], {}),
    ("Pad", [X, _whole(0, 1, 2, 0, 0, -1), np.float32(9)], {}),
    ("Pad", [X, _whole(2, 1), np.float32(0), _whole(-2)], {}),
    ("Pow", [np.abs(X), np.float32(1.5)], {}),
    ("Pow", [X, np.array(2)], {}),
    ("Range", [np.array(3), np.array(11), np.array(2)], {}),
    ("Reshape", [X, _whole(0, -1)], {}),
    ("ScatterElements", [X, np.array([[[0, -1, 1, 0]]]), _floats(1, 1, 4)], {"axis": 0}),
    *(("ScatterElements", [X, np.array([[[1, 1, -2, 0]]]), _floats(1, 1, 4)],
       {"axis": 1, "reduction": how}) for how in ("add", "mul", "max", "min")),
    ("ScatterND", [X, np.array([[0, 1], [-1, 2]]), _floats(2, 4)], {}),
    ("ScatterND", [X, np.array([[0, 1], [0, 1]]), _floats(2, 4)], {"reduction": "add"}),
    ("Shape", [X], {"start": 1}),
    ("Slice", [X, _whole(-2, 0), _whole(99, 4), _whole(1, 2), _whole(1, 2)], {}),
    ("Slice", [X, _whole(-1), _whole(-99), _whole(2), _whole(-2)], {}),
    ("Slice", [X, _whole(1), _whole(2)], {}),
    ("Softmax", [X], {"axis": 1}),
    ("Split", [X, _whole(1, 3)], {"axis": 2}),
    ("Split", [X], {"axis": 2, "num_outputs": 2}),
    ("Squeeze", [X[:, :1], AXIS], {}),
    ("Tile", [X, _whole(1, 2, 3)], {}),
    ("TopK", [X, _whole(2)], {"axis": -1}),
    ("TopK", [X, _whole(2)], {"axis": 1, "largest": 0}),
    ("Transpose", [X], {"perm": [2, 0, 1]}),
    ("Trilu", [X, np.array(1)], {}),
    ("Trilu", [X], {"upper": 0}),
    ("Unsqueeze", [X, _whole(0, -1)], {}),
    ("Where", [TRUTHS, X, np.float32(0)], {}),
    ("IsInf", [np.array([np.inf, -np.inf, 1], np.float32)], {"detect_negative": 0}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "given", "attributes"), CASES, ids=[f"{n}-{case[0]}" for n, case in enumerate(CASES)]
)
def test_an_operation_makes_what_onnx_runtime_makes(
    name: str, given: list[Any], attributes: dict[str, Any]
) -> None:
    arrays_in = [np.asarray(array) for array in given]
    inputs = [f"x{number}" for number in range(len(arrays_in))]
    kinds = [helper.np_dtype_to_tensor_dtype(array.dtype) for array in arrays_in]
    count = {"Split": 2, "TopK": 2, "LayerNormalization": 1}.get(name, 1)
    outputs = [f"y{number}" for number in range(count)]
    graph = helper.make_graph(
        [helper.make_node(name, inputs, outputs, **attributes)],
        "one",
        [
            helper.make_tensor_value_info(given_name, kind, array.shape)
            for given_name, kind, array in zip(inputs, kinds, arrays_in, strict=True)
        ],
        [onnx.ValueInfoProto(name=output) for output in outputs],
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10
    ).SerializeToString()
    feed = dict(zip(inputs, arrays_in, strict=True))
    _assert_alike(TorchSession(model).run(feed), _by_onnx_runtime(model, feed))


def test_every_operation_of_the_protocol_is_tried() -> None:
    of_runs = {
        node.op_type for run in sound_runs() for node in onnx.load_from_string(run.model).graph.node
    }
    assert {*_RULES} - {name for name, *_ in CASES} - of_runs == set()
    assert of_runs >= {"If", "Scan"}


@pytest.mark.parametrize("run", sound_runs(), ids=lambda run: run.name)
def test_graphs_with_all_that_the_protocol_allows(run: Any) -> None:
    feed: dict[str, Array] = {}
    for given, count in zip(InferenceSession(run.model).get_inputs(), run.inputs, strict=True):
        shape = [size if isinstance(size, int) else -1 for size in given.shape]
        count = count[0] if isinstance(count, list) else count
        elements = int(np.prod(shape)) if count is None else count
        dtype = _NUMPY[given.type]
        random = np.random.default_rng(0).random(elements) if dtype == np.float32 else 0
        feed[given.name] = np.full(elements, random, dtype).reshape(shape)
    _assert_alike(TorchSession(run.model).run(feed), _by_onnx_runtime(run.model, feed))


def test_it_computes_exactly() -> None:
    assert accuracy(lambda model: TorchSession(model)).error < LARGEST_ERROR


def test_an_unknown_operation_is_refused() -> None:
    one = ArrayType([3])
    model = written([Node("Det", ["x"], ["y"])], {"x": one}, {"y": one})
    with pytest.raises(GraphError, match="PyTorch does not run the operation Det of graphs"):
        TorchSession(model)


def test_a_failed_run_says_why() -> None:
    shapes = {"x": ArrayType(["batch", 3]), "w": ArrayType([2])}
    model = written([Node("Mul", ["x", "w"], ["y"])], shapes, {"y": shapes["x"]})
    session = TorchSession(model)
    with pytest.raises(GraphError, match="the graph also needs w"):
        session.run({"x": np.ones((1, 3), np.float32)})
    with pytest.raises(GraphError, match=r"the graph cannot be run: .*size of tensor"):
        session.run({"x": np.ones((1, 3), np.float32), "w": np.ones(2, np.float32)})


def test_outputs_share_no_memory() -> None:
    three = ArrayType([3])
    nodes = [
        Node("Identity", ["x"], ["same"]),
        Node("Neg", ["x"], ["one"]),
        Node("Identity", ["one"], ["other"]),
    ]
    session = TorchSession(
        written(nodes, {"x": three}, dict.fromkeys(("same", "one", "other"), three))
    )
    x = session.upload(np.ones(3, np.float32))
    found = session.run_into({"x": x}, {})
    for value in found.values():
        value.add_(1)
    assert x.tolist() == [1, 1, 1]
    assert [value.tolist() for value in found.values()] == [[2] * 3, [0] * 3, [0] * 3]


_UNARY: Final = ("Neg", "Sigmoid", "Relu", "Softmax", "Identity", "Transpose", "Expand")
_BINARY: Final = ("Add", "Sub", "Mul", "MatMul")


def _with_constants(model: bytes) -> bytes:
    """Return a model in which each `Constant` has a value: the sizes (4, 4), or 4 x 4 numbers."""
    found = onnx.load_from_string(model)
    for node in found.graph.node:
        if node.op_type == "Constant":
            sizes = node.output[0].startswith("sizes")
            array = _whole(4, 4) if sizes else np.full((4, 4), 0.5, np.float32)
            value = onnx.numpy_helper.from_array(array)
            node.attribute.append(helper.make_attribute("value", value))
    made: bytes = found.SerializeToString()
    return made


@drawn(
    st.lists(
        st.tuples(
            st.sampled_from(("Constant", *_UNARY, *_BINARY)), st.integers(1, 4), st.integers(1, 4)
        ),
        min_size=2,
        max_size=20,
    ),
    st.sampled_from([None, DType.BF16]),
)
@example([("Neg", 1, 1), ("MatMul", 1, 2), ("Neg", 2, 1), ("Add", 2, 1), ("Neg", 1, 1)], None)
@example([("Neg", 1, 1), ("Transpose", 1, 1), ("Sub", 1, 2), ("Neg", 1, 1)], None)
@example([("Neg", 1, 1), ("Neg", 1, 1), ("Neg", 1, 1)], None)
@example([("Constant", 1, 1), ("Neg", 1, 1), ("Add", 1, 2)], None)
@example([("MatMul", 1, 2), ("Add", 1, 1), ("Neg", 1, 1)], None)
@example([("Expand", 1, 1), ("MatMul", 2, 2), ("Add", 2, 1), ("Neg", 1, 1)], None)
def test_memory_is_reused_only_after_its_last_use(
    drawn_nodes: list[tuple[str, int, int]], products: DType | None
) -> None:
    """Random graphs, whose arrays share memory in all ways, return what ONNX Runtime returns."""
    names, square = ["x", "w"], ArrayType([4, 4])
    nodes = []
    for number, (operation, first, second) in enumerate(drawn_nodes):
        given = [names[-min(first, len(names))]]
        if operation in _BINARY:
            given.append(names[-min(second, len(names))])
        names.append(f"{number}")
        if operation == "Expand":
            nodes.append(Node("ReduceSum", [given[0], "first"], [f"rows{number}"]))
            nodes.append(Node("Constant", [], [f"sizes{number}"]))
            given = [f"rows{number}", f"sizes{number}"]
        nodes.append(Node(operation, [] if operation == "Constant" else given, [names[-1]]))
    outputs = dict.fromkeys({names[-1], names[-2]} - {"x", "w"}, square)
    constants = {"first": np.array([0], "<i8")}
    model = _with_constants(written(nodes, {"x": square, "w": square}, outputs, constants))
    random = np.random.default_rng(len(nodes))
    feed = {name: random.standard_normal((4, 4), np.float32) for name in ("x", "w")}
    wanted = model if products is None else with_narrow_products(model)
    session = TorchSession(model, products=products)
    uploaded = {name: session.upload(array.copy()) for name, array in feed.items()}
    session.run_into(uploaded, {})
    found = session.run_into(uploaded, {})
    for name, array in zip(outputs, _by_onnx_runtime(wanted, feed), strict=True):
        size = float(np.linalg.norm(array))
        within = 1e-5 if products is None else 0.05
        if np.isfinite(size):
            assert np.linalg.norm(found[name].float().numpy() - array) <= within * size + within
    for name, tensor in uploaded.items():
        np.testing.assert_array_equal(tensor.numpy(), feed[name])


def test_gradients_of_softmax_and_relu_are_computed_at_once() -> None:
    rows = ArrayType(["batch", 5])
    nodes = [
        Node("Softmax", ["x"], ["y"], {"axis": -1}),
        Node("Mul", ["dy", "y"], ["weighted"]),
        Node("ReduceSum", ["weighted", "last"], ["total"]),
        Node("Mul", ["total", "y"], ["correction"]),
        Node("Sub", ["weighted", "correction"], ["of_softmax"]),
        Node("Relu", ["x"], ["active"]),
        Node("LessOrEqual", ["active", "zero"], ["idle"]),
        Node("Where", ["idle", "zero", "dy"], ["of_relu"]),
    ]
    constants = {"last": np.array([-1], "<i8"), "zero": np.zeros((), "<f4")}
    outputs = dict.fromkeys(("of_softmax", "of_relu"), rows)
    model = written(nodes, {"x": rows, "dy": rows}, outputs, constants)
    graph = onnx.load_from_string(model).graph
    tensors = {name: torch.tensor(value) for name, value in constants.items()}
    found = [node.op_type for node in fused(graph.node, tensors, list(outputs))]
    assert found == ["Softmax", "SoftmaxGradient", "Relu", "ReluGradient"]
    feed = {"x": _floats(3, 5), "dy": _floats(3, 5)}
    feed["x"][0, :2] = np.nan, 0
    _assert_alike(TorchSession(model).run(feed), _by_onnx_runtime(model, feed))
    feed["dy"] = feed["dy"][:1]  # a gradient that is equal for all rows
    _assert_alike(TorchSession(model).run(feed), _by_onnx_runtime(model, feed))
    # Another axis, or another use of an operand, leaves the operations as they are.
    other = {**tensors, "last": torch.tensor([0]), "zero": torch.tensor(1.0)}
    assert len(fused(graph.node, other, list(outputs))) == len(nodes)


# --- layers -------------------------------------------------------------------------------------


def _feed(model: bytes, rows: int = 2) -> dict[str, Array]:
    random, feed = np.random.default_rng(1), {}
    for given in InferenceSession(model).get_inputs():
        shape = [size if isinstance(size, int) else rows for size in given.shape]
        if given.type == "tensor(float)":
            feed[given.name] = random.standard_normal(shape).astype(np.float32) / 10
        elif given.type == "tensor(bool)":
            feed[given.name] = random.integers(0, 2, shape).astype(np.bool_)
        else:
            feed[given.name] = random.integers(0, TOKENS, shape).astype(_NUMPY[given.type])
    return feed


@pytest.mark.slow
@pytest.mark.parametrize("family", ["opt", "llama", "qwen3", "gemma2", "phi", "gpt2"])
def test_layers_and_the_loss_are_those_of_onnx_runtime(family: str) -> None:
    graphs = graphs_of(small_model(family))
    every = [each for one in graphs.layers for each in (one.forward, one.backward)]
    every += [one.from_activations for one in graphs.layers if one.from_activations is not None]
    assert graphs.loss is not None
    for model in (*every, graphs.loss.graph):
        mine, theirs = TorchSession(model), GraphSession(model, 1)
        assert dict(mine.inputs) == dict(theirs.inputs)
        assert mine.outputs == theirs.outputs
        assert dict(mine.in_place) == dict(theirs.in_place)
        feed = _feed(model)
        found, wanted = mine.run(feed), theirs.run(feed)
        for name, array in wanted.items():
            assert found[name].shape == array.shape
            np.testing.assert_allclose(found[name], array, atol=2e-6 * np.abs(array).max())


@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP16])
def test_sums_are_added_in_place_and_narrow_parameters_stay_narrow(dtype: DType) -> None:
    layer = graphs_of(small_model("opt")).layers[0]
    feed = _feed(layer.backward)
    matrices = {name for name in feed if name.startswith("parameter:") and feed[name].ndim == 2}
    given = [dtype if name in matrices else None for name in feed]
    mine = TorchSession(layer.backward, given)
    theirs = GraphSession(narrowed(layer.backward, given), 1)
    assert mine.narrow
    assert dict(mine.narrow) == dict(theirs.narrow)
    for name in mine.narrow:
        feed[name] = arrays.narrow(feed[name], dtype)
    sides: Any
    for sides in (mine, theirs):
        uploaded = {name: sides.upload(array.copy()) for name, array in feed.items()}
        into = {output: uploaded[name] for output, name in sides.in_place.items()}
        found = sides.run_into(uploaded, into)
        assert into
        assert all(found[output] is array for output, array in into.items())
        if sides is mine:
            mine_found = {name: value.numpy() for name, value in found.items()}
        else:
            for name, array in found.items():
                np.testing.assert_allclose(
                    mine_found[name], array, rtol=1e-5, atol=2e-6 * np.abs(array).max()
                )


def _bf16(array: Array) -> Array:
    return arrays.Buffer(arrays.narrow(array, DType.BF16), DType.BF16).float32()


def test_products_round_their_factors_and_their_result_to_bf16_and_nothing_else() -> None:
    shapes = {"x": ArrayType(["batch", 64]), "w": ArrayType([64, 8]), "b": ArrayType([8])}
    two = ArrayType(["batch", 8])
    nodes = [
        Node("MatMul", ["x", "w"], ["y"]),
        Node("Relu", ["y"], ["active"]),
        Node("Add", ["active", "b"], ["z"]),
    ]
    model = written(nodes, shapes, {"y": two, "z": two})
    random = np.random.default_rng(3)
    feed = {
        "x": random.standard_normal((5, 64), np.float32),
        "w": random.standard_normal((64, 8), np.float32),
        "b": random.standard_normal(8, np.float32),
    }
    found = TorchSession(model, products=DType.BF16).run(feed)
    exact = _bf16(feed["x"]).astype(np.float64) @ _bf16(feed["w"])
    assert {array.dtype for array in found.values()} == {np.dtype(np.float32)}
    np.testing.assert_array_equal(found["y"], _bf16(found["y"]))  # rounded
    np.testing.assert_allclose(found["y"], exact, rtol=2**-8)  # from a sum in fp32
    np.testing.assert_array_equal(found["z"], np.maximum(found["y"], 0) + feed["b"])


def test_each_iteration_of_a_scan_rounds_its_own_factors() -> None:
    """The state is a factor of two products and an output; `w` belongs to the enclosing graph."""
    one = [1, 4]

    def floats(name: str, shape: Sequence[int]) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

    nodes = [
        helper.make_node("MatMul", ["state", "w"], ["new"]),
        helper.make_node("MatMul", ["new", "w"], ["a"]),
        helper.make_node("MatMul", ["new", "v"], ["b"]),
        helper.make_node("Add", ["a", "b"], ["c"]),
        helper.make_node("Add", ["c", "row"], ["y"]),
    ]
    body = helper.make_graph(
        nodes, "body", [floats("state", one), floats("row", one)],
        [floats("new", one), floats("y", one)],
    )  # fmt: skip
    scan = helper.make_node("Scan", ["s", "x"], ["last", "ys"], body=body, num_scan_inputs=1)
    shapes = {"s": one, "x": [3, *one], "w": [4, 4], "v": [4, 4]}
    graph = helper.make_graph(
        [scan], "graph", [floats(*each) for each in shapes.items()],
        [floats("last", one), floats("ys", [3, *one])],
    )  # fmt: skip
    opset = helper.make_opsetid("", 20)
    model = helper.make_model(graph, opset_imports=[opset], ir_version=10).SerializeToString()
    random = np.random.default_rng(5)
    feed = {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    found = TorchSession(model, products=DType.BF16).run(feed)
    state, w, v = feed["s"], _bf16(feed["w"]), _bf16(feed["v"])
    for row, y in zip(feed["x"], found["ys"], strict=True):
        state = _bf16(_bf16(state) @ w)
        np.testing.assert_allclose(y, _bf16(state @ w) + _bf16(state @ v) + row, rtol=0.02)
    np.testing.assert_allclose(found["last"], state, rtol=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["opt", "llama", "qwen3", "gemma2", "phi", "gpt2"])
def test_layers_and_the_loss_with_products_in_bf16(family: str) -> None:
    graphs = graphs_of(small_model(family))
    assert graphs.loss is not None
    layer = graphs.layers[0]
    for model in (layer.forward, layer.backward, graphs.loss.graph):
        mine = TorchSession(model, products=DType.BF16)
        feed = _feed(model)
        wanted = GraphSession(model, 1).run(feed)
        found = mine.run(feed)
        into = {output: torch.tensor(feed[name]) for output, name in mine.in_place.items()}
        given = {name: mine.upload(array) for name, array in feed.items()}
        given |= {mine.in_place[output]: total for output, total in into.items()}
        in_place = mine.run_into(given, into)
        for name, array in wanted.items():
            size = float(np.linalg.norm(array))
            assert np.linalg.norm(found[name] - array) <= 0.02 * size + 1e-6
            again = in_place[name].float().numpy()
            np.testing.assert_allclose(again, found[name], atol=1e-5 + 0.01 * size)


# --- on a device --------------------------------------------------------------------------------


def stored(values: Array, dtype: DType = DType.FP32) -> StoredArray:
    payload = arrays.narrow(values, dtype).tobytes()
    rows, columns = values.shape
    return StoredArray(rows, columns, dtype, payload, len(payload))


def assert_arrays_stay_between_runs(
    runner: Any, opened: MakeGraph, kind: type, dtype: DType = DType.FP32
) -> Kept:
    """A parameter is uploaded once, in fp32. A sum stays on the processor until it is fetched."""
    shape = ArrayType([2, 3])
    nodes = [Node("Mul", ["x", "w"], ["y"]), Node("Add", ["y", "sum"], ["new"])]
    inputs = {"x": ArrayType(["batch", 3]), "w": ArrayType([3]), "sum": shape}
    model = written(nodes, inputs, {"new": shape})
    uploads: list[int] = []
    upload = runner.upload

    def counted(self: Any, array: Array) -> Any:
        uploads.append(array.size)
        return upload(self, array)

    graph = StoredGraph(model, len(model))
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    w = stored(np.array([[1, 2, 3]], np.float32), dtype)
    before: Kept | None = None
    with mock.patch.object(runner, "upload", counted):
        for number in range(3):
            after = Kept(24, replaces=before)
            order = GraphRun(number, graph, [stored(x, dtype), w, before], [after], 0)
            run_graph(order, opened)
            assert isinstance(after.value, kind)
            before = after
    assert uploads.count(3) == 1
    rows = np.frombuffer(fetch(FetchRun(9, after, 1, 1, 3, DType.FP32)), np.float32)
    np.testing.assert_array_equal(rows, 3 * x[1] * [1, 2, 3])
    return after


def test_arrays_stay_on_the_processor_between_runs() -> None:
    kept = assert_arrays_stay_between_runs(
        TorchSession, partial(open_in_torch, "cpu"), torch.Tensor
    )
    with pytest.raises(GraphError, match=r"shape \(2, 3\) has no rows 2 to 3"):
        fetch(FetchRun(10, kept, 2, 1, 3, DType.FP32))


def test_a_runner_is_named_by_its_processor() -> None:
    model = written([Node("Neg", ["x"], ["y"])], {"x": ArrayType([1])}, {"y": ArrayType([1])})
    found = partial(open_in_torch, "cpu")(model).run({"x": np.ones(1, np.float32)})
    np.testing.assert_array_equal(found["y"], [-1])
