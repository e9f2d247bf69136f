"""Combine operations of gradients that PyTorch computes in one pass over the arrays.

ONNX has no operations for most gradients. So in a layer's graph, the gradient of the attention
weights is four operations, each of which reads and writes an array of all attention scores.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor


def fused(
    nodes: Sequence[Any], constants: Mapping[str, Tensor], outputs: Sequence[str]
) -> list[Any]:
    """Return equivalent operations that compute the gradients of `Softmax` and `Relu` at once.

    The new operations are `SoftmaxGradient` and `ReluGradient` (see `torch_operations`).

    Args:
        nodes: a graph's operations as ONNX nodes, in order.
        constants: the graph's constants by name.
        outputs: names of the arrays that the graph returns.
    """
    makers = {name: node for node in nodes for name in node.output}
    found = [
        _softmax_gradient(node, makers, constants)
        or _relu_gradient(node, makers, constants)
        or node
        for node in nodes
    ]
    used, kept = {*outputs}, []
    for node in reversed(found):
        if not used.isdisjoint(node.output):
            kept.append(node)
            used.update(node.input, enclosed(node))
    return kept[::-1]


def _softmax_gradient(
    node: Any, makers: Mapping[str, Any], constants: Mapping[str, Tensor]
) -> Any | None:
    """Return an operation that equals y * dy - y * sum(y * dy), where y is a softmax."""
    if node.op_type != "Sub" or any(_made_by(name, makers) != "Mul" for name in node.input):
        return None
    weighted, correction = (makers[name] for name in node.input)
    for y, total in (correction.input, correction.input[::-1]):
        if (
            _made_by(y, makers) == "Softmax"
            and _made_by(total, makers) == "ReduceSum"
            and y in weighted.input
            and makers[total].input[0] == node.input[0]
            and _attribute(makers[total], "keepdims", 1)
        ):
            axis, axes = _attribute(makers[y], "axis", -1), makers[total].input[1:]
            along = [constants[name].tolist() for name in axes if name in constants]
            dy = weighted.input[1 if weighted.input[0] == y else 0]
            if along == [[axis]]:
                return _node("SoftmaxGradient", [dy, y], node.output, axis=axis)
    return None


def _relu_gradient(
    node: Any, makers: Mapping[str, Any], constants: Mapping[str, Tensor]
) -> Any | None:
    """Return an operation that is 0 where the result of a `Relu` is 0, and otherwise dy."""
    if node.op_type != "Where" or _made_by(node.input[0], makers) != "LessOrEqual":
        return None
    y, least = makers[node.input[0]].input
    zeros = (constants.get(name) for name in (least, node.input[1]))
    if _made_by(y, makers) != "Relu" or any(
        zero is None or zero.numel() != 1 or zero.item() != 0 for zero in zeros
    ):
        return None
    return _node("ReluGradient", [node.input[2], y], node.output)


def _made_by(name: str, makers: Mapping[str, Any]) -> str:
    """Return the type of the operation that computes an array; empty for the graph's inputs."""
    return makers[name].op_type if name in makers else ""


def _attribute(node: Any, name: str, default: int) -> int:
    return next((each.i for each in node.attribute if each.name == name), default)


def _node(operation: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: int) -> Any:
    import onnx

    return onnx.helper.make_node(operation, inputs, outputs, **attributes)


def enclosed(node: Any) -> Iterator[str]:
    """Yield the names of the arrays that the subgraphs of a node use."""
    for attribute in node.attribute:
        for inner in attribute.g.node:
            yield from inner.input
            yield from enclosed(inner)
        yield from (output.name for output in attribute.g.output)
