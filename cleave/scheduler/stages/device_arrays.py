"""One device's arrays for stages, and the messages that create, return and drop them.

Each array on a device is written once, except for gradient sums: a backward pass replaces the old
sum with the new sum. A device executes tasks in sequence, so each gradient is added exactly once.

After a failed task, the device is in *careful mode*: the PS sends it one task at a time. If the
device has enough memory, it retains the old sums until a backward pass has computed the new sums,
so that a failed task can be repeated alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import replace
from typing import Any, Final

from cleave.protocol import messages
from cleave.protocol.messages import Message
from cleave.scheduler.counters import TrafficKind
from cleave.scheduler.instructions import SendStage
from cleave.scheduler.stages.arrays import StageArray
from cleave.scheduler.stages.resident import Lineage
from cleave.scheduler.stages.work import (
    RequestKind,
    RowsPiece,
    StageGraph,
    StageOrder,
    StageRequest,
    StepWork,
)
from cleave.scheduler.tiles.device_memory import Names
from cleave.scheduler.tiles.tasks import Task

_PIECE_BYTES = 8 * 2**20  # maximum size of the rows of a sum in one message
_AWAITED_BYTES = 16 * 2**20  # maximum size of sums in flight; a device stores them twice
_FP32 = 4
STEADY_AFTER: Final = 256  # number of consecutive completed tasks that end a device's careful mode


class DeviceArrays:
    """Tracks one device's arrays for stages and queues messages.

    Attributes:
        work: the current step.
        occupied_bytes: device memory used by arrays and graphs, in bytes.
    """

    def __init__(self, device: int, ids: Names, work: StepWork) -> None:
        self.device = device
        self.work = work
        self.occupied_bytes = 0
        self._ids = ids
        self._sent: dict[StageArray | StageGraph, int] = {}
        self._sizes: dict[int, int] = {}
        self._out: deque[SendStage] = deque()
        self._asked: dict[int, SendStage] = {}  # key: run of a task in flight
        self._careful_bytes: int | None = None  # in careful mode, the device's total memory
        self._done = 0  # consecutive completed tasks
        self._snapshot: dict[StageArray, int] = {}  # wire IDs of state that is being returned
        # Number of updates in the trained state that is on the device, by array.
        self._updates: dict[StageArray, int] = {}
        self._lineages: dict[StageArray, Lineage] = {}  # of the trained state

    # --- memory ---

    def holds(self, array: StageArray | StageGraph) -> bool:
        """Return whether an array or graph is on the device or on its way to the device."""
        return array in self._sent

    def load(self, arrays: Iterable[StageArray | StageGraph]) -> None:
        """Queue each array or graph that has not been sent to the device yet."""
        for array in arrays:
            if isinstance(array, StageGraph):
                self._put_graph(array)
            elif not self._is_resident(array):
                self._put(array)

    def renew(self, arrays: Mapping[StageArray, StageArray]) -> None:
        """Replace sent arrays. `arrays` maps each old array to its replacement."""
        for old, new in arrays.items():
            if old in self._sent:
                self._forget(old)
                self._put(new)

    def take(self) -> list[SendStage]:
        """Remove and return the queued messages that may be sent now."""
        out: list[SendStage] = []
        while self._out and not (self._careful and self._asked):
            sent = self._out.popleft()
            if isinstance(sent.message, messages.RunGraph | messages.Fetch):
                self._asked[sent.message.id] = sent
            out.append(sent)
        return out

    # --- failures ---

    @property
    def waits(self) -> bool:
        """Return whether queued messages wait for the answer to an earlier task."""
        return bool(self._out)

    @property
    def _careful(self) -> bool:
        return self._careful_bytes is not None

    def be_careful(self, memory_bytes: int) -> None:
        """Send one task at a time until `STEADY_AFTER` consecutive tasks have completed.

        `memory_bytes` is the total memory that the device offers.
        """
        self._careful_bytes, self._done = memory_bytes, 0

    def answered(self, run: int) -> None:
        """Record that the device completed a task."""
        if self._asked.pop(run, None) is not None:
            self._done += 1
            if self._done >= STEADY_AFTER:
                self._careful_bytes = None

    def ask_again(self, run: int, request: StageRequest) -> bool:
        """Queue a failed task again, if that is safe.

        Returns:
            False if a later task may use the failed task's output, or if the task overwrites
            one of its inputs.
        """
        failed = self._asked.pop(run, None)
        self._done = 0
        only_fetches = request.kind in (RequestKind.SUMS, RequestKind.STATE)
        if failed is None or not (self._careful or only_fetches):
            return False
        message = failed.message
        again: list[SendStage] = []
        if isinstance(message, messages.RunGraph):
            made = tuple(filter(None, message.outputs))
            if not set(made).isdisjoint(message.inputs):
                return False
            again.append(SendStage(self.device, messages.Drop(made)))
        else:
            assert isinstance(message, messages.Fetch)
        self._ids.runs += 1
        request.answers[self._ids.runs] = request.answers.pop(run)
        again.append(replace(failed, message=replace(message, id=self._ids.runs)))
        self._out.extendleft(reversed(again))
        return True

    def start_over(self, wanted: Iterable[StageArray | StageGraph] = ()) -> None:
        """Cancel all tasks in flight and drop all arrays and graphs that are not in `wanted`."""
        if self._asked:
            self._send(messages.Cancel(tuple(self._asked)))
        self.end(wanted)

    def end(self, wanted: Iterable[StageArray | StageGraph] = ()) -> None:
        """Discard all tasks without cancelling them. Drop arrays and graphs not in `wanted`.

        Queued tasks that a snapshot needs are kept.
        """
        self._asked = {}
        kept = {*self._snapshot.values()}

        def makes_snapshot(sent: SendStage) -> bool:
            one = sent.message
            return isinstance(one, messages.RunGraph) and not kept.isdisjoint(one.outputs)

        needed = max((n for n, sent in enumerate(self._out) if makes_snapshot(sent)), default=-1)
        self._out = deque(
            sent
            for n, sent in enumerate(self._out)
            if n <= needed
            or sent.task is None
            or (isinstance(sent.message, messages.Fetch) and sent.message.array in kept)
        )
        keep = {self._sent[w] for w in wanted if w in self._sent}
        # State that is only kept for a snapshot is not current after the next step.
        self._sent = {what: id for what, id in self._sent.items() if id in keep}
        self.drop([id for id in self._sizes if id not in keep and id not in kept])

    def _restart(self, device: int, sent: dict[StageArray | StageGraph, int]) -> None:
        """Track a device that has a new session and only the arrays and graphs in `sent`."""
        self.device = device
        self._asked, self._snapshot, self._careful_bytes = {}, {}, None
        self._out.clear()
        self._sent, kept = sent, {*sent.values()}
        self._sizes = {id: nbytes for id, nbytes in self._sizes.items() if id in kept}
        self.occupied_bytes = sum(self._sizes.values())

    @staticmethod
    def dropped(device: int, ids: Set[int]) -> list[SendStage]:
        """Return a message that tells a device to drop arrays that no `DeviceArrays` tracks."""
        return [SendStage(device, messages.Drop(tuple(sorted(ids))))] if ids else []

    @property
    def is_idle(self) -> bool:
        """Return whether the device has answered all tasks."""
        return not self._asked

    def _is_resident(self, array: StageArray) -> bool:
        return self.work.resident is not None and array in self.work.resident.arrays

    # --- messages ---

    def more_rows(self, request: StageRequest) -> None:
        """Request the rows in `request.rest`, up to the limit on bytes in flight."""
        while request.rest:
            piece = request.rest[0]
            nbytes = piece.rows * piece.columns * _item_bytes(piece.dtype)
            if request.answers and sum(request.answers.values()) + nbytes > _AWAITED_BYTES:
                return
            self._next_rows(request)

    def _next_rows(self, request: StageRequest) -> None:
        """Request the first rows in `request.rest`."""
        one = request.rest.popleft()
        self._fetch(request, one.name, one.array, one.first, one.rows, one.columns, one.dtype)

    def _send(
        self, message: Message, task: Task | None = None, kind: TrafficKind = TrafficKind.OTHER
    ) -> None:
        """Queue a message. If `task` is set, the device must answer the message."""
        self._out.append(SendStage(self.device, message, task, kind))

    def _next_array(self, nbytes: int) -> int:
        self._ids.arrays += 1
        self._sizes[self._ids.arrays] = nbytes
        self.occupied_bytes += nbytes
        return self._ids.arrays

    def _next_run(
        self, request: StageRequest, name: Any, output_bytes: int, flops: int, form: Any
    ) -> Task:
        self._ids.runs += 1
        request.answers[self._ids.runs] = output_bytes
        request.flops += flops
        return Task(0, (), flops, output_bytes, StageOrder(request, name, *form))

    def _put(self, array: StageArray) -> int:
        """Return an array's wire ID. Send the array first if it is not on the device."""
        id = self._sent.get(array)
        if id is None:
            # The snapshot of trained state is not its current value.
            assert not self._is_resident(array), "the device lacks the trained state of a layer"
            id = self._send_array(array)
        return id

    def _send_array(
        self, array: StageArray, of: Callable[[Any], Any] = lambda payload: payload
    ) -> int:
        """Send an array. `of` returns the object to send, given the payload."""
        id = self._sent[array] = self._next_array(array.nbytes)
        if array.parts:
            parts = []  # the wire IDs of the parts, valid until `Concat`
            for part in array.parts:
                self._ids.arrays += 1
                parts.append(self._ids.arrays)
                self._send_put(self._ids.arrays, part, of(part.payload))
            self._send(messages.Concat(id, tuple(parts)), kind=array.kind)
        else:
            self._send_put(id, array, of(array.payload))
        return id

    def _send_put(self, id: int, array: StageArray, payload: Any) -> None:
        put = messages.Put(id, array.rows, array.columns, array.dtype, payload)
        self._send(put, kind=array.kind)

    def _put_graph(self, graph: StageGraph) -> int:
        id = self._sent.get(graph)
        if id is None:
            id = self._sent[graph] = self._next_array(graph.nbytes)
            message = messages.Graph(id, graph.model, graph.products)
            self._send(message, kind=TrafficKind.GRAPHS)
        return id

    def _forget(self, array: StageArray | StageGraph) -> None:
        self.drop([self._sent.pop(array)])

    def _rename(self, array: StageArray) -> None:
        """Remove an array from the sent arrays. Only its wire ID then identifies the array."""
        self._sent.pop(array)

    def _run(
        self,
        request: StageRequest,
        graph: StageGraph,
        feed: Mapping[str, int],
        made: Mapping[str, int],
        flops: int,
        held: Mapping[str, int] | None = None,
    ) -> dict[str, int]:
        """Request a graph run. Return a map from output name to wire ID.

        Outputs in `held` overwrite existing arrays. All other outputs get new wire IDs.
        """
        id = self._put_graph(graph)
        new = {n: self._next_array(nbytes) for n, nbytes in made.items() if n not in (held or {})}
        found = {**new, **(held or {})}
        task = self._next_run(request, None, 0, flops, ())
        self._send(
            messages.RunGraph(
                self._ids.runs,
                id,
                tuple(feed[name] for name in graph.inputs),
                tuple(found.get(name, 0) for name in graph.outputs),
                tuple(made[name] for name in graph.outputs if name in made),
                flops,
            ),
            task,
        )
        return found

    def _fetch(
        self,
        request: StageRequest,
        name: Any,
        array: int,
        first: int,
        rows: int,
        columns: int,
        out: str,
    ) -> None:
        """Request rows of an array. The answer is stored in `request.found[name]`."""
        nbytes = rows * columns * _item_bytes(out)
        task = self._next_run(request, name, nbytes, 0, (rows, columns, out))
        self._send(messages.Fetch(self._ids.runs, array, first, rows, columns, out), task)

    def drop(self, arrays: Iterable[int]) -> None:
        """Queue a message that tells the device to drop the arrays with these wire IDs."""
        ids = tuple(dict.fromkeys(arrays))
        if ids:
            self.occupied_bytes -= sum(self._sizes.pop(id) for id in ids)
            self._send(messages.Drop(ids))


def row_pieces(
    key: tuple[Any, ...],
    array: int,
    rows: int,
    columns: int,
    dtype: str,
    nbytes: int = _PIECE_BYTES,
) -> Iterator[RowsPiece]:
    """Divide an array into blocks of rows. A block has at most `nbytes` bytes in fp32, or one row.

    Each block is named (*`key`, first row) and is sent in `dtype`.
    """
    step = max(1, nbytes // (_FP32 * columns))
    for first in range(0, rows, step):
        yield RowsPiece((*key, first), array, first, min(step, rows - first), columns, dtype)


def _item_bytes(dtype: str) -> int:
    return _FP32 if dtype == "fp32" else 2
