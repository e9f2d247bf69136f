"""Add random noise to graphs, to measure the effect of rounding errors.

If terms cancel, a result may consist of rounding errors only. For example, the gradient of a key
projection's bias is 0 in exact arithmetic. So noise that is larger than a device's rounding errors
is added to the result of each operation that sums or approximates (Vignes, "A stochastic arithmetic
for reliable scientific computation", 1993).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, TypeAlias

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


# Operations whose first two inputs are multiplied with each other.
_PRODUCTS: Final = frozenset(("Einsum", "Gemm", "MatMul"))

PRODUCT_ROUNDING: Final = 2.0**-8
"""Amplitude of noise in products in bf16: the error of rounding to bf16, doubled."""


def noisy(model: bytes, amplitude: float, *, narrow_products: bool = False) -> bytes:
    """Return a copy of a graph that adds new random noise in each run.

    Args:
        model: serialized ONNX model in fp32.
        amplitude: maximum relative error that is added to each result of an inexact operation.
        narrow_products: whether devices may compute matrix products in bf16. The error of both
            factors and of the result is then `PRODUCT_ROUNDING`.
    """
    typed = onnx.shape_inference.infer_shapes(onnx.load_model_from_string(model))
    if narrow_products:
        _change_products(typed.graph, partial(_noise, amplitude=PRODUCT_ROUNDING))
    _disturb(typed.graph, amplitude)
    found: bytes = typed.SerializeToString()
    return found


def with_narrow_products(model: bytes) -> bytes:
    """Return a copy of a graph that rounds the factors and results of matrix products to bf16.

    Devices whose products are in bf16 round in the same places, so results differ little.

    Args:
        model: serialized ONNX model in fp32.
    """
    typed = onnx.shape_inference.infer_shapes(onnx.load_model_from_string(model))
    _change_products(typed.graph, _rounding)
    found: bytes = typed.SerializeToString()
    return found


_Change: TypeAlias = Callable[[str, str], Iterator[NodeProto]]


def _change_products(graph: GraphProto, change: _Change) -> None:
    """Change both factors and the result of each matrix product, in place.

    `change` yields the operations that compute an array from another one, by their names.
    """
    floats = _floats(graph)
    nodes = list(graph.node)
    del graph.node[:]
    for number, node in enumerate(nodes):
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                _change_products(attribute.g, change)
        if node.op_type in _PRODUCTS and node.output[0] in floats:
            for at, name in enumerate(node.input[:2]):
                moved = f"{name}/factor of {number}.{at}"
                graph.node.extend(change(name, moved))
                node.input[at] = moved
            exact, name = f"{node.output[0]}/product", node.output[0]
            node.output[0] = exact
            graph.node.append(node)
            graph.node.extend(change(exact, name))
        else:
            graph.node.append(node)


def _floats(graph: GraphProto) -> set[str]:
    """Return the names of the floating-point arrays that a graph computes."""
    return {
        value.name
        for value in (*graph.value_info, *graph.output)
        if value.type.tensor_type.elem_type == TensorProto.FLOAT
    }


def _rounding(name: str, moved: str) -> Iterator[NodeProto]:
    """Yield the operations that round `name` to bf16."""
    narrow = f"{moved}/bf16"
    yield helper.make_node("Cast", [name], [narrow], to=TensorProto.BFLOAT16)
    yield helper.make_node("Cast", [narrow], [moved], to=TensorProto.FLOAT)


def _noise(name: str, moved: str, amplitude: float) -> Iterator[NodeProto]:
    """Yield the operations that compute `moved` from `name` by adding noise."""
    factor = f"{moved}/noise"
    bounds = {"low": 1 - amplitude, "high": 1 + amplitude}
    yield helper.make_node("RandomUniformLike", [name], [factor], **bounds)
    yield helper.make_node("Mul", [name, factor], [moved])


def _disturb(graph: GraphProto, amplitude: float) -> None:
    """Add noise operations to a graph and to its subgraphs, in place."""
    floats = _floats(graph)
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
            node.output[number] = f"{name}/exact"
            yield from _noise(node.output[number], name, amplitude)
