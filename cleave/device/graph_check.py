"""Check a graph's bytes before ONNX Runtime reads them (docs/protocol.md, *Which graphs*)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cleave.machine import onnx_graph as onnx
from cleave.machine.graph_session import GraphError
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


_LONGEST_DOMAIN: Final = 8  # prefix length that distinguishes `_DOMAINS` from other domains


_MOST_ELEMENTS_OF_A_BYTE: Final = 2  # 4-bit types store 2 elements in a byte


def check_graph(model: bytes | memoryview) -> None:
    """Check that a model is a valid graph as defined in docs/protocol.md (section *Graphs*).

    The check takes time proportional to the model's length, and no extra memory.

    Raises:
        GraphError: if the data is not an ONNX model, or the model contains a forbidden element.
    """
    try:
        _Check().model(memoryview(model))
    except onnx.ProtobufError as error:
        raise GraphError(f"not an ONNX model: {error}") from None


@dataclass(slots=True)
class _Check:
    """Checks one model. Protobuf merges repeated fields, so every occurrence is checked."""

    nodes: int = 0

    def model(self, model: memoryview) -> None:
        graphs = 0
        for number, value in onnx.fields(model):
            match number:
                case onnx.ModelField.GRAPH:
                    graphs += 1
                    self.graph(_content(value), 1)
                case onnx.ModelField.OPSET:
                    for part, domain in onnx.fields(_content(value)):
                        if part == onnx.OpsetField.DOMAIN:
                            _check_domain(domain)
                case onnx.ModelField.FUNCTION:
                    raise GraphError("this model contains functions, which are not allowed")
                case onnx.ModelField.TRAINING:
                    raise GraphError(
                        "this model contains training information, which is not allowed"
                    )
        if not graphs:
            raise GraphError("not an ONNX model: it contains no graph")

    def graph(self, graph: memoryview, depth: int) -> None:
        if depth > limits.MAX_GRAPH_DEPTH:
            raise GraphError(f"graphs are nested more than {limits.MAX_GRAPH_DEPTH} deep")
        for number, value in onnx.fields(graph):
            match number:
                case onnx.GraphField.NODE:
                    self.node(_content(value), depth)
                case onnx.GraphField.CONSTANT:
                    _check_tensor(_content(value))
                case onnx.GraphField.SPARSE_CONSTANT:
                    raise GraphError("this model contains sparse constants, which are not allowed")
                case onnx.GraphField.INPUT | onnx.GraphField.OUTPUT:
                    _check_value(_content(value))

    def node(self, node: memoryview, depth: int) -> None:
        self.nodes += 1
        if self.nodes > limits.MAX_GRAPH_NODES:
            raise GraphError(f"this model has more than {limits.MAX_GRAPH_NODES} operations")
        for number, value in onnx.fields(node):
            match number:
                case onnx.NodeField.OPERATION:
                    operation = _text(value)
                    if operation in REFUSED_OPERATIONS:
                        raise GraphError(f"this model contains the forbidden operation {operation}")
                case onnx.NodeField.DOMAIN:
                    _check_domain(value)
                case onnx.NodeField.ATTRIBUTE:
                    self.attribute(_content(value), depth)

    def attribute(self, attribute: memoryview, depth: int) -> None:
        for number, value in onnx.fields(attribute):
            match number:
                case onnx.AttributeField.GRAPH | onnx.AttributeField.GRAPHS:
                    self.graph(_content(value), depth + 1)
                case onnx.AttributeField.TENSOR | onnx.AttributeField.TENSORS:
                    _check_tensor(_content(value))
                case onnx.AttributeField.SPARSE_TENSOR | onnx.AttributeField.SPARSE_TENSORS:
                    raise GraphError("this model contains sparse constants, which are not allowed")


def _check_tensor(tensor: memoryview) -> None:
    """Raise GraphError if a constant is in another file or has too few bytes for its shape."""
    most, elements, empty = _MOST_ELEMENTS_OF_A_BYTE * len(tensor), 1, False
    for number, value in onnx.fields(tensor):
        match number:
            case onnx.TensorField.SIZE:
                for size in onnx.integers(value):
                    empty |= size == 0
                    elements = min(elements * max(size, 1), most + 1)
            case onnx.TensorField.EXTERNAL_DATA:
                raise GraphError(
                    "a constant of this model is in another file, which is not allowed"
                )
            case onnx.TensorField.DATA_LOCATION if value:
                raise GraphError(
                    "a constant of this model is in another file, which is not allowed"
                )
    if elements > most and not empty:
        raise GraphError(f"a constant's shape is larger than its {len(tensor)} bytes")


def _check_value(value: memoryview) -> None:
    """Raise GraphError if a graph input or output is not a tensor, for example a sequence."""
    for number, of in onnx.fields(value):
        if number == onnx.ValueField.TYPE:
            for kind, _ in onnx.fields(_content(of)):
                if kind not in (onnx.TypeField.TENSOR, onnx.TypeField.DENOTATION):
                    raise GraphError("an input or output of this model is not a tensor")


def _check_domain(value: int | memoryview) -> None:
    if bytes(_content(value)[:_LONGEST_DOMAIN]) not in _DOMAINS:
        raise GraphError(
            "only operations of ONNX's default domain are allowed, but this model names "
            f"{_text(value)!r}"
        )


def _content(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise onnx.ProtobufError("a field contains an integer instead of a string or message")
    return value


def _text(value: int | memoryview) -> str:
    """Return the first 60 bytes of a protobuf string as printable text."""
    return bytes(_content(value)[:60]).decode(errors="replace")
