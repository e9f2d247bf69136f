"""Graphs on a device: what it keeps for them, and how they are run. Orders are made by its core."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np

from cleave import arrays
from cleave.arrays import Array, DType
from cleave.machine.graph_session import GraphError, GraphSession
from cleave.machine.multiplication import StoredArray

NUMPY_DTYPES: Final = {"int64": np.dtype("<i8"), "bool": np.dtype("?")}
"""Elements that only graphs take, besides those of `DType`."""


@dataclass(slots=True, eq=False)
class StoredGraph:
    """A graph that a device was sent.

    Attributes:
        model: the ONNX model.
        session: what runs it, from its first run on.
    """

    model: bytes | memoryview
    nbytes: int
    session: GraphSession | None = None


@dataclass(slots=True, eq=False)
class StoredIndices:
    """An array of integers or truth values, which only graphs take."""

    payload: bytes | memoryview
    dtype: np.dtype[np.generic]
    nbytes: int


@dataclass(slots=True, eq=False)
class Kept:
    """An output of a graph, which stays on the device.

    Attributes:
        nbytes: its size, as the PS said.
        value: the array, once it was computed.
    """

    nbytes: int
    value: Array | None = None


@dataclass(slots=True, eq=False)
class Concatenated:
    """Rows of arrays, one after another: an array that is too long for one message.

    Attributes:
        parts: the arrays; none once they were put into one.
        rows, columns, dtype, nbytes: of all of them together.
    """

    parts: Sequence[StoredArray]
    rows: int
    columns: int
    dtype: DType
    nbytes: int
    _whole: arrays.Buffer | None = None

    def buffer(self) -> arrays.Buffer:
        """Return the elements, in one piece from the first time on."""
        if self._whole is None:
            whole = arrays.empty(self.rows, self.columns, self.dtype)
            first = 0
            for part in self.parts:
                whole.array[first : first + part.rows] = _buffer(part).array
                first += part.rows
            self._whole, self.parts = whole, ()
        return self._whole


GraphInput: TypeAlias = StoredArray | StoredIndices | Concatenated | Kept | None
"""None means zeros."""


@dataclass(slots=True)
class GraphRun:
    """An order to run a graph. It sets the values of its outputs: of all of them, or of none.

    Attributes:
        run: the run that it answers.
        graph: the graph.
        inputs, outputs: in the graph's order; None for an output that is not kept.
        flops: that it takes, as the PS says.
    """

    run: int
    graph: StoredGraph
    inputs: Sequence[GraphInput]
    outputs: Sequence[Kept | None]
    flops: int
    result_bytes: int = field(default=0, init=False)


@dataclass(slots=True)
class FetchRun:
    """An order to return rows of an array.

    Attributes:
        run: the run that it answers.
        array: the array; its last dimension is the columns.
        first_row, rows, columns: which part of it.
        out: the dtype of the result.
    """

    run: int
    array: StoredArray | Concatenated | Kept
    first_row: int
    rows: int
    columns: int
    out: DType
    flops: int = field(default=0, init=False)

    @property
    def result_bytes(self) -> int:
        """Return the size of the result in bytes."""
        return self.rows * self.columns * self.out.itemsize


MakeSession: TypeAlias = Callable[[bytes], GraphSession]


def run_graph(order: GraphRun, make_session: MakeSession = GraphSession) -> float:
    """Run a graph; return the seconds that it took.

    Raises:
        GraphError: when it cannot be run, or its outputs are not as large as was said.
    """
    if order.graph.session is None:  # the time that this takes is spent once
        order.graph.session = make_session(bytes(order.graph.model))
    session = order.graph.session
    if len(order.inputs) != len(session.inputs) or len(order.outputs) != len(session.outputs):
        raise GraphError(
            f"the graph has {len(session.inputs)} inputs and {len(session.outputs)} outputs, not "
            f"{len(order.inputs)} and {len(order.outputs)}"
        )
    began_s = time.perf_counter()
    feed = {
        name: _shaped(name, shape, given)
        for (name, shape), given in zip(session.inputs.items(), order.inputs, strict=True)
    }
    outputs = zip(order.outputs, session.outputs, strict=True)
    wanted = {name: kept for kept, name in outputs if kept is not None}
    found = session.run(feed, list(wanted))
    for name, kept in wanted.items():
        if found[name].nbytes != kept.nbytes:
            raise GraphError(
                f"an output has {found[name].nbytes} bytes, not {kept.nbytes} as was said"
            )
    for name, kept in wanted.items():
        kept.value = found[name]
    return time.perf_counter() - began_s


def fetch(order: FetchRun) -> memoryview:
    """Return rows of an array, rounded to the dtype that is asked for.

    Raises:
        GraphError: when the array is not there, or has other rows or columns.
    """
    value = _value(order.array)
    rows = value.reshape(-1, order.columns) if value.size % order.columns == 0 else None
    if rows is None or value.dtype != np.float32 or order.first_row + order.rows > len(rows):
        raise GraphError(
            f"an array of shape {value.shape} has no rows {order.first_row} to "
            f"{order.first_row + order.rows} of {order.columns} columns"
        )
    part = rows[order.first_row : order.first_row + order.rows]
    return arrays.Buffer(arrays.narrow(part, order.out), order.out).pack()


def _value(given: StoredArray | StoredIndices | Concatenated | Kept) -> Array:
    """Return an array as graphs take it: floating-point numbers as fp32."""
    if isinstance(given, Kept):
        if given.value is None:
            raise GraphError("an array is not here: what was to compute it failed")
        return given.value
    if isinstance(given, StoredIndices):
        return np.frombuffer(given.payload, given.dtype)
    if isinstance(given, Concatenated):
        return given.buffer().float32()
    return _buffer(given).float32()


def _buffer(given: StoredArray) -> arrays.Buffer:
    if isinstance(given.payload, arrays.Buffer):  # it never left this process
        return given.payload
    return arrays.unpack(given.payload, given.rows, given.columns, given.dtype)


def _shaped(name: str, shape: Sequence[int | str], given: GraphInput) -> Array:
    """Return an input in the graph's shape, whose sizes that are not fixed follow from its own."""
    free = [size for size in shape if not isinstance(size, int)]
    if given is None:
        if free:
            raise GraphError(f"the input {name} cannot be zeros: its shape is {list(shape)}")
        return np.zeros([int(size) for size in shape], np.float32)
    value = _value(given)
    try:
        return value.reshape([size if isinstance(size, int) else -1 for size in shape])
    except ValueError:
        raise GraphError(
            f"the input {name} has the shape {list(shape)}, and {value.size} elements came"
        ) from None
