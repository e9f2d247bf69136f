"""Parses the inputs, outputs and nodes of a serialized ONNX model without copying its bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from cleave.machine.onnx_fields import (
    AttributeField,
    GraphField,
    ModelField,
    NodeField,
    OpsetField,
    TensorField,
    ValueField,
)
from cleave.machine.protobuf import fields

Bytes = bytes | memoryview


@dataclass(slots=True)
class OnnxNode:
    """A node of a graph, which applies an operation.

    Attributes:
        message: the serialized node.
        operation: operation type, such as `MatMul`.
        inputs, outputs: names of the input and output arrays, in order.
        enclosed: names of all arrays that the node's subgraphs use, including arrays that the
            subgraphs themselves compute.
    """

    message: memoryview
    operation: str = ""
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    enclosed: set[str] = field(default_factory=set)


@dataclass(slots=True)
class OnnxGraph:
    """The graph of an ONNX model.

    Attributes:
        opset: version of the ONNX operator set.
        inputs, outputs: map the names of inputs and outputs to serialized descriptions, in order.
            Constants are not inputs.
        nodes: nodes of the graph, in order.
    """

    opset: int
    inputs: dict[str, memoryview]
    outputs: dict[str, memoryview]
    nodes: Sequence[OnnxNode]

    def uses(self, name: str) -> int:
        """Return how often nodes use an array, plus one if the array is an output of the graph."""
        return sum(node.inputs.count(name) + (name in node.enclosed) for node in self.nodes) + (
            name in self.outputs
        )


def read_graph(model: Bytes) -> OnnxGraph:
    """Parse the graph of a model that passed `check_graph`.

    Raises:
        ProtobufError: when `model` is not a serialized ONNX model.
    """
    opset, inputs, outputs, constants, nodes = 0, {}, {}, set(), []
    for number, value in _parts(model):
        if number == ModelField.OPSET:
            opset = max([opset, *(v for n, v in _all(value) if n == OpsetField.VERSION)])
        elif number == ModelField.GRAPH:
            for part, held in _parts(value):
                match part:
                    case GraphField.INPUT:
                        inputs[_name(held, ValueField.NAME)] = held
                    case GraphField.OUTPUT:
                        outputs[_name(held, ValueField.NAME)] = held
                    case GraphField.CONSTANT:
                        constants.add(_name(held, TensorField.NAME))
                    case GraphField.NODE:
                        nodes.append(_node(held))
                    case _:
                        pass
    inputs = {name: held for name, held in inputs.items() if name not in constants}
    return OnnxGraph(opset, inputs, outputs, nodes)


def _node(message: memoryview) -> OnnxNode:
    node = OnnxNode(message)
    for number, value in _parts(message):
        match number:
            case NodeField.INPUT:
                node.inputs.append(text(value))
            case NodeField.OUTPUT:
                node.outputs.append(text(value))
            case NodeField.OPERATION:
                node.operation = text(value)
            case NodeField.ATTRIBUTE:
                for part, held in _parts(value):
                    if part in (AttributeField.GRAPH, AttributeField.GRAPHS):
                        node.enclosed |= _enclosed(held)
            case _:
                pass
    return node


def _enclosed(graph: memoryview) -> set[str]:
    """Return the names of all arrays that a subgraph uses."""
    found = set()
    for number, value in _parts(graph):
        if number == GraphField.NODE:
            node = _node(value)
            found |= {*node.inputs, *node.enclosed}
        elif number == GraphField.OUTPUT:
            found.add(_name(value, ValueField.NAME))
    return found


def _name(message: memoryview, number: int) -> str:
    return "".join(text(value) for n, value in _parts(message) if n == number)


def text(value: memoryview) -> str:
    """Decode the bytes of a text field as UTF-8; invalid bytes become surrogates."""
    return str(value, "utf-8", "surrogateescape")


def _all(message: Bytes) -> Iterator[tuple[int, int]]:
    return ((n, value) for n, value in fields(memoryview(message)) if isinstance(value, int))


def _parts(message: Bytes) -> Iterator[tuple[int, memoryview]]:
    """Yield the number and bytes of each field that is a text, bytes or a message."""
    return ((n, v) for n, v in fields(memoryview(message)) if not isinstance(v, int))
