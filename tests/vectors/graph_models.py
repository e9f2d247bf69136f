"""Models that a device takes for graphs, and models that it refuses before it runs them."""

from __future__ import annotations

from typing import Any

import numpy as np

from cleave.machine.onnx_graph import (
    ArrayType,
    AttributeField,
    GraphField,
    ModelField,
    Node,
    NodeField,
    OpsetField,
    TensorField,
    TypeField,
    ValueField,
    content,
    integer,
    written,
)
from cleave.protocol import limits

_FLOAT = 1  # ONNX's number of the type


def graph_vectors() -> list[dict[str, Any]]:
    """The vectors of `graphs.json`."""
    return [
        {
            "name": name,
            "feature": "graphs",
            "about": about,
            "is_graph": good,
            "model": hex_of(model),
        }
        for good, models in ((True, _graphs()), (False, _others()))
        for name, about, model in models
    ]


def hex_of(model: bytes) -> Any:
    """Bytes as vectors write them: equal operations at the end are one of them, repeated."""
    last = _node("Neg")
    times = 0
    while model.endswith(last * (times + 1)):
        times += 1
    if times < 2:
        return model.hex()
    return [model[: -times * len(last)].hex(), {"hex": last.hex(), "times": times}]


def _adding() -> bytes:
    """y = x + w for x with any number of rows."""
    wide = ArrayType(["batch", 3])
    return written([Node("Add", ["x", "w"], ["y"])], {"x": wide, "w": ArrayType([3])}, {"y": wide})


def _bytes() -> bytes:
    """y = x as fp32 and z = x, of uint8 with any number of rows."""
    x = ArrayType(["batch", 4], "uint8")
    nodes = [Node("Cast", ["x"], ["y"], {"to": _FLOAT}), Node("Identity", ["x"], ["z"])]
    return written(nodes, {"x": x}, {"y": ArrayType(["batch", 4]), "z": x})


def _node(operation: str, *more: bytes) -> bytes:
    return content(
        GraphField.NODE,
        content(NodeField.INPUT, "x"),
        content(NodeField.OUTPUT, "z"),
        content(NodeField.OPERATION, operation),
        *more,
    )


def _attribute(name: str, held: bytes) -> bytes:
    return content(NodeField.ATTRIBUTE, content(AttributeField.NAME, name) + held)


def _with(*more: bytes) -> bytes:
    """The model with more in its graph: protobuf puts fields that come again together."""
    return _adding() + content(ModelField.GRAPH, *more)


def _inside(depth: int) -> bytes:
    """A node in which graphs stand, so deep that the model's is the outermost of `depth`."""
    node = _node("Neg")
    for _ in range(depth - 1):
        held = content(AttributeField.GRAPH, node)
        node = _node("If", _attribute("then_branch", held), _attribute("else_branch", held))
    return node


def _tensor(*more: bytes) -> bytes:
    return b"".join((integer(TensorField.TYPE, 1), content(TensorField.NAME, "c"), *more))


def _graphs() -> list[tuple[str, str, bytes]]:
    one = content(TensorField.BYTES, bytes(12))
    return [
        ("adding", "y = x + w", _adding()),
        ("bytes", "y = x as fp32 and z = x, of uint8", _bytes()),
        ("constants", "an input that is a constant", written(
            [Node("Add", ["x", "w"], ["y"])], {"x": ArrayType([2, 3])}, {"y": ArrayType([2, 3])},
            {"w": np.arange(3, dtype="<f4")})),
        ("empty-constant", "of no elements",
         _with(content(GraphField.CONSTANT, _tensor(integer(1, 0), integer(1, 2**40))))),
        ("packed-sizes", "sizes of a constant in one field",
         _with(content(GraphField.CONSTANT, _tensor(content(1, b"\x01\x03"), one)))),
        ("domain-by-its-name", "ai.onnx is the default domain",
         _with(_node("Neg", content(NodeField.DOMAIN, "ai.onnx")))),
        ("graphs-inside", "4 in each other", _with(_inside(limits.MAX_GRAPH_DEPTH))),
        ("many-operations", "4096",
         _with(*[_node("Neg")] * (limits.MAX_GRAPH_NODES - 1))),
        ("unknown-field", "of a later ONNX", _adding() + integer(500, 1)),
    ]  # fmt: skip


def _others() -> list[tuple[str, str, bytes]]:
    domain = content(NodeField.DOMAIN, "com.microsoft")
    outside = content(TensorField.EXTERNAL_DATA, content(1, "location") + content(2, "/etc/passwd"))
    hidden = content(AttributeField.GRAPH, _node("Gelu", domain))
    external = _attribute("value", content(AttributeField.TENSOR, _tensor(outside)))
    sequence = content(ValueField.TYPE, content(TypeField.SEQUENCE, b""))
    return [
        ("nothing", "no bytes, and so no graph", b""),
        ("no-graph", "a version alone", integer(ModelField.IR_VERSION, 10)),
        ("cut-off", "its last byte is missing", _adding()[:-1]),
        ("group", "a kind of field that ONNX does not use", _adding() + b"\x0b\x0c"),
        ("other-domain", "com.microsoft", _with(_node("Gelu", domain))),
        ("other-domain-inside", "in a branch", _with(_node("If", _attribute("then_branch",
         hidden)))),
        ("other-domain-first", "a domain that comes twice",
         _with(_node("Gelu", domain, content(NodeField.DOMAIN, "")))),
        ("other-domain-imported", "ai.onnx.ml, which nothing uses", _adding() + content(
         ModelField.OPSET, content(OpsetField.DOMAIN, "ai.onnx.ml"),
         integer(OpsetField.VERSION, 3))),
        ("function", "of its own", _adding() + content(ModelField.FUNCTION, content(1, "Own"))),
        ("training", "how it is trained", _adding() + content(ModelField.TRAINING, b"")),
        ("file", "a constant in a file", _with(content(GraphField.CONSTANT, _tensor(outside)))),
        ("file-of-no-name", "data_location alone", _with(content(GraphField.CONSTANT,
         _tensor(integer(TensorField.DATA_LOCATION, 1))))),
        ("file-of-an-operation", "the value of a Constant", _with(_node("Constant", external))),
        ("sparse-constant", "one of them", _with(content(GraphField.SPARSE_CONSTANT, b""))),
        ("sparse-value", "of a Constant", _with(_node("Constant", _attribute("sparse_value",
         content(AttributeField.SPARSE_TENSOR, b""))))),
        ("constant-too-large", "2**40 elements in no bytes", _with(content(GraphField.CONSTANT,
         _tensor(integer(TensorField.SIZE, 2**40))))),
        ("constant-of-negative-size", "-1", _with(content(GraphField.CONSTANT,
         _tensor(integer(TensorField.SIZE, -1))))),
        ("list-as-input", "no array", _with(content(GraphField.INPUT, content(ValueField.NAME,
         "many"), sequence))),
        *((f"operation-{name}", "is refused", _with(_node(name)))
          for name in ("Loop", "Dropout", "Bernoulli", "Multinomial", "RandomNormal",
                       "RandomNormalLike", "RandomUniform", "RandomUniformLike")),
        ("graphs-too-deep", "5 in each other", _with(_inside(limits.MAX_GRAPH_DEPTH + 1))),
        ("too-many-operations", "4097",
         _with(*[_node("Neg")] * limits.MAX_GRAPH_NODES)),
    ]  # fmt: skip
