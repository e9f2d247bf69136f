"""Graphs on a device: what it stores for them, and how it runs them. `core` makes the orders."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final, TypeAlias

import numpy as np

from cleave import arrays
from cleave.arrays import Array, DType
from cleave.machine.graph_memory import GivenInput, GraphMemory
from cleave.machine.graph_narrowing import narrowed
from cleave.machine.graph_session import GraphError, GraphSession
from cleave.machine.multiplication import StoredArray

NUMPY_DTYPES: Final = {"int64": np.dtype("<i8"), "bool": np.dtype("?"), "uint8": np.dtype("u1")}
"""Element types that only graphs take, in addition to those of `DType`."""


@dataclass(slots=True, eq=False)
class StoredGraph:
    """A graph that a device received.

    Attributes:
        model: the ONNX model.
        memory: computes the working memory of its runs; set by the first run.
        session: runs the graph; set by the first run.
    """

    model: bytes | memoryview
    nbytes: int
    memory: GraphMemory | None = None
    session: GraphSession | None = None


@dataclass(slots=True, eq=False)
class StoredIndices:
    """An array of integers, booleans or quantized weights, which only graphs take."""

    payload: bytes | memoryview
    dtype: np.dtype[np.generic]
    nbytes: int


@dataclass(slots=True, eq=False)
class Kept:
    """An output of a graph that stays on the device.

    Attributes:
        nbytes: size, as the PS declared it.
        value: the array; None until it is computed.
        replaces: the output that this one replaces; None once it is computed.
        returned: whether a result is a view of the array's memory, which must not change any more.
    """

    nbytes: int
    value: Array | None = None
    replaces: Kept | None = None
    returned: bool = False


@dataclass(slots=True, eq=False)
class Concatenated:
    """An array in several parts by rows, because it is too long for one message.

    Attributes:
        parts: the arrays; empty once they are joined.
        rows, columns, dtype, nbytes: of the joined array.
    """

    parts: Sequence[StoredArray]
    rows: int
    columns: int
    dtype: DType
    nbytes: int
    _whole: arrays.Buffer | None = None

    def buffer(self) -> arrays.Buffer:
        """Return the joined elements; the first call joins them."""
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
    """An order to run a graph. A run sets the values of all its outputs, or of none.

    An output may reuse the memory of the output that it replaces, whose value is always discarded.

    Attributes:
        run: id of the run that this order answers.
        inputs, outputs: arrays in the graph's order; None for an output that is not kept.
        flops: the run's FLOPs, as the PS declared them.
        room: returns the working memory available when the run starts, in bytes.
    """

    run: int
    graph: StoredGraph
    inputs: Sequence[GraphInput]
    outputs: Sequence[Kept | None]
    flops: int
    room: Callable[[], float] = lambda: inf
    result_bytes: int = field(default=0, init=False)


@dataclass(slots=True)
class FetchRun:
    """An order to return rows of an array.

    Attributes:
        run: id of the run that this order answers.
        array: the array; its last dimension is the columns.
        first_row, rows, columns: the part to return.
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


MakeSession: TypeAlias = Callable[[bytes, Sequence[DType | None]], GraphSession]
"""Opens a session for a graph and its input dtypes; None for non-floating-point inputs."""


MakeMemory: TypeAlias = Callable[[bytes | memoryview], GraphMemory]
"""Reads a graph, and computes the working memory of its runs."""


def open_on_cpu(model: bytes, given: Sequence[DType | None]) -> GraphSession:
    """Open a session on the CPU."""
    return GraphSession(narrowed(model, given))


def run_graph(
    order: GraphRun,
    make_session: MakeSession = open_on_cpu,
    make_memory: MakeMemory = GraphMemory,
) -> float:
    """Run a graph and return the seconds that it took.

    Raises:
        GraphError: when the run fails, needs more memory than available, or an output does not have
            the declared size.
    """
    try:
        _refuse_too_large(order, make_memory)
        return _run_graph(order, make_session)
    finally:
        for kept in order.outputs:
            if kept is not None and kept.replaces is not None:
                kept.replaces.value = None
                kept.replaces = None


def _refuse_too_large(order: GraphRun, make_memory: MakeMemory) -> None:
    """Refuse a run that needs more than the available memory, before it allocates any."""
    if order.graph.memory is None:
        order.graph.memory = make_memory(order.graph.model)
    needed_bytes = order.graph.memory.peak_bytes(
        [_given(array) for array in order.inputs], [kept is not None for kept in order.outputs]
    )
    room_bytes = order.room()
    if needed_bytes > room_bytes:
        raise GraphError(
            f"the run works in {needed_bytes} bytes and {max(room_bytes, 0):.0f} are free: send "
            f"fewer rows, or drop arrays first"
        )


def _given(array: GraphInput) -> GivenInput:
    if array is None:
        return GivenInput(None)
    if isinstance(array, StoredArray | Concatenated):
        return GivenInput(array.rows * array.columns, array.dtype is not DType.FP32)
    return GivenInput(_value(array).size)


def _run_graph(order: GraphRun, make_session: MakeSession) -> float:
    session = _session(order, make_session)
    if len(order.inputs) != len(session.inputs) or len(order.outputs) != len(session.outputs):
        raise GraphError(
            f"the graph has {len(session.inputs)} inputs and {len(session.outputs)} outputs, not "
            f"{len(order.inputs)} and {len(order.outputs)}"
        )
    began_s = time.perf_counter()
    inputs = dict(zip(session.inputs, order.inputs, strict=True))
    feed = {
        name: _shaped(name, session.inputs[name], given, session.narrow.get(name))
        for name, given in inputs.items()
    }
    outputs = zip(session.outputs, order.outputs, strict=True)
    wanted = {name: kept for name, kept in outputs if kept is not None}
    into = {
        output: feed[session.in_place[output]]
        for output, kept in wanted.items()
        if output in session.in_place and _may_write(inputs[session.in_place[output]], kept)
    }
    if into or session.narrow:
        found = session.run_into(feed, into, list(wanted))
    else:
        found = session.run(feed, list(wanted))
    for name, kept in wanted.items():
        if found[name].nbytes != kept.nbytes:
            raise GraphError(
                f"an output has {found[name].nbytes} bytes, not {kept.nbytes} as was said"
            )
    for name, kept in wanted.items():
        kept.value = found[name]
    return time.perf_counter() - began_s


def _session(order: GraphRun, make_session: MakeSession) -> GraphSession:
    """Return the graph's session for these arrays; open it if their dtypes need a new one."""
    given = [_dtype(array) for array in order.inputs]
    session = order.graph.session
    if session is not None:
        dtypes = dict(zip(session.inputs, given, strict=False))
        if any(dtypes.get(name) is not dtype for name, dtype in session.narrow.items()):
            session = None  # an input that was 16-bit is not any more
    if session is None:  # not counted in the run's seconds
        session = make_session(bytes(order.graph.model), given)
    order.graph.session = session
    return session


def _dtype(given: GraphInput) -> DType | None:
    return given.dtype if isinstance(given, StoredArray | Concatenated) else None


def _may_write(given: GraphInput, output: Kept) -> bool:
    """Return whether an output may overwrite an input, which nothing else may then use."""
    if given is None:  # zeros, made for this run
        return True
    return given is output.replaces and not output.replaces.returned


def fetch(order: FetchRun) -> memoryview:
    """Return rows of an array, rounded to the requested dtype.

    Raises:
        GraphError: when the array is missing, or does not have these rows and columns.
    """
    value = _value(order.array)
    rows = value.reshape(-1, order.columns) if value.size % order.columns == 0 else None
    if rows is None or value.dtype != np.float32 or order.first_row + order.rows > len(rows):
        raise GraphError(
            f"an array of shape {value.shape} has no rows {order.first_row} to "
            f"{order.first_row + order.rows} of {order.columns} columns"
        )
    part = rows[order.first_row : order.first_row + order.rows]
    if isinstance(order.array, Kept) and order.out is DType.FP32:
        order.array.returned = True
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
    return (_aligned(given) if given.dtype is DType.FP32 else _buffer(given)).float32()


def _buffer(given: StoredArray) -> arrays.Buffer:
    if isinstance(given.payload, arrays.Buffer):  # it never left this process
        return given.payload
    return arrays.unpack(given.payload, given.rows, given.columns, given.dtype)


def _aligned(given: StoredArray) -> arrays.Buffer:
    """Return an array at an aligned address, and store the aligned copy.

    Within its message an array may start at any address, which not all processors can read.
    """
    buffer = _buffer(given)
    if not buffer.array.flags.aligned:
        buffer = given.payload = arrays.Buffer(buffer.array.copy(), buffer.dtype)
    return buffer


def _narrow(given: StoredArray | Concatenated) -> Array:
    """Return a 16-bit array without upcasting it."""
    if isinstance(given, Concatenated):
        return given.buffer().array
    return _aligned(given).array


def _shaped(
    name: str, shape: Sequence[int | str], given: GraphInput, narrow: DType | None
) -> Array:
    """Return an input in the graph's shape; dynamic sizes follow from the number of elements."""
    free = [size for size in shape if not isinstance(size, int)]
    if given is None:
        if free:
            raise GraphError(f"the input {name} cannot be zeros: its shape is {list(shape)}")
        return np.zeros([int(size) for size in shape], np.float32)
    if narrow and isinstance(given, StoredArray | Concatenated):
        value = _narrow(given)
    else:
        value = _value(given)
    try:
        return value.reshape([size if isinstance(size, int) else -1 for size in shape])
    except ValueError:
        raise GraphError(
            f"the input {name} has the shape {list(shape)}, and {value.size} elements came"
        ) from None
