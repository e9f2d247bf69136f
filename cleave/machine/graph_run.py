"""Run the graphs stored on a device, with stored arrays as inputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final, TypeAlias

import numpy as np

from cleave import arrays
from cleave.arrays import DType
from cleave.machine.backends import StoredArray, as_buffer
from cleave.machine.graph_choice import MakeGraph, open_on_cpu
from cleave.machine.graph_memory import GivenInput, GraphMemory
from cleave.machine.graph_session import GraphError, OpenGraph
from cleave.machine.webgpu_session import WebgpuArray, WebgpuSession

# Element types of arrays that are not floating-point, which only graphs can take as inputs.
NUMPY_DTYPES: Final = {"int64": np.dtype("<i8"), "bool": np.dtype("?"), "uint8": np.dtype("u1")}


@dataclass(slots=True, eq=False)
class StoredGraph:
    """A graph that a device received. Its first run creates `memory` and `session`.

    Attributes:
        products: the 16-bit dtype in which matrix products may be computed; None for fp32.
    """

    model: bytes | memoryview
    nbytes: int
    products: DType | None = None
    memory: GraphMemory | None = None
    session: OpenGraph | None = None


@dataclass(slots=True, eq=False)
class StoredIndices:
    """A stored array of integers, booleans or quantized weights, which only graphs can use."""

    payload: bytes | memoryview
    dtype: np.dtype[np.generic]
    nbytes: int
    uploaded: Any = None  # see `StoredArray`


@dataclass(slots=True, eq=False)
class Kept:
    """A graph output that is stored on the device.

    Attributes:
        nbytes: size in bytes, as declared by the PS.
        value: the output array, in the memory of the processor that computed it; None before the
            run.
        replaces: older output with the same ID, which is an input of the run that computes this
            output; None after the run, or if this output replaces no older output.
        made: whether the run that computes this output has succeeded.
        returned: whether a `result` message shares the array's memory. If so, the memory must not
            be overwritten.
    """

    nbytes: int
    value: Any = None
    replaces: Kept | None = None
    made: bool = False
    returned: bool = False


@dataclass(slots=True, eq=False)
class Concatenated:
    """An array received in several parts, because it is too large for one message."""

    parts: Sequence[StoredArray]
    rows: int
    columns: int
    dtype: DType
    nbytes: int
    uploaded: Any = None  # see `StoredArray`
    _whole: arrays.Buffer | None = None

    def buffer(self) -> arrays.Buffer:
        """Return the whole array. The first call concatenates the parts."""
        if self._whole is None:
            whole = arrays.empty(self.rows, self.columns, self.dtype)
            first = 0
            for part in self.parts:
                whole.array[first : first + part.rows] = as_buffer(part).array
                first += part.rows
            self._whole, self.parts = whole, ()
        return self._whole


GraphInput: TypeAlias = StoredArray | StoredIndices | Concatenated | Kept | None  # None: zeros


@dataclass(slots=True)
class GraphRun:
    """A request to run a graph.

    A successful run sets the values of all stored outputs. A failed run sets none. An output may
    reuse the memory of the older output that it replaces. The older output's value is discarded
    even if the run fails.

    Attributes:
        inputs: array for each graph input, in order; None for zeros.
        outputs: where to store each graph output, in order; None for an output to discard.
        room: returns the number of bytes that are free for working memory when the run starts.
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
    """A request for consecutive rows of an array that is reshaped to `columns` columns."""

    run: int
    array: StoredArray | Concatenated | Kept
    first_row: int
    rows: int
    columns: int
    out: DType
    flops: int = field(default=0, init=False)

    @property
    def result_bytes(self) -> int:
        return self.rows * self.columns * self.out.itemsize


MakeMemory: TypeAlias = Callable[[bytes | memoryview], GraphMemory]


def run_graph(
    order: GraphRun,
    make_session: MakeGraph = open_on_cpu,
    make_memory: MakeMemory = GraphMemory,
) -> float:
    """Run a graph, store its outputs and return the run time in seconds.

    The run time does not include opening the session.

    Args:
        make_session: opens a session for the graph; called if no open session fits the inputs.
        make_memory: parses the graph to compute the working memory; called at the first run.

    Raises:
        GraphError: if the run fails or needs more memory than is available, or the size of an
            output differs from the declared size.
    """
    try:
        if order.graph.memory is None:
            order.graph.memory = make_memory(order.graph.model)
        needed_bytes = order.graph.memory.peak_bytes(
            [_given(array) for array in order.inputs], [kept is not None for kept in order.outputs]
        )
        room_bytes = order.room()
        if needed_bytes > room_bytes:  # before the run allocates memory
            raise GraphError(
                f"the run needs {needed_bytes} bytes, but only {max(room_bytes, 0):.0f} are free; "
                "send fewer rows, or drop arrays first"
            )
        return _run_graph(order, make_session)
    finally:
        for kept in order.outputs:
            if kept is not None and kept.replaces is not None:
                kept.replaces.value = None
                kept.replaces = None


def _given(array: GraphInput) -> GivenInput:
    if array is None:
        return GivenInput(None)
    if isinstance(array, StoredArray | Concatenated):
        return GivenInput(array.rows * array.columns, array.dtype is not DType.FP32)
    return GivenInput(_elements(_value(array)))


def _run_graph(order: GraphRun, make_session: MakeGraph) -> float:
    session = _session(order, make_session)
    began_s = time.perf_counter()
    inputs = dict(zip(session.inputs, order.inputs, strict=True))
    feed = {name: _fed(session, name, given) for name, given in inputs.items()}
    outputs = zip(session.outputs, order.outputs, strict=True)
    wanted = {name: kept for name, kept in outputs if kept is not None}
    into = {
        output: feed[session.in_place[output]]
        for output, kept in wanted.items()
        if output in session.in_place and _may_write(inputs[session.in_place[output]], kept)
    }
    if into or session.narrow or session.resident:
        found = session.run_into(feed, into, list(wanted))
    else:
        found = session.run(feed, list(wanted))
    for name, kept in wanted.items():
        if (nbytes := _declared_bytes(found[name])) != kept.nbytes:
            raise GraphError(f"an output is {nbytes} bytes, not {kept.nbytes} as announced")
    for name, kept in wanted.items():
        kept.value = found[name]
    return time.perf_counter() - began_s


def _session(order: GraphRun, make_session: MakeGraph) -> OpenGraph:
    """Return the session of a request's graph, reopening it if an input's dtype has changed."""
    given = tuple(
        array.dtype if isinstance(array, StoredArray | Concatenated) else None
        for array in order.inputs
    )
    session = order.graph.session
    if session is not None:
        dtypes = dict(zip(session.inputs, given, strict=False))
        if any(dtypes.get(name) is not dtype for name, dtype in session.narrow.items()):
            session = None  # an input does not have the 16-bit dtype of the open session
    if session is None:  # opening a session does not count as part of the run
        session = make_session(bytes(order.graph.model), given, order.graph.products)
    order.graph.session = session
    return session


def _may_write(given: GraphInput, output: Kept) -> bool:
    """Return True if an output may overwrite an input array, because the array has no later use."""
    if given is None:  # the zeros were created for this run
        return True
    return given is output.replaces and not output.replaces.returned


def fetch(order: FetchRun) -> memoryview:
    """Return the requested rows as bytes, or raise GraphError if the array lacks them."""
    value = _value(order.array)
    if isinstance(value, WebgpuArray):
        value = value.numpy()
    elif _is_bf16(value):
        value = value.float()
    rows = value.reshape(-1, order.columns) if _elements(value) % order.columns == 0 else None
    is_fp32 = str(value.dtype).endswith("float32")
    if rows is None or not is_fp32 or order.first_row + order.rows > len(rows):
        raise GraphError(
            f"an array of shape {tuple(value.shape)} has no rows {order.first_row} to "
            f"{order.first_row + order.rows} of {order.columns} columns"
        )
    part = on_host(rows[order.first_row : order.first_row + order.rows])
    if isinstance(order.array, Kept) and order.out is DType.FP32:
        order.array.returned = True
    return arrays.Buffer(arrays.narrow(part, order.out), order.out).pack()


def on_host(value: Any) -> Any:
    """Return an array as a numpy array; `value` may be in the memory of any processor."""
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, WebgpuArray):
        return value.numpy()
    return (value.float() if _is_bf16(value) else value).cpu().numpy()


def _is_bf16(value: Any) -> bool:
    """Return True for a bf16 tensor. PyTorch has computed it with matrix products in bf16."""
    return str(value.dtype) == "torch.bfloat16"


def _declared_bytes(value: Any) -> int:
    """Return the size of an output as its graph declares it: floating-point elements are fp32."""
    return 2 * int(value.nbytes) if _is_bf16(value) else int(value.nbytes)


def _elements(value: Any) -> int:
    return int(value.size if isinstance(value, np.ndarray) else value.numel())


def _value(given: StoredArray | StoredIndices | Concatenated | Kept) -> Any:
    """Return a stored array, with floating-point elements upcast to fp32.

    The result of a run is in the memory of its processor; other arrays are numpy arrays.
    """
    if isinstance(given, Kept):
        if given.value is None:
            raise GraphError("an array is missing, because the task that computes it failed")
        return given.value
    if isinstance(given, StoredIndices):
        return np.frombuffer(given.payload, given.dtype)
    if isinstance(given, Concatenated):
        return given.buffer().float32()
    return (_aligned(given) if given.dtype is DType.FP32 else as_buffer(given)).float32()


def _aligned(given: StoredArray) -> arrays.Buffer:
    """Return a stored array at an aligned address, as some processors require."""
    buffer = as_buffer(given)
    if not buffer.array.flags.aligned:
        buffer = given.payload = arrays.Buffer(buffer.array.copy(), buffer.dtype)
    return buffer


def _fed(session: OpenGraph, name: str, given: GraphInput) -> Any:
    """Return the array for a graph input in the memory of the session's processor.

    An array that the PS sent is uploaded once.
    """
    shape, narrow = session.inputs[name], session.narrow.get(name)
    if isinstance(given, Kept) or not session.resident:
        value = _shaped(shape, given, narrow)
        if isinstance(value, np.ndarray):
            return session.upload(value)
        if session.resident and isinstance(value, WebgpuArray) == isinstance(
            session, WebgpuSession
        ):
            return value
        return session.upload(on_host(value))  # another runner computed it
    is_upcast = isinstance(given, StoredArray | Concatenated) and given.dtype is not DType.FP32
    is_fixed = all(isinstance(size, int) for size in shape)
    # An activation has a dynamic shape, and is used once.
    if given is None or (is_upcast and narrow is None and not is_fixed):
        return session.upload(_shaped(shape, given, narrow))
    kind = type(session), narrow
    if given.uploaded is None or given.uploaded[0] != kind:
        given.uploaded = kind, session.upload(_shaped(shape, given, narrow))
    sizes = [size if isinstance(size, int) else -1 for size in shape]
    value = given.uploaded[1].reshape(sizes)
    return session.upload(value) if isinstance(value, np.ndarray) else value


def _shaped(shape: Sequence[int | str], given: GraphInput, narrow: DType | None) -> Any:
    """Return the array for a graph input, reshaped to `shape`; zeros if `given` is None."""
    sizes = [size if isinstance(size, int) else -1 for size in shape]
    if given is None:
        return np.zeros(sizes, np.float32)
    if narrow and isinstance(given, StoredArray | Concatenated):
        value = (given.buffer() if isinstance(given, Concatenated) else _aligned(given)).array
    else:
        value = _value(given)
    return value.reshape(sizes)
