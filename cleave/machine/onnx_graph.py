"""Reads and writes ONNX models without the `onnx` package, which devices do not have.

A protobuf message is a sequence of fields. A field consists of a number and a value, which is an
integer or bytes. Only the schema tells whether bytes are raw bytes, a string or a nested message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, TypeAlias

import numpy as np

from cleave.arrays import Array

Field: TypeAlias = tuple[int, int | memoryview]  # number and value; fixed-length values are bytes

_VARINT: Final = 0
_BYTES: Final = 2
_FIXED: Final = {1: 8, 5: 4}  # size in bytes of each fixed-length wire type
_LONGEST_VARINT: Final = 10  # bytes in the encoding of a 64-bit integer
_WORD: Final = 2**64
_LARGEST_NUMBER: Final = 2**29 - 1  # readers disagree about larger field numbers


class ProtobufError(ValueError):
    """The bytes are not a valid protobuf message."""


def fields(message: memoryview) -> Iterator[Field]:
    """Yield a message's fields in order, with bytes as memoryviews, or raise ProtobufError."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, wire = key >> 3, key & 7
        if not 0 < number <= _LARGEST_NUMBER:
            raise ProtobufError(f"a field at byte {at} has the number {number}")
        if wire == _VARINT:
            value, at = _varint(message, at)
            yield number, value
            continue
        if wire == _BYTES:
            length, at = _varint(message, at)
        elif wire in _FIXED:
            length = _FIXED[wire]
        else:
            raise ProtobufError(f"field {number} at byte {at} is of an unknown kind, {wire}")
        if length > len(message) - at:
            raise ProtobufError(f"field {number} at byte {at} runs past the end of its message")
        yield number, message[at : at + length]
        at += length


def integers(value: int | memoryview) -> Iterator[int]:
    """Yield the unsigned integers of a repeated field: one integer, or a packed list in bytes."""
    if isinstance(value, int):
        yield value
        return
    at = 0
    while at < len(value):
        found, at = _varint(value, at)
        yield found


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """Return the unsigned 64-bit varint at index `at`, and the index after its last byte."""
    if at < len(message) and (first := message[at]) < 0x80:  # the most frequent case
        return first, at + 1
    found = 0
    for place, byte in enumerate(message[at : at + _LONGEST_VARINT]):
        found |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return found % _WORD, at + place + 1
    raise ProtobufError(f"an integer at byte {at} does not end")


def integer(number: int, value: int) -> bytes:
    """Encode an integer field, whose value is from -2^63 to 2^64 - 1."""
    return _written(number << 3 | _VARINT) + _written(value % _WORD)


def content(number: int, *parts: bytes | str) -> bytes:
    """Encode a string, bytes or message field, whose value is the concatenation of `parts`."""
    held = b"".join(part.encode() if isinstance(part, str) else part for part in parts)
    return _written(number << 3 | _BYTES) + _written(len(held)) + held


def _written(value: int) -> bytes:
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


class ModelField(IntEnum):  # fields of ModelProto
    IR_VERSION = 1
    GRAPH = 7
    OPSET = 8
    TRAINING = 20
    FUNCTION = 25


class OpsetField(IntEnum):  # fields of OperatorSetIdProto
    DOMAIN = 1
    VERSION = 2


class GraphField(IntEnum):  # fields of GraphProto
    NODE = 1
    NAME = 2
    CONSTANT = 5
    INPUT = 11
    OUTPUT = 12
    SPARSE_CONSTANT = 15


class NodeField(IntEnum):  # fields of NodeProto
    INPUT = 1
    OUTPUT = 2
    OPERATION = 4
    ATTRIBUTE = 5
    DOMAIN = 7


class AttributeField(IntEnum):  # fields of AttributeProto
    NAME = 1
    INTEGER = 3
    TEXT = 4
    TENSOR = 5
    GRAPH = 6
    INTEGERS = 8
    TENSORS = 10
    GRAPHS = 11
    TYPE = 20
    SPARSE_TENSOR = 22
    SPARSE_TENSORS = 23


class TensorField(IntEnum):  # fields of TensorProto
    SIZE = 1
    TYPE = 2
    INT32 = 5
    INT64 = 7
    NAME = 8
    BYTES = 9
    EXTERNAL_DATA = 13
    DATA_LOCATION = 14


class ValueField(IntEnum):  # fields of ValueInfoProto
    NAME = 1
    TYPE = 2


class TypeField(IntEnum):  # fields of TypeProto
    TENSOR = 1
    SEQUENCE = 4
    DENOTATION = 6


class TensorTypeField(IntEnum):  # fields of TypeProto.Tensor
    ELEMENT = 1
    SHAPE = 2


class ShapeField(IntEnum):  # fields of TensorShapeProto
    SIZE = 1


class SizeField(IntEnum):  # fields of TensorShapeProto.Dimension
    NUMBER = 1
    NAME = 2


Bytes = bytes | memoryview


@dataclass(slots=True)
class OnnxNode:
    """A node of a graph. `enclosed` contains the names of all arrays that its subgraphs use."""

    message: memoryview
    operation: str = ""
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    enclosed: set[str] = field(default_factory=set)


@dataclass(slots=True)
class OnnxGraph:
    """A model's graph, with serialized descriptions of inputs (without constants) and outputs."""

    opset: int
    inputs: dict[str, memoryview]
    outputs: dict[str, memoryview]
    nodes: Sequence[OnnxNode]

    def uses(self, name: str) -> int:
        """Return how many times nodes use an array, plus one if the array is a graph output."""
        return sum(node.inputs.count(name) + (name in node.enclosed) for node in self.nodes) + (
            name in self.outputs
        )


def read_graph(model: Bytes) -> OnnxGraph:
    """Parse the graph of a model that passed `check_graph`; raise ProtobufError if invalid."""
    opset, inputs, outputs, constants, nodes = 0, {}, {}, set(), []
    for number, value in parts(model):
        if number == ModelField.OPSET:
            versions = [v for n, v in fields(value) if n == OpsetField.VERSION]
            opset = max([opset, *(v for v in versions if isinstance(v, int))])
        elif number == ModelField.GRAPH:
            for part, held in parts(value):
                match part:
                    case GraphField.INPUT:
                        inputs[name_in(held, ValueField.NAME)] = held
                    case GraphField.OUTPUT:
                        outputs[name_in(held, ValueField.NAME)] = held
                    case GraphField.CONSTANT:
                        constants.add(name_in(held, TensorField.NAME))
                    case GraphField.NODE:
                        nodes.append(_node(held))
    inputs = {name: held for name, held in inputs.items() if name not in constants}
    return OnnxGraph(opset, inputs, outputs, nodes)


def _node(message: memoryview) -> OnnxNode:
    node = OnnxNode(message)
    for number, value in parts(message):
        match number:
            case NodeField.INPUT:
                node.inputs.append(text(value))
            case NodeField.OUTPUT:
                node.outputs.append(text(value))
            case NodeField.OPERATION:
                node.operation = text(value)
            case NodeField.ATTRIBUTE:
                for part, held in parts(value):
                    if part in (AttributeField.GRAPH, AttributeField.GRAPHS):
                        node.enclosed |= _enclosed(held)
    return node


def _enclosed(graph: memoryview) -> set[str]:
    """Return the names of all arrays that a subgraph uses."""
    found = set()
    for number, value in parts(graph):
        if number == GraphField.NODE:
            node = _node(value)
            found |= {*node.inputs, *node.enclosed}
        elif number == GraphField.OUTPUT:
            found.add(name_in(value, ValueField.NAME))
    return found


def name_in(message: memoryview, number: int) -> str:
    """Return the last value of a message's string field `number`, or "" if it is missing."""
    found = [text(value) for part, value in parts(message) if part == number]
    return found[-1] if found else ""


def text(value: memoryview) -> str:
    """Decode the bytes of a string field as UTF-8. Invalid bytes become surrogates."""
    return str(value, "utf-8", "surrogateescape")


def parts(message: Bytes) -> Iterator[tuple[int, memoryview]]:
    """Yield the number and bytes of each field whose value is not an integer."""
    return ((n, v) for n, v in fields(memoryview(message)) if not isinstance(v, int))


_IR_VERSION: Final = 10
_OPSET: Final = 20
_ELEMENTS: Final = {"float32": 1, "uint8": 2, "int64": 7, "bool": 9}  # codes of element types
_INTEGER, _TEXT = 2, 3  # ONNX's codes of attribute types


@dataclass(frozen=True, slots=True)
class Node:
    """A graph node whose operation is in ONNX's default domain, such as `MatMul`."""

    operation: str
    inputs: Sequence[str]
    outputs: Sequence[str]
    attributes: Mapping[str, int | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ArrayType:
    """The type of a graph input or output. In `shape`, a string names a dynamic dimension."""

    shape: Sequence[int | str]
    dtype: str = "float32"


def written(
    nodes: Sequence[Node],
    inputs: Mapping[str, ArrayType],
    outputs: Mapping[str, ArrayType],
    constants: Mapping[str, Array] | None = None,
) -> bytes:
    """Return a serialized ONNX model.

    Args:
        nodes: nodes in topological order.
        inputs, outputs: map the names of the graph's inputs and outputs to types, in order.
        constants: maps the names of constants to little-endian arrays; None if the graph has no
            constants.
    """
    graph = (
        *(content(GraphField.NODE, written_node(node)) for node in nodes),
        content(GraphField.NAME, "graph"),
        *(content(GraphField.CONSTANT, _tensor(n, a)) for n, a in (constants or {}).items()),
        *(content(GraphField.INPUT, _value(name, of)) for name, of in inputs.items()),
        *(content(GraphField.OUTPUT, _value(name, of)) for name, of in outputs.items()),
    )
    return (
        integer(ModelField.IR_VERSION, _IR_VERSION)
        + content(ModelField.GRAPH, *graph)
        + content(ModelField.OPSET, integer(OpsetField.VERSION, _OPSET))
    )


def written_node(node: Node) -> bytes:
    """Return a node as a serialized ONNX `NodeProto`."""
    return b"".join(
        (
            *(content(NodeField.INPUT, name) for name in node.inputs),
            *(content(NodeField.OUTPUT, name) for name in node.outputs),
            content(NodeField.OPERATION, node.operation),
            *(content(NodeField.ATTRIBUTE, _attribute(*a)) for a in node.attributes.items()),
        )
    )


def _attribute(name: str, value: int | str) -> bytes:
    if isinstance(value, int):
        held, kind = integer(AttributeField.INTEGER, value), _INTEGER
    else:
        held, kind = content(AttributeField.TEXT, value), _TEXT
    return content(AttributeField.NAME, name) + held + integer(AttributeField.TYPE, kind)


def _tensor(name: str, array: Array) -> bytes:
    return b"".join(
        (
            *(integer(TensorField.SIZE, size) for size in array.shape),
            integer(TensorField.TYPE, _ELEMENTS[array.dtype.name]),
            content(TensorField.NAME, name),
            content(TensorField.BYTES, np.ascontiguousarray(array).tobytes()),
        )
    )


def _value(name: str, of: ArrayType) -> bytes:
    sizes = (
        integer(SizeField.NUMBER, size) if isinstance(size, int) else content(SizeField.NAME, size)
        for size in of.shape
    )
    shape = content(TensorTypeField.SHAPE, *(content(ShapeField.SIZE, size) for size in sizes))
    tensor = content(TypeField.TENSOR, integer(TensorTypeField.ELEMENT, _ELEMENTS[of.dtype]), shape)
    return content(ValueField.NAME, name) + content(ValueField.TYPE, tensor)
