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


# Operations whose first two inputs are multiplied with each other.
_PRODUCTS: Final = frozenset(("Einsum", "Gemm", "MatMul"))

# Relative noise added to a product before it is rounded to bf16: twice the distance between
# adjacent values. A device that sums in another order rounds some results to the other adjacent
# value.
_BEFORE_ROUNDING: Final = 2.0**-7


def noisy(model: bytes, amplitude: float, *, narrow: bool = False) -> bytes:
    """Return a copy of a graph that adds new random noise in each run.

    Args:
        model: serialized ONNX model in fp32.
        amplitude: maximum relative error that is added to each result of an inexact operation.
        narrow: whether matrix products are rounded to bf16, as in `with_narrow_products`. Their
            exact results then have an error of up to 2**-7.
    """
    typed = onnx.shape_inference.infer_shapes(onnx.load_model_from_string(model))
    if narrow:
        _narrow_products(typed.graph, _BEFORE_ROUNDING)
    _disturb(typed.graph, amplitude, _EXACT | _PRODUCTS if narrow else _EXACT)
    found: bytes = typed.SerializeToString()
    return found


def with_narrow_products(model: bytes) -> bytes:
    """Return a copy of a graph that rounds the factors and results of matrix products to bf16.

    Devices whose products are in bf16 round the same numbers (docs/protocol.md, rule G35).

    Args:
        model: serialized ONNX model in fp32.
    """
    typed = onnx.shape_inference.infer_shapes(onnx.load_model_from_string(model))
    _narrow_products(typed.graph)
    found: bytes = typed.SerializeToString()
    return found


def _narrow_products(graph: GraphProto, amplitude: float = 0.0) -> None:
    """Round both factors and the result of each matrix product to bf16, in place.

    `amplitude` is the maximum relative error that is added to a result before it is rounded.
    """
    floats = _floats(graph)
    nodes = [
        made
        for number, node in enumerate(graph.node)
        for made in _narrowed(node, floats, number, amplitude)
    ]
    del graph.node[:]
    graph.node.extend(nodes)


def _narrowed(
    node: NodeProto, floats: set[str], number: int, amplitude: float
) -> Iterator[NodeProto]:
    """Yield the operations that replace operation `number` of a graph."""
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            _narrow_products(attribute.g, amplitude)
    if node.op_type not in _PRODUCTS or node.output[0] not in floats:
        yield node
        return
    for at, name in enumerate(node.input[:2]):
        node.input[at] = f"{name}/factor of {number}.{at}"
        yield from _rounding(name, node.input[at])
    result, exact = node.output[0], f"{node.output[0]}/exact product"
    node.output[0] = exact
    addend = node.input.pop() if node.op_type == "Gemm" and len(node.input) > 2 else ""
    yield node
    if amplitude:
        noised = f"{exact}/noised"
        yield from _noise(exact, noised, amplitude)
        exact = noised
    if not addend:
        yield from _rounding(exact, result)
        return
    rounded = f"{result}/product"
    yield from _rounding(exact, rounded)
    yield helper.make_node("Add", [rounded, addend], [result])


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


def _disturb(graph: GraphProto, amplitude: float, exact: frozenset[str]) -> None:
    """Add noise after all operations except those in `exact`, in place, also in subgraphs."""
    floats = _floats(graph)
    nodes = [made for node in graph.node for made in _disturbed(node, floats, amplitude, exact)]
    del graph.node[:], graph.value_info[:]
    graph.node.extend(nodes)


def _disturbed(
    node: NodeProto, floats: set[str], amplitude: float, exact: frozenset[str]
) -> Iterator[NodeProto]:
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            _disturb(attribute.g, amplitude, exact)
    yield node
    if node.op_type in exact:
        return
    for number, name in enumerate(node.output):
        if name in floats:
            node.output[number] = f"{name}/exact"
            yield from _noise(node.output[number], name, amplitude)
