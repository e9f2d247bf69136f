"""Serializes small ONNX models without the `onnx` package, which devices do not have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from cleave.machine.onnx_fields import (
    AttributeField,
    GraphField,
    ModelField,
    NodeField,
    OpsetField,
    ShapeField,
    SizeField,
    TensorField,
    TensorTypeField,
    TypeField,
    ValueField,
)
from cleave.machine.protobuf import content, integer

Array: TypeAlias = npt.NDArray[Any]

_IR_VERSION: Final = 10
_OPSET: Final = 20
_ELEMENTS: Final = {"float32": 1, "uint8": 2, "int64": 7, "bool": 9}  # codes of element types
_INTEGER, _TEXT = 2, 3  # ONNX's codes of attribute types


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a graph, which applies an operation of ONNX's default domain.

    Attributes:
        operation: operation type, such as `MatMul`.
        inputs, outputs: names of the input and output arrays, in order.
        attributes: maps the names of attributes to integers or texts.
    """

    operation: str
    inputs: Sequence[str]
    outputs: Sequence[str]
    attributes: Mapping[str, int | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ArrayType:
    """The type of a graph input or output.

    Attributes:
        shape: shape of the array; a dynamic size is a name.
        dtype: element type: `float32`, `uint8`, `int64` or `bool`.
    """

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
        nodes: nodes of the graph. A node must follow the nodes that compute its inputs.
        inputs, outputs: map the names of the graph's inputs and outputs to types, in order.
        constants: maps the names of constants to little-endian arrays; None for no constants.
    """
    graph = (
        *(content(GraphField.NODE, _node(node)) for node in nodes),
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


def _node(node: Node) -> bytes:
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
