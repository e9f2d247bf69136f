"""Validates an ONNX model from the network before the device runs it.

ONNX Runtime is a large library, so a device validates each model before ONNX Runtime parses it. A
valid model uses only operations of ONNX's default domain, references no external files, and has no
unbounded loops. The check reads the serialized model in place and copies nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cleave.machine.graph_session import GraphError
from cleave.machine.onnx_fields import (
    AttributeField,
    GraphField,
    ModelField,
    NodeField,
    OpsetField,
    TensorField,
    TypeField,
    ValueField,
)
from cleave.machine.protobuf import ProtobufError, fields, integers
from cleave.protocol import limits

REFUSED_OPERATIONS: Final = frozenset(
    {
        *("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform"),
        *("RandomUniformLike", "Dropout", "Loop"),
    }
)
"""Forbidden operations of ONNX's default domain: random operations, and `Loop`, which may never
end."""

_DOMAINS: Final = (b"", b"ai.onnx")  # both names of the default domain
_LONGEST_DOMAIN: Final = 8  # prefix length that separates `_DOMAINS` from other domains
_MOST_ELEMENTS_OF_A_BYTE: Final = 2  # 4-bit types store 2 elements in a byte


def check_graph(model: bytes | memoryview) -> None:
    """Raise if a model is not a valid graph as defined in docs/protocol.md (section *Graphs*).

    The check takes time proportional to the model's length, and no extra memory.

    Raises:
        GraphError: when the data is not an ONNX model, or the model has a forbidden part. The
            message names the forbidden part.
    """
    try:
        _Check().model(memoryview(model))
    except ProtobufError as error:
        raise GraphError(f"it is no ONNX model: {error}") from None


@dataclass(slots=True)
class _Check:
    """Checks one model. Protobuf parsers merge repeated fields, so every occurrence is checked.

    Attributes:
        nodes: number of nodes checked so far, in the graph and in all nested graphs.
    """

    nodes: int = 0

    def model(self, model: memoryview) -> None:
        graphs = 0
        for number, value in fields(model):
            match number:
                case ModelField.GRAPH:
                    graphs += 1
                    self.graph(_content(value), 1)
                case ModelField.OPSET:
                    for part, domain in fields(_content(value)):
                        if part == OpsetField.DOMAIN:
                            _check_domain(domain)
                case ModelField.FUNCTION:
                    raise GraphError("a graph has no functions of its own, and this model has some")
                case ModelField.TRAINING:
                    raise GraphError("a graph does not say how it is trained, and this model does")
                case _:
                    pass
        if not graphs:
            raise GraphError("it is no ONNX model: it holds no graph")

    def graph(self, graph: memoryview, depth: int) -> None:
        if depth > limits.MAX_GRAPH_DEPTH:
            raise GraphError(f"graphs stand in it more than {limits.MAX_GRAPH_DEPTH} deep")
        for number, value in fields(graph):
            match number:
                case GraphField.NODE:
                    self.node(_content(value), depth)
                case GraphField.CONSTANT:
                    _check_tensor(_content(value))
                case GraphField.SPARSE_CONSTANT:
                    raise GraphError("a graph has no sparse constants, and this model has some")
                case GraphField.INPUT | GraphField.OUTPUT:
                    _check_value(_content(value))
                case _:
                    pass

    def node(self, node: memoryview, depth: int) -> None:
        self.nodes += 1
        if self.nodes > limits.MAX_GRAPH_NODES:
            raise GraphError(f"it has more than {limits.MAX_GRAPH_NODES} operations")
        for number, value in fields(node):
            match number:
                case NodeField.OPERATION:
                    operation = _text(value)
                    if operation in REFUSED_OPERATIONS:
                        raise GraphError(f"a graph has no operation {operation}")
                case NodeField.DOMAIN:
                    _check_domain(value)
                case NodeField.ATTRIBUTE:
                    self.attribute(_content(value), depth)
                case _:
                    pass

    def attribute(self, attribute: memoryview, depth: int) -> None:
        for number, value in fields(attribute):
            match number:
                case AttributeField.GRAPH | AttributeField.GRAPHS:
                    self.graph(_content(value), depth + 1)
                case AttributeField.TENSOR | AttributeField.TENSORS:
                    _check_tensor(_content(value))
                case AttributeField.SPARSE_TENSOR | AttributeField.SPARSE_TENSORS:
                    raise GraphError("a graph has no sparse constants, and this model has some")
                case _:
                    pass


def _check_tensor(tensor: memoryview) -> None:
    """Raise if a constant is in an external file, or declares more elements than its bytes hold."""
    most, elements, empty = _MOST_ELEMENTS_OF_A_BYTE * len(tensor), 1, False
    for number, value in fields(tensor):
        match number:
            case TensorField.SIZE:
                for size in integers(value):
                    empty |= size == 0
                    elements = min(elements * max(size, 1), most + 1)
            case TensorField.EXTERNAL_DATA:
                raise GraphError("a graph reads no files, and a constant of this model is in one")
            case TensorField.DATA_LOCATION if value:
                raise GraphError("a graph reads no files, and a constant of this model is in one")
            case _:
                pass
    if elements > most and not empty:
        raise GraphError(f"a constant is larger than its {len(tensor)} bytes")


def _check_value(value: memoryview) -> None:
    """Raise if a graph's input or output is not a tensor, for example a sequence of tensors."""
    for number, of in fields(value):
        if number == ValueField.TYPE:
            for kind, _ in fields(_content(of)):
                if kind not in (TypeField.TENSOR, TypeField.DENOTATION):
                    raise GraphError("inputs and outputs of a graph are arrays, and not all here")


def _check_domain(value: int | memoryview) -> None:
    if bytes(_content(value)[:_LONGEST_DOMAIN]) not in _DOMAINS:
        raise GraphError(
            f"a graph has operations of ONNX's default domain alone, and this model names "
            f"{_text(value)!r}"
        )


def _content(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise ProtobufError("an integer stands for a text or a message")
    return value


def _text(value: int | memoryview) -> str:
    """Return the first 60 bytes of a protobuf string as printable text."""
    return bytes(_content(value)[:60]).decode(errors="replace")
