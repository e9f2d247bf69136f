"""Add random noise to graphs, to measure the effect of rounding errors.

If terms cancel, a result may consist of rounding errors only. For example, the gradient of a key
projection's bias is 0 in exact arithmetic. So noise that is larger than a device's rounding errors
is added to the result of each operation that sums or approximates (Vignes, "A stochastic arithmetic
for reliable scientific computation", 1993).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import onnx
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, helper

_EXACT: Final = frozenset((
    # Operations that only move elements, or whose subgraphs do the computation.
    "Cast", "Concat", "Constant", "ConstantOfShape", "Expand", "Flatten", "Gather",
    "GatherElements", "GatherND", "Identity", "If", "Loop", "Pad", "Reshape", "Scan",
    "ScatterElements", "ScatterND", "Slice", "Split", "Squeeze", "Tile", "Transpose", "Trilu",
    "Unsqueeze", "Where",
    # Operations that round each element once, with the same result on every device.
    "Abs", "Add", "Ceil", "Clip", "Div", "Floor", "LeakyRelu", "Max", "Min", "Mul", "Neg", "Relu",
    "Round", "Sign", "Sub",
))  # fmt: skip


def noisy(model: bytes, amplitude: float) -> bytes:
    """Return a copy of a graph that adds new random noise in each run.

    Args:
        model: serialized ONNX model in fp32.
        amplitude: maximum relative error that is added to each result of an inexact operation.
    """
    typed = onnx.shape_inference.infer_shapes(onnx.load_model_from_string(model))
    _disturb(typed.graph, amplitude)
    found: bytes = typed.SerializeToString()
    return found


def _disturb(graph: GraphProto, amplitude: float) -> None:
    """Add noise operations to a graph and to its subgraphs, in place."""
    floats = {
        value.name
        for value in (*graph.value_info, *graph.output)
        if value.type.tensor_type.elem_type == TensorProto.FLOAT
    }
    nodes = [made for node in graph.node for made in _disturbed(node, floats, amplitude)]
    del graph.node[:], graph.value_info[:]
    graph.node.extend(nodes)


def _disturbed(node: NodeProto, floats: set[str], amplitude: float) -> Iterator[NodeProto]:
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            _disturb(attribute.g, amplitude)
    yield node
    if node.op_type in _EXACT:
        return
    for number, name in enumerate(node.output):
        if name in floats:
            exact, factor = f"{name}/exact", f"{name}/factor"
            node.output[number] = exact
            bounds = {"low": 1 - amplitude, "high": 1 + amplitude}
            yield helper.make_node("RandomUniformLike", [exact], [factor], **bounds)
            yield helper.make_node("Mul", [exact, factor], [name])
