"""Field numbers of ONNX's protobuf messages, for the fields that Cleave reads or writes."""

from __future__ import annotations

from enum import IntEnum


class ModelField(IntEnum):
    """Fields of `ModelProto`."""

    IR_VERSION = 1
    GRAPH = 7
    OPSET = 8
    TRAINING = 20
    FUNCTION = 25


class OpsetField(IntEnum):
    """Fields of `OperatorSetIdProto`."""

    DOMAIN = 1
    VERSION = 2


class GraphField(IntEnum):
    """Fields of `GraphProto`."""

    NODE = 1
    NAME = 2
    CONSTANT = 5
    INPUT = 11
    OUTPUT = 12
    SPARSE_CONSTANT = 15


class NodeField(IntEnum):
    """Fields of `NodeProto`."""

    INPUT = 1
    OUTPUT = 2
    OPERATION = 4
    ATTRIBUTE = 5
    DOMAIN = 7


class AttributeField(IntEnum):
    """Fields of `AttributeProto`."""

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


class TensorField(IntEnum):
    """Fields of `TensorProto`."""

    SIZE = 1
    TYPE = 2
    INT32 = 5
    INT64 = 7
    NAME = 8
    BYTES = 9
    EXTERNAL_DATA = 13
    DATA_LOCATION = 14


class ValueField(IntEnum):
    """Fields of `ValueInfoProto`."""

    NAME = 1
    TYPE = 2


class TypeField(IntEnum):
    """Fields of `TypeProto`."""

    TENSOR = 1
    SEQUENCE = 4
    DENOTATION = 6


class TensorTypeField(IntEnum):
    """Fields of `TypeProto.Tensor`."""

    ELEMENT = 1
    SHAPE = 2


class ShapeField(IntEnum):
    """Fields of `TensorShapeProto`."""

    SIZE = 1


class SizeField(IntEnum):
    """Fields of `TensorShapeProto.Dimension`."""

    NUMBER = 1
    NAME = 2
