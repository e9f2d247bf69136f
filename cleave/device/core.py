"""The device's protocol state machine. It uses no sockets or clocks and computes nothing itself.

`DeviceCore.received` converts a message from the PS into tasks (work to execute) and messages to
send. The caller reports the end of each task with `computed` or `failed`. Tasks must be executed
in sequence, because a task may need the outputs of an earlier task.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias, TypeVar

from cleave import coding as codes
from cleave.arrays import DType
from cleave.coding import Each
from cleave.errors import ProtocolError
from cleave.machine.backends import Compute, StoredArray
from cleave.machine.graph_run import (
    NUMPY_DTYPES,
    Concatenated,
    FetchRun,
    GraphInput,
    GraphRun,
    Kept,
    StoredGraph,
    StoredIndices,
)
from cleave.protocol import features, limits, messages
from cleave.protocol.codec import payload_bytes
from cleave.protocol.messages import Feature, Message, Op

Order: TypeAlias = Compute | GraphRun | FetchRun
Action: TypeAlias = Order | Message
Stored: TypeAlias = StoredArray | StoredIndices | Concatenated | Kept | StoredGraph
_MOST_FLOPS: Final = 10**15  # maximum FLOPs counted per graph run; the fastest GPU needs seconds

_Asking = TypeVar("_Asking", messages.Run, messages.RunGraph, messages.Fetch)


@dataclass(frozen=True, slots=True)
class HeldArrays:
    """The arrays and graphs that a device keeps after its connection was lost.

    Attributes:
        of: value of `Welcome.arrays` in the session that stored them.
        store: the arrays and graphs, by wire ID.
    """

    of: str
    store: Mapping[int, Stored]


class DeviceCore:
    """Tracks a device's stored arrays and unfinished runs, and converts PS messages into actions.

    Args:
        memory_bytes: memory budget in bytes that `hello` declared. If stored data would exceed the
            budget, `received` raises ProtocolError.
        offered: names of the features in `hello`. A feature is active once `welcome` also names it.
        held: arrays and graphs from the device's last session, which `hello` names in `holds`.

    Attributes:
        codes_results: whether the PS permitted compressed results.
    """

    def __init__(
        self,
        memory_bytes: int,
        offered: Collection[str] = (),
        held: HeldArrays | None = None,
    ) -> None:
        self.memory_bytes = memory_bytes
        self._offered = frozenset(feature for feature in Feature if feature.value in offered)
        self.codes_results = False
        self._features: frozenset[Feature] = frozenset()
        self.occupied_bytes = 0
        self.draining = False
        self.welcome: messages.Welcome | None = None
        self.blocks = 0
        self.flops = 0
        self._results_bytes = 0  # reserved for the results of unfinished runs
        self._held = held
        self._store: dict[int, Stored] = {}
        self._running: dict[int, Order] = {}

    @property
    def idle(self) -> bool:
        """Return True if the device has no unfinished runs."""
        return not self._running

    @property
    def held(self) -> HeldArrays | None:
        """Return what to keep if the connection is lost now; None if there is no use for it.

        Outputs of unfinished, failed or cancelled runs are excluded. Graphs must be reopened,
        because a run that has started may still use the open ones.
        """
        if self.welcome is None:
            return self._held
        if Feature.KEEPS not in self._features:
            return None
        store = self._store.items()
        graphs = {
            name: replace(one, memory=None, session=None)
            for name, one in store
            if isinstance(one, StoredGraph)
        }
        kept = {name: one for name, one in store if not isinstance(one, Kept) or one.made}
        return HeldArrays(self.welcome.arrays, kept | graphs) if graphs else None

    def received(self, message: Message) -> list[Action]:
        """Process a message from the PS. Return orders to execute and messages to send, in order.

        Raises:
            ProtocolError: if the message violates the protocol. The caller must end the session.
        """
        features.require(message, self._features)
        match message:
            case messages.Put():
                self._put(message)
            case messages.Run():
                return [self._begin(message, self._multiplication)]
            case messages.PutCoded():
                self._put(self.decoded(message))
            case messages.CodeResults():
                self.codes_results = True
            case messages.Graph():
                self._put_graph(message)
            case messages.Concat():
                self._concat(message)
            case messages.RunGraph():
                return [self._begin(message, self._graph_run)]
            case messages.Fetch():
                return [self._begin(message, self._fetch)]
            case messages.Drop():
                for name in message.ids:
                    array = self._store.pop(name, None)
                    if array is not None:
                        self.occupied_bytes -= array.nbytes
            case messages.Cancel():
                for run in message.ids:
                    self._take(run)
            case messages.Welcome() if self.welcome is None:
                self.welcome = message
                self._features = features.of_session(self._offered, message)
                return self._resume()
            case _:
                raise ProtocolError(f"a device does not expect a {message.TYPE} message here")
        return []

    def decoded(self, message: messages.PutCoded, each: Each = map) -> messages.Put:
        """Convert a `put_coded` into a `put`. Another thread may call this method.

        Raises:
            ProtocolError: if the message violates the protocol. The caller must end the session.
        """
        features.require(message, self._features)
        self._need_room(message.id, codes.array_bytes(message))
        return codes.put_of(message, each)

    def computed(self, run: int, payload: Any, compute_s: float) -> list[Action]:
        """Return the response to a finished run; an empty list if the PS cancelled the run."""
        order = self._take(run)
        if order is None:
            return []
        self.blocks += 1
        self.flops += order.flops
        if isinstance(order, GraphRun):
            for output in filter(None, order.outputs):
                output.made = True
            return [messages.Computed(run, compute_s)]
        return [
            messages.Result(run, order.rows, order.columns, order.out.value, compute_s, payload)
        ]

    def failed(self, run: int, reason: str) -> list[Action]:
        """Return the response to a failed run; an empty list if the PS cancelled the run."""
        if self._take(run) is None:
            return []
        return [messages.TaskError(run, reason[: limits.MAX_TEXT])]

    def _resume(self) -> list[Action]:
        """Tell the PS which arrays the device kept, if the PS still knows the last session."""
        held, self._held = self._held, None
        if held is None or self.welcome is None or self.welcome.arrays != held.of:
            return []
        features.require(message := messages.Held(tuple(held.store)), self._features)
        self._store = dict(held.store)
        self.occupied_bytes = sum(one.nbytes for one in self._store.values())
        return [message]

    def _take(self, run: int) -> Order | None:
        order = self._running.pop(run, None)
        if order is not None:
            self._results_bytes -= order.result_bytes
        return order

    def drain(self) -> list[Action]:
        """Return a `drain` message, which stops new runs. Return no message on later calls."""
        if self.draining:
            return []
        self.draining = True
        return [messages.Drain()]

    def _put(self, message: messages.Put) -> None:
        dtype = _DTYPES.get(message.dtype)
        if dtype is not None:
            nbytes = _array_bytes(message, dtype.itemsize)
            stored = StoredArray(message.rows, message.columns, dtype, message.payload, nbytes)
            self._keep(message.id, stored)
            return
        indices = NUMPY_DTYPES.get(message.dtype) if Feature.GRAPHS in self._features else None
        if indices is None:
            raise ProtocolError(f"unknown dtype {message.dtype!r}")
        nbytes = _array_bytes(message, indices.itemsize)
        self._keep(message.id, StoredIndices(message.payload, indices, nbytes))

    def _put_graph(self, message: messages.Graph) -> None:
        nbytes = payload_bytes(message.payload)
        if nbytes > limits.MAX_GRAPH_BYTES:
            raise ProtocolError(
                f"graph {message.id} is {nbytes} bytes; the limit is {limits.MAX_GRAPH_BYTES}"
            )
        products = DType.BF16 if message.products == DType.BF16.value else None
        self._keep(message.id, StoredGraph(message.payload, nbytes, products))

    def _concat(self, message: messages.Concat) -> None:
        found = [self._store.get(name) for name in message.ids]
        parts = [part for part in found if isinstance(part, StoredArray)]
        kinds = {(part.columns, part.dtype) for part in parts}
        if len(parts) < len(found) or len(set(message.ids)) < len(parts) or len(kinds) != 1:
            raise ProtocolError(
                f"array {message.id} cannot be concatenated from {message.ids[:8]}: these must be "
                f"distinct arrays from `put` messages, all with the same columns and dtype"
            )
        if message.id in self._store:
            raise ProtocolError(f"array {message.id} was sent twice")
        for name in message.ids:
            del self._store[name]
        ((columns, dtype),) = kinds
        rows, nbytes = sum(part.rows for part in parts), sum(part.nbytes for part in parts)
        self._store[message.id] = Concatenated(parts, rows, columns, dtype, nbytes)

    def _keep(self, id: int, stored: Stored) -> None:
        if id in self._store:
            raise ProtocolError(f"array {id} was sent twice")
        self._need_room(id, stored.nbytes)
        self.occupied_bytes += stored.nbytes
        self._store[id] = stored

    def _need_room(self, id: int, nbytes: int) -> None:
        taken = self.occupied_bytes + self._results_bytes
        if taken + nbytes > self.memory_bytes:
            raise ProtocolError(
                f"array {id} needs {nbytes} bytes, but {taken} of {self.memory_bytes} bytes are in "
                "use"
            )

    def _begin(self, message: _Asking, make: Callable[[_Asking], Order]) -> Action:
        """Return the task for a request, or a `task_error` message if the request is invalid."""
        if message.id in self._running:
            raise ProtocolError(f"run {message.id} was requested twice")
        if len(self._running) >= limits.MAX_RUNS_IN_FLIGHT:
            raise ProtocolError(
                f"{limits.MAX_RUNS_IN_FLIGHT} runs are already in flight, which is the limit"
            )
        try:
            order = make(message)
            self._check_room(order.result_bytes)
        except _CannotRunError as error:
            return messages.TaskError(message.id, str(error)[: limits.MAX_TEXT])
        self._running[message.id] = order
        self._results_bytes += order.result_bytes
        return order

    def _free_bytes(self) -> int:
        """Return the unused part of the memory budget in bytes."""
        return self.memory_bytes - self.occupied_bytes - self._results_bytes

    def _check_room(self, result_bytes: int) -> None:
        if result_bytes > limits.MAX_MESSAGE_BYTES - limits.MAX_HEADER_BYTES:
            raise _CannotRunError(f"a result of {result_bytes} bytes does not fit in a message")
        taken = self.occupied_bytes + self._results_bytes
        if taken + result_bytes > self.memory_bytes:
            raise _CannotRunError(
                f"the result needs {result_bytes} bytes, but {taken} of {self.memory_bytes} are in "
                "use"
            )

    def _graph_run(self, message: messages.RunGraph) -> GraphRun:
        kept = [name for name in message.outputs if name]
        replaced = self._replaced(message, kept)
        if len(kept) != len(message.output_bytes):
            raise ProtocolError(
                f"run {message.id} keeps {len(kept)} outputs, but states the sizes of "
                f"{len(message.output_bytes)}"
            )
        for number, name in enumerate(kept):
            if name in kept[:number] or (name in self._store and name not in replaced):
                raise ProtocolError(f"array {name} was sent twice")
        made = dict(zip(kept, map(Kept, message.output_bytes), strict=True))
        found = {name: self._store.get(name) for name in message.inputs}
        # Even if this run fails, the replaced outputs can no longer be used.
        self._store.update((name, made[name]) for name in replaced)
        graph = self._store.get(message.graph)
        if not isinstance(graph, StoredGraph):
            raise _CannotRunError(f"graph {message.graph} is not stored on this device")
        inputs = [_input(name, found[name]) for name in message.inputs]
        for name, output in made.items():
            output.replaces = replaced.get(name)
            if output.replaces is None:
                self._keep(name, output)
        outputs = [made.get(name) for name in message.outputs]
        flops = min(message.flops, _MOST_FLOPS)
        return GraphRun(message.id, graph, inputs, outputs, flops, self._free_bytes)

    def _replaced(self, message: messages.RunGraph, kept: Sequence[int]) -> dict[int, Kept]:
        """Return the arrays that a run both reads and replaces, by array ID."""
        found = {}
        for name, nbytes in zip(kept, message.output_bytes, strict=False):
            before = self._store.get(name)
            if (
                isinstance(before, Kept)
                and message.inputs.count(name) == 1
                and before.nbytes == nbytes
            ):
                found[name] = before
        return found

    def _fetch(self, message: messages.Fetch) -> FetchRun:
        out = _dtype(message.out)
        array = self._store.get(message.array)
        if not isinstance(array, StoredArray | Concatenated | Kept) or not message.columns:
            raise _CannotRunError(f"array {message.array} is not stored on this device")
        part = message.first_row, message.rows, message.columns
        return FetchRun(message.id, array, *part, out)

    def _multiplication(self, message: messages.Run) -> Compute:
        if message.op != Op.MATMUL.value:
            raise _CannotRunError(f"this device does not support op {message.op!r}, only 'matmul'")
        if not message.inputs or len(message.inputs) % 2:
            raise _CannotRunError(f"matmul needs pairs of arrays, not {len(message.inputs)} arrays")
        arrays = []
        for name in message.inputs:
            array = self._store.get(name)
            if not isinstance(array, StoredArray):
                raise _CannotRunError(f"array {name} is not stored on this device")
            arrays.append(array)
        pairs = list(zip(arrays[::2], arrays[1::2], strict=True))
        shapes = set()
        depth = 0
        for a, b in pairs:
            m, ka = (a.columns, a.rows) if message.transpose_a else (a.rows, a.columns)
            kb, n = (b.columns, b.rows) if message.transpose_b else (b.rows, b.columns)
            if ka != kb or a.dtype is not b.dtype or a.dtype is not pairs[0][0].dtype:
                raise _CannotRunError(
                    f"a {m}x{ka} {a.dtype.value} array cannot be multiplied "
                    f"by a {kb}x{n} {b.dtype.value} one"
                )
            shapes.add((m, n))
            depth += ka
        if len(shapes) > 1:
            some = sorted(shapes)[:3]
            raise _CannotRunError(f"products of different shapes cannot be added: {some}")
        out = _dtype(message.out)
        if out is not DType.FP32 and any(a.dtype is not out for a, _ in pairs):
            raise _CannotRunError(f"the result dtype {out.value} is not the dtype of all inputs")
        rows, columns = shapes.pop()
        return Compute(
            message.id,
            pairs,
            message.transpose_a,
            message.transpose_b,
            rows,
            columns,
            out,
            2 * rows * columns * depth,
        )


def _input(name: int, found: Stored | None) -> GraphInput:
    if not name:
        return None
    if found is None or isinstance(found, StoredGraph):
        raise _CannotRunError(f"array {name} is not stored on this device")
    return found


class _CannotRunError(Exception):
    """Raised if a run cannot be executed. The device reports the failure and keeps the session."""


_DTYPES: Final = {dtype.value: dtype for dtype in DType}  # faster than DType(name)


def _array_bytes(message: messages.Put, itemsize: int) -> int:
    """Return an array's size in bytes. Raise ProtocolError if the payload has another size."""
    nbytes = message.rows * message.columns * itemsize
    length = payload_bytes(message.payload)
    if length != nbytes:
        raise ProtocolError(
            f"array {message.id} is {length} bytes, but {message.rows}x{message.columns} "
            f"{message.dtype} needs {nbytes}"
        )
    return nbytes


def _dtype(name: str) -> DType:
    dtype = _DTYPES.get(name)
    if dtype is None:
        raise ProtocolError(f"unknown dtype {name!r}")
    return dtype
