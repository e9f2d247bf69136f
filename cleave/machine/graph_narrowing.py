"""Rewrite graphs to accept 16-bit inputs and upcast them at each use, to save memory.

A graph computes in fp32. Upcasting all 16-bit parameters before a run would triple the parameters'
memory. In a rewritten graph each use has its own `Cast`, so a matrix exists in fp32 only during one
matrix multiplication.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from cleave.arrays import DType
from cleave.machine import onnx_graph as onnx
from cleave.machine.graph_session import ONNX_ELEMENTS

_FLOAT: Final = 1
_FIRST_OPSET: Final = 13  # first operator set in which `Cast` supports bf16
_PREFIX: Final = "narrowed"


def narrowed(model: bytes, given: Sequence[DType | None]) -> bytes:
    """Return an equivalent model that accepts 16-bit inputs where `given` has a 16-bit dtype.

    Inputs with a dynamic shape stay fp32. They are activations, whose dtype may vary between runs.

    Args:
        given: dtype of the array for each input, in order; None for other element types.

    Raises:
        ProtobufError: if `model` is not a serialized ONNX model.
    """
    if not any(dtype in ONNX_ELEMENTS for dtype in given):
        return model
    graph = onnx.read_graph(model)
    if graph.opset < _FIRST_OPSET or len(given) != len(graph.inputs):
        return model
    dtypes = {
        name: dtype
        for (name, value), dtype in zip(graph.inputs.items(), given, strict=True)
        if dtype in ONNX_ELEMENTS and _is_fixed_float(value) and _is_plain(graph, name)
    }
    return _Narrowing(graph, dtypes).written(model) if dtypes else model


class _Narrowing:
    """Rewrites a graph to accept the 16-bit inputs in `dtypes`.

    The rewritten graph lists all casts first. ONNX Runtime computes an operation's inputs in
    reverse order of their listing. So each cast runs right before the operation that uses it.
    """

    def __init__(self, graph: onnx.OnnxGraph, dtypes: dict[str, DType]) -> None:
        self._dtypes = dtypes
        # A transposed parameter is upcast only where it is used, like the parameter itself. This
        # maps the array's name to the parameter's name and the `Transpose` nodes to repeat.
        self._turned: dict[str, tuple[str, list[onnx.OnnxNode]]] = {n: (n, []) for n in dtypes}
        self._made = 0
        self._first: list[bytes] = []
        self._rest: list[bytes] = []
        for node in graph.nodes:
            if node.operation == "Transpose" and node.inputs[0] in self._turned:
                (output,) = node.outputs
                if _is_plain(graph, output):
                    name, turns = self._turned[node.inputs[0]]
                    self._turned[output] = name, [*turns, node]
                    continue
            inputs = [self._widened(name) for name in node.inputs]
            self._rest.append(_renamed(node, inputs, node.outputs))

    def written(self, model: bytes) -> bytes:
        """Return the serialized model with the rewritten graph in place of the original graph."""
        nodes = [onnx.content(onnx.GraphField.NODE, node) for node in (*self._first, *self._rest)]
        others, rest = [], []
        for number, value in onnx.fields(memoryview(model)):
            if number != onnx.ModelField.GRAPH:
                rest.append(_field(number, value))
                continue
            assert isinstance(value, memoryview)
            for part, held in onnx.fields(value):
                if part == onnx.GraphField.INPUT:
                    assert isinstance(held, memoryview)
                    others.append(onnx.content(part, self._input(held)))
                elif part != onnx.GraphField.NODE:
                    others.append(_field(part, held))
        return b"".join((*rest, onnx.content(onnx.ModelField.GRAPH, *nodes, *others)))

    def _widened(self, name: str) -> str:
        """Add a cast if `name` is a 16-bit parameter. Return the result's name, or else `name`."""
        if name not in self._turned:
            return name
        parameter, turns = self._turned[name]
        at = self._next()
        self._first.append(onnx.written_node(onnx.Node("Cast", [parameter], [at], {"to": _FLOAT})))
        for turn in turns:
            before, at = at, self._next()
            self._first.append(_renamed(turn, [before], [at]))
        return at

    def _next(self) -> str:
        self._made += 1
        return f"{_PREFIX}/{self._made}"

    def _input(self, value: memoryview) -> bytes:
        """Return an input's serialized description, with the element type of 16-bit inputs set."""
        parts = list(onnx.fields(value))
        name = "".join(str(v, "utf-8") for n, v in parts if n == onnx.ValueField.NAME)  # type: ignore[arg-type]
        if name not in self._dtypes:
            return bytes(value)
        element = onnx.integer(onnx.TensorTypeField.ELEMENT, ONNX_ELEMENTS[self._dtypes[name]])
        # In protobuf the last value of a field applies, so append the new element type.
        more = onnx.content(onnx.ValueField.TYPE, onnx.content(onnx.TypeField.TENSOR, element))
        return bytes(value) + more


def _is_plain(graph: onnx.OnnxGraph, name: str) -> bool:
    """Return True if an array is neither an output of the graph nor used in a subgraph."""
    return name not in graph.outputs and all(name not in node.enclosed for node in graph.nodes)


def _is_fixed_float(value: memoryview) -> bool:
    """Return True if a graph input is fp32 and its shape has no dynamic dimension."""
    shapes = 0
    for number, held in _inside(value, onnx.ValueField.TYPE, onnx.TypeField.TENSOR):
        if number == onnx.TensorTypeField.ELEMENT and held != _FLOAT:
            return False
        if number == onnx.TensorTypeField.SHAPE and isinstance(held, memoryview):
            shapes += 1
            for part, size in onnx.fields(held):
                sizes = onnx.fields(size) if isinstance(size, memoryview) else ()
                fixed = [n for n, _ in sizes] == [onnx.SizeField.NUMBER]
                if part == onnx.ShapeField.SIZE and not fixed:
                    return False
    return shapes == 1


def _inside(message: memoryview, *path: int) -> list[tuple[int, int | memoryview]]:
    """Return the fields of all nested messages at a path of field numbers."""
    found = list(onnx.fields(message))
    for number in path:
        found = [
            inner
            for part, value in found
            if part == number and isinstance(value, memoryview)
            for inner in onnx.fields(value)
        ]
    return found


def _renamed(node: onnx.OnnxNode, inputs: Sequence[str], outputs: Sequence[str]) -> bytes:
    """Serialize a node with new inputs and outputs, and without the node's name."""
    kept = (onnx.NodeField.OPERATION, onnx.NodeField.ATTRIBUTE, onnx.NodeField.DOMAIN)
    return b"".join(
        (
            *(onnx.content(onnx.NodeField.INPUT, name) for name in inputs),
            *(onnx.content(onnx.NodeField.OUTPUT, name) for name in outputs),
            *(_field(number, v) for number, v in onnx.fields(node.message) if number in kept),
        )
    )


def _field(number: int, value: int | memoryview) -> bytes:
    """Serialize a parsed field. The messages rewritten here have no fixed-length fields."""
    return (
        onnx.integer(number, value)
        if isinstance(value, int)
        else onnx.content(number, bytes(value))
    )
