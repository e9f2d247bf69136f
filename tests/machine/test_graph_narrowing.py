"""Graphs that take 16-bit arrays: the same results, and a cast for each use."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, load_from_string

from cleave import arrays
from cleave.arrays import DType
from cleave.machine.graph_narrowing import narrowed
from cleave.machine.graph_session import GraphSession
from tests.examples import examples
from tests.onnx_models import adding

FLOAT = TensorProto.FLOAT


def _twice(rows: int | str, depth: int, columns: int, opset: int = 18) -> bytes:
    """y = x w, and back = y w^T, as a layer forward and backward; w^T is turned once for both."""
    graph = helper.make_graph(
        [
            helper.make_node("Transpose", ["w"], ["turned"], perm=[1, 0]),
            helper.make_node("MatMul", ["x", "turned"], ["y"]),
            helper.make_node("MatMul", ["y", "w"], ["z"]),
            helper.make_node("MatMul", ["z", "turned"], ["back"]),
        ],
        "twice",
        [
            helper.make_tensor_value_info("x", FLOAT, [rows, depth]),
            helper.make_tensor_value_info("w", FLOAT, [columns, depth]),
        ],
        [
            helper.make_tensor_value_info("y", FLOAT, [rows, columns]),
            helper.make_tensor_value_info("back", FLOAT, [rows, columns]),
        ],
    )
    opsets = [helper.make_opsetid("", opset)]
    model: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()
    return model


@settings(max_examples=examples(20), deadline=None)
@given(
    st.sampled_from([DType.BF16, DType.FP16]),
    st.integers(1, 9),
    st.integers(1, 20),
    st.integers(1, 20),
    st.integers(0, 2**32 - 1),
)
def test_results_are_those_of_widened_arrays(
    dtype: DType, rows: int, depth: int, columns: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    x = random.standard_normal((rows, depth), np.float32)
    w = arrays.Buffer(
        arrays.narrow(random.standard_normal((columns, depth), np.float32), dtype), dtype
    )
    model = _twice("batch", depth, columns)
    wanted = GraphSession(model, 1).run({"x": x, "w": w.float32()})
    session = GraphSession(narrowed(model, [DType.FP32, dtype]), 1)
    assert session.narrow == {"w": dtype}
    found = session.run_into({"x": x, "w": w.array}, {})
    for name in ("y", "back"):
        np.testing.assert_array_equal(found[name], wanted[name])


def test_each_use_has_a_cast_of_its_own_with_its_transposition() -> None:
    model = load_from_string(narrowed(_twice("batch", 4, 3), [DType.BF16, DType.BF16]))
    operations = [node.op_type for node in model.graph.node]
    assert operations == ["Cast", "Transpose", "Cast", "Cast", "Transpose", *["MatMul"] * 3]
    x, w = (each.type.tensor_type for each in model.graph.input)
    assert x.elem_type == FLOAT  # activations come in either dtype
    assert w.elem_type == TensorProto.BFLOAT16
    assert [size.dim_value for size in w.shape.dim] == [3, 4]


@pytest.mark.parametrize(
    ("model", "dtypes"),
    [
        (adding(), [DType.BF16, DType.FP32]),
        (adding(), [None, None]),
        (adding(), [DType.BF16]),
        (_twice(2, 4, 3, opset=12), [DType.FP32, DType.BF16]),  # has no casts of bf16
    ],
)
def test_other_models_stay_as_they_are(model: bytes, dtypes: list[DType | None]) -> None:
    assert narrowed(model, dtypes) is model


def test_what_graphs_inside_a_graph_take_stays_wide() -> None:
    inner = helper.make_graph(
        [helper.make_node("Add", ["w", "w"], ["double"])],
        "inner",
        [],
        [helper.make_tensor_value_info("double", FLOAT, [3])],
    )
    graph = helper.make_graph(
        [
            helper.make_node("If", ["which"], ["y"], then_branch=inner, else_branch=inner),
        ],
        "outer",
        [
            helper.make_tensor_value_info("which", TensorProto.BOOL, []),
            helper.make_tensor_value_info("w", FLOAT, [3]),
        ],
        [helper.make_tensor_value_info("y", FLOAT, [3])],
    )
    opsets = [helper.make_opsetid("", 18)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()
    assert narrowed(model, [None, DType.BF16]) is model
