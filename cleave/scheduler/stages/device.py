"""One device's arrays for stages, and the messages that request its micro-batch passes.

Each array on a device is written once, except for gradient sums: a backward pass replaces the old
sum with the new sum. A device executes orders in sequence, so each gradient is added exactly once.

After a failed order, the device is in *careful mode*: the PS sends it one order at a time. If the
device has enough memory, it retains the old sums until a backward pass has computed the new sums,
so that a failed order can be repeated alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, Final

from cleave import graph_names as names
from cleave.planner.stages.model import NOTHING_KEPT, Keep, KeptBatches, PlannedStage
from cleave.protocol import messages
from cleave.protocol.messages import Message
from cleave.scheduler.instructions import SendStage
from cleave.scheduler.stages.arrays import StageArray
from cleave.scheduler.stages.work import (
    LOSS_LAYER,
    KeptLayer,
    LayerWork,
    LossWork,
    RequestKind,
    Resident,
    RowsPiece,
    SliceWork,
    StageGraph,
    StageOrder,
    StageRequest,
    StepWork,
    SumName,
    SumShape,
    slice_layer,
    slice_of_layer,
)
from cleave.scheduler.tiles.device_memory import Names
from cleave.scheduler.tiles.tasks import Task
from cleave.scheduler.traffic import TrafficKind

_PIECE_BYTES = 8 * 2**20  # maximum size of the rows of a sum in one message
_AWAITED_BYTES = 16 * 2**20  # maximum size of sums in flight; a device stores them twice
_SNAPSHOT_BYTES: Final = 256 * 2**10  # size of a piece, which delays activations on a slow uplink
_REPLAYED: Final = 2  # logged micro-batches in flight
_FP32 = 4
STEADY_AFTER: Final = 256  # number of consecutive completed orders that end a device's careful mode


@dataclass(slots=True, eq=False)
class GradientAccumulator:
    """Gradient sums on one device, and the micro-batches whose gradients the sums contain."""

    device: int
    # maps (layer number, parameter) to the wire ID of the sum; ID 0 stands for zeros
    sums: dict[SumName, int] = field(default_factory=dict)
    # micro-batches whose gradients are confirmed to be in the sums
    batches: set[int] = field(default_factory=set)
    asked: set[int] = field(default_factory=set)  # micro-batches whose backward pass is in flight
    taken: bool = False  # the PS has requested the sums, so gradients are no longer added
    landed: bool = False  # all sums have arrived at the PS
    # maps (layer number, parameter, first row) to received rows of a sum
    found: dict[tuple[int, str, int], Any] = field(default_factory=dict)


class StageDevice:
    """Tracks one device's arrays for stages and queues messages for its micro-batch passes.

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
        self._asked: dict[int, SendStage] = {}  # key: run of an order in flight
        self._careful_bytes: int | None = None  # in careful mode, the device's total memory
        self._done = 0  # consecutive completed orders
        self._snapshot: dict[StageArray, int] = {}  # wire IDs of state that is being returned

    # --- micro-batch passes ---

    def forward(self, request: StageRequest, x: StageArray) -> None:
        """Request a stage's forward pass for a micro-batch and fetch the stage's output."""
        work, pieces = self.work, request.plan.pieces
        tokens = work.tokens[request.batch] // pieces
        for number, piece in enumerate(x.pieces(pieces)):
            y, kept = self._forward(request, request.layers, self._put(piece), tokens)
            name = (names.Y, number) if pieces > 1 else names.Y
            self._fetch(request, name, y, 0, tokens, work.width, work.dtype)
            self._rename(piece)
            if request.keep is Keep.NOTHING:
                self.drop(id for layer in kept for id in layer)
            else:
                request.kept = [*request.kept, *kept]
            self.drop([y])
        if request.keep is Keep.NOTHING:
            self._forget_masks(request)

    def backward(
        self, request: StageRequest, given: StageArray | Sequence[KeptLayer], dy: StageArray
    ) -> None:
        """Request a stage's backward pass for a micro-batch. Gradients are added to the sums.

        Args:
            given: the stage's input, or the wire IDs of the retained arrays, with one entry for
                each layer or sequence chunk.
            dy: the gradient of the stage's output.
        """
        pieces = request.plan.pieces
        tokens = self.work.tokens[request.batch] // pieces
        inputs: Sequence[StageArray | Sequence[KeptLayer]]
        if isinstance(given, StageArray):
            inputs = given.pieces(pieces)
        else:  # a stage with several chunks has one layer
            inputs = [given] if pieces == 1 else [[layer] for layer in given]
        for number, (x, piece) in enumerate(zip(inputs, dy.pieces(pieces), strict=True)):
            if isinstance(x, StageArray):
                last, kept = self._forward(request, request.layers[:-1], self._put(x), tokens)
                kept = [*kept, (last,)]
                self._rename(x)
            else:
                kept = list(x)
            put = self._put(piece)
            self._rename(piece)
            name = (names.DX, number) if pieces > 1 else names.DX
            self._backward(request, kept, put, name, tokens)
        self._forget_masks(request)

    def last(self, request: StageRequest, x: StageArray) -> None:
        """Request the last stage's forward pass, loss and backward pass for a micro-batch."""
        tokens = self.work.tokens[request.batch]
        y, kept = self._forward(request, request.layers, self._put(x), tokens)
        self._rename(x)
        loss, dy = self._loss(request, y)
        self._fetch(request, names.LOSS, loss, 0, 1, 1, "fp32")
        self.drop([y, loss])
        self._backward(request, kept, dy, names.DX, tokens)
        self._forget_masks(request)

    def slice_forward(self, request: StageRequest, x: StageArray) -> None:
        """Request the forward pass of one vocabulary-parallel loss slice for a micro-batch."""
        _, part, held = self._slice(request)
        tokens = self.work.tokens[request.batch]
        x_array = self._put(x)
        made = {names.Y: _FP32 * names.SLICE_COLUMNS * tokens}
        if request.keep is Keep.ACTIVATIONS:
            made[names.LOGITS] = part.logits_bytes * tokens
        flops = round(part.forward_flops * tokens)
        found = self._run(request, part.forward, {names.X: x_array} | held, made, flops)
        self._fetch(request, names.Y, found[names.Y], 0, tokens, names.SLICE_COLUMNS, "fp32")
        self._rename(x)
        self._forget(part.targets[request.batch])
        if request.keep is Keep.NOTHING:
            self.drop([x_array])
        else:
            request.kept = [(x_array, *(found[name] for name in made if name != names.Y))]
        self.drop([found[names.Y]])

    def slice_backward(
        self, request: StageRequest, given: StageArray | Sequence[KeptLayer], total: StageArray
    ) -> None:
        """Request the backward pass of one vocabulary-parallel loss slice for a micro-batch.

        The device adds the weight gradients to the sums. If `request.dx_wanted`, it also returns
        this slice's share of the gradient of the last layer's output.

        Args:
            given: the slice's input, or the wire IDs of the retained input and logits.
            total: the log-sum-exp over the whole vocabulary.
        """
        work = self.work
        number, part, held = self._slice(request)
        tokens = work.tokens[request.batch]
        if isinstance(given, StageArray):
            x, logits = self._put(given), []
            self._rename(given)
        else:
            ((x, *logits),) = given
        if not logits:
            made = {names.LOGITS: part.logits_bytes * tokens}
            flops = round(part.forward_flops * tokens)
            found = self._run(request, part.forward, {names.X: x} | held, made, flops)
            logits = [found[names.LOGITS]]
        feed = {names.X: x, names.DY: self._put(total), names.LOGITS: logits[0]} | held
        made = {names.DX: _FP32 * tokens * work.width}
        flops = round(part.backward_flops * tokens)
        found = self._added(request, part.backward, feed, made, flops, slice_layer(number), part)
        self._forget(total)
        self._forget(part.targets[request.batch])
        if request.dx_wanted:
            self._fetch(request, names.DX, found[names.DX], 0, tokens, work.width, work.dtype)
        self.drop([x, *logits, found[names.DX]])

    def sums(
        self, request: StageRequest, accumulator: GradientAccumulator, wanted: Container[SumName]
    ) -> None:
        """Request the wanted gradient sums of an accumulator and drop the other sums.

        `more_sums` later requests the sums that exceed the limit on bytes in flight.
        """
        self.drop(array for what, array in accumulator.sums.items() if what not in wanted)
        accumulator.sums = {
            what: array for what, array in accumulator.sums.items() if what in wanted
        }
        for (layer, name), array in accumulator.sums.items():
            shape = sums_of(self.work, layer)[name]
            request.rest += _pieces((layer, name), array, shape.rows, shape.columns)
        accumulator.taken = True
        self.more_rows(request)

    def more_rows(self, request: StageRequest) -> None:
        """Request more rows of sums or trained state, up to the limit on bytes in flight."""
        out = "fp32" if request.kind is RequestKind.STATE else self.work.gradients
        while request.rest:
            piece = request.rest[0]
            nbytes = piece.rows * piece.columns * _item_bytes(out)
            if request.answers and sum(request.answers.values()) + nbytes > _AWAITED_BYTES:
                return
            request.rest.popleft()
            self._fetch(
                request, piece.name, piece.array, piece.first, piece.rows, piece.columns, out
            )

    # --- trained state that stays on the device ---

    def restore(self, request: StageRequest) -> None:
        """Send the snapshot of a stage's trained state, and repeat the logged steps since then.

        `more_replay` later repeats the steps that exceed the limit on orders in flight.
        """
        resident = self._resident
        self.drop_state(resident.arrays_of(request.plan))
        for array in resident.arrays_of(request.plan):
            # The server compresses equal payload objects once. The snapshot's memory changes, so
            # each message has an object of its own.
            self._send_array(array, copy)
        request.dx_wanted = False
        for step in resident.log:
            request.replay += ((step, batch) for batch in sorted(step.x[request.stage]))
            request.replay.append((step, None))
        self.more_replay(request)

    def more_replay(self, request: StageRequest) -> None:
        """Repeat more of the logged micro-batches and updates."""
        now = self.work
        while request.replay and len(request.answers) <= _REPLAYED * len(request.layers):
            step, batch = request.replay.popleft()
            self.work = step.work
            if batch is None:
                self.update(request, step.scalars)
                self._forget_logged(step.work, now, request.plan)
            else:
                request.batch = batch
                x, dy = step.x[request.stage][batch], step.dy[request.stage][batch]
                self.backward(request, x, dy)
        self.work = now

    def _forget_logged(self, logged: StepWork, now: StepWork, plan: PlannedStage) -> None:
        """Drop the arrays and graphs of a logged step, such as masks, that step `now` lacks."""
        needed = {array for stage in now.planned for array in arrays_of(now, stage)}
        for array in dict.fromkeys(arrays_of(logged, plan)):
            if array in self._sent and array not in needed:
                self._forget(array)

    def squares(self, request: StageRequest, sums: Mapping[SumName, int]) -> None:
        """Request the sum of all squared elements of gradient sums, unless there are no sums.

        No order overwrites an input, so that a failed order can be repeated alone.
        """
        total, new = names.total(names.SQUARES), names.new_total(names.SQUARES)
        array = 0
        for layer, name in sums:
            feed = {names.GRADIENT: sums[layer, name], total: array}
            shape = sums_of(self.work, layer)[name]
            flops = 2 * shape.rows * shape.columns
            found = self._run(request, self._resident.squares, feed, {new: _FP32}, flops)
            self.drop([array] if array else [])
            array = found[new]
        if array:
            self._fetch(request, names.SQUARES, array, 0, 1, 1, "fp32")
            self.drop([array])

    def update(self, request: StageRequest, scalars: Sequence[StageArray]) -> None:
        """Request an optimizer step with the gradient sums in `request.sums`, and drop them."""
        resident = self._resident
        given = [self._put(each) for each in scalars]
        for (layer, name), gradient in request.sums.items():
            one, shape = resident.parameters[layer, name], sums_of(self.work, layer)[name]
            state = dict(zip(_state_names(len(one.moments)), one.arrays, strict=True))
            old = {key: self._sent[array] for key, array in state.items()}
            feed = old | {names.GRADIENT: gradient, names.SCALARS: given[one.group]}
            made = dict.fromkeys(map(names.updated, state), shape.nbytes)
            flops = 16 * shape.rows * shape.columns
            found = self._run(request, resident.update, feed, made, flops)
            for key, array in state.items():
                self._sent[array] = found[names.updated(key)]
            kept = self._snapshot.values()
            self.drop([*(id for id in old.values() if id not in kept), gradient])
        request.sums.clear()
        for each in scalars:
            self._forget(each)

    def state(self, request: StageRequest) -> None:
        """Request a stage's trained state. Answers have the key (array, first row)."""
        for _, one in self._resident.of_stage(request.plan):
            for array in one.arrays:
                id = self._sent[array]
                request.rest += _pieces((array,), id, array.rows, array.columns)
        self.more_rows(request)

    def holds_state(self, stage: PlannedStage) -> bool:
        """Return whether the trained state of a stage's layers is on the device."""
        return all(array in self._sent for array in self._resident.arrays_of(stage))

    def begin_snapshot(self, request: StageRequest, stage: PlannedStage) -> None:
        """Keep the present trained state of a stage until `request` has returned it."""
        for array in self._resident.arrays_of(stage):
            id = self._snapshot[array] = self._sent[array]
            request.rest += _pieces((array,), id, array.rows, array.columns, _SNAPSHOT_BYTES)

    def more_of_snapshot(self, request: StageRequest) -> None:
        """Request the next piece of a snapshot."""
        one = request.rest.popleft()
        self._fetch(request, one.name, one.array, one.first, one.rows, one.columns, "fp32")

    def end_of_piece(self, request: StageRequest, array: StageArray) -> None:
        """Drop an array of a snapshot if it has been returned and is no longer in use."""
        if request.rest and request.rest[0].name[0] is array:
            return
        id = self._snapshot.pop(array)
        if self._sent.get(array) != id:
            self.drop([id])

    def end_snapshot(self) -> None:
        """Drop what is only kept for a snapshot."""
        held, self._snapshot = self._snapshot, {}
        self.drop([id for array, id in held.items() if self._sent.get(array) != id])

    @property
    def is_idle(self) -> bool:
        """Return whether the device has answered all orders."""
        return not self._asked

    def drop_state(self, *states: Iterable[StageArray]) -> None:
        """Drop the trained state of stages, except the arrays of a snapshot."""
        found = [self._sent.pop(a) for state in states for a in state if a in self._sent]
        kept = {*self._snapshot.values()}
        self.drop([id for id in found if id not in kept])

    @property
    def _resident(self) -> Resident:
        assert self.work.resident is not None
        return self.work.resident

    def _is_resident(self, array: StageArray) -> bool:
        return self.work.resident is not None and array in self.work.resident.arrays

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
        """Return whether queued messages wait for the answer to an earlier order."""
        return bool(self._out)

    @property
    def _careful(self) -> bool:
        return self._careful_bytes is not None

    def be_careful(self, memory_bytes: int) -> None:
        """Send one order at a time until `STEADY_AFTER` consecutive orders have completed.

        `memory_bytes` is the total memory that the device offers.
        """
        self._careful_bytes, self._done = memory_bytes, 0

    def answered(self, run: int) -> None:
        """Record that the device completed an order."""
        if self._asked.pop(run, None) is not None:
            self._done += 1
            if self._done >= STEADY_AFTER:
                self._careful_bytes = None

    def ask_again(self, run: int, request: StageRequest) -> bool:
        """Queue a failed order again, if that is safe.

        Returns:
            False if a later order may use the failed order's output, or if the order overwrites
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
        """Cancel all orders in flight and drop all arrays and graphs that are not in `wanted`."""
        if self._asked:
            self._send(messages.Cancel(tuple(self._asked)))
        self.end(wanted)

    def end(self, wanted: Iterable[StageArray | StageGraph] = ()) -> None:
        """Discard all orders without cancelling them. Drop arrays and graphs not in `wanted`."""
        self._asked = {}
        kept = {*self._snapshot.values()}
        self._out = deque(
            sent
            for sent in self._out
            if sent.task is None
            or (isinstance(sent.message, messages.Fetch) and sent.message.array in kept)
        )
        keep = {self._sent[w] for w in wanted if w in self._sent}
        # State that is only kept for a snapshot is not current after the next step.
        self._sent = {what: id for what, id in self._sent.items() if id in keep}
        self.drop([id for id in self._sizes if id not in keep and id not in kept])

    # --- parts of passes ---

    def _forward(
        self, request: StageRequest, layers: range, x: int, tokens: int
    ) -> tuple[int, list[KeptLayer]]:
        """Request the forward pass of `layers`. Return wire IDs of output and retained arrays."""
        kept: list[KeptLayer] = []
        for number in layers:
            layer = self.work.layers[number]
            feed = {names.X: x} | self._held(layer, request.batch)
            made = {names.Y: _FP32 * tokens * self.work.width}
            if request.keep is Keep.ACTIVATIONS:
                samples = tokens // layer.sample_tokens
                made |= {name: each * samples for name, each in layer.activations.items()}
            found = self._run(request, layer.forward, feed, made, layer.forward_flops * tokens)
            kept.append((x, *(found[name] for name in made if name != names.Y)))
            x = found[names.Y]
        return x, kept

    def _backward(
        self, request: StageRequest, kept: Sequence[KeptLayer], dy: int, name: Any, tokens: int
    ) -> None:
        """Request the backward pass of a stage's layers. Fetch the input gradient as `name`."""
        made = {names.DX: _FP32 * tokens * self.work.width}
        for number, (x, *activations) in zip(reversed(request.layers), reversed(kept), strict=True):
            layer = self.work.layers[number]
            feed = {names.X: x, names.DY: dy} | self._held(layer, request.batch)
            graph, flops = layer.backward, layer.backward_flops
            if activations and layer.from_activations is not None:
                graph, flops = layer.from_activations, layer.from_activations_flops
                feed |= zip(layer.activations, activations, strict=True)
            found = self._added(request, graph, feed, made, flops * tokens, number, layer)
            self.drop([x, *activations, dy])
            dy = found[names.DX]
        self._end_backward(request, dy, name, tokens)

    def _end_backward(self, request: StageRequest, dx: int, name: Any, tokens: int) -> None:
        """Fetch the gradient of a stage's input if it is wanted, then drop it from the device."""
        if request.dx_wanted and (request.plan.first > 0 or self.work.embeds):
            self._fetch(request, name, dx, 0, tokens, self.work.width, self.work.dtype)
        self.drop([dx])

    def _forget_masks(self, request: StageRequest) -> None:
        """Drop the layer arguments, such as masks, that only this micro-batch uses."""
        for mask in masks_of(self.work, request.layers, request.batch):
            self._forget(mask)

    def _loss(self, request: StageRequest, y: int) -> tuple[int, int]:
        """Request the loss. Return the wire IDs of the loss and of the gradient of `y`."""
        loss, tokens = self.work.loss, self.work.tokens[request.batch]
        assert loss is not None
        feed = {names.X: y, names.TARGETS: self._put(loss.targets[request.batch])}
        feed |= {name: self._put(array) for name, array in loss.parameters.items()}
        made = {names.LOSS: _FP32, names.DX: _FP32 * tokens * self.work.width}
        found = self._added(request, loss.graph, feed, made, loss.flops * tokens, LOSS_LAYER, loss)
        self._forget(loss.targets[request.batch])
        return found[names.LOSS], found[names.DX]

    def _added(
        self,
        request: StageRequest,
        graph: StageGraph,
        feed: dict[str, int],
        made: dict[str, int],
        flops: int,
        number: int,
        of: LayerWork | LossWork | SliceWork,
    ) -> dict[str, int]:
        """Request a graph run that adds gradients to sums. Return the outputs' wire IDs.

        A new sum reuses the wire ID of the old sum, unless careful mode keeps both sums.
        """
        before = {name: request.sums.get((number, name), 0) for name in of.sums}
        feed |= {names.total(name): array for name, array in before.items()}
        sizes = {names.new_total(name): shape.nbytes for name, shape in of.sums.items()}
        held = {names.new_total(name): array for name, array in before.items() if array}
        room = (self._careful_bytes or 0) - self.occupied_bytes
        keeps_both = self._careful and sum(made.values()) + sum(sizes.values()) <= room
        found = self._run(request, graph, feed, made | sizes, flops, {} if keeps_both else held)
        for name in of.sums:
            request.sums[number, name] = found[names.new_total(name)]
        if keeps_both:
            self.drop(held.values())
        return found

    def _slice(self, request: StageRequest) -> tuple[int, SliceWork, dict[str, int]]:
        """Send a loss slice's missing arrays. Return the slice's number, work and wire IDs."""
        assert request.plan.slice is not None
        number = request.plan.slice.number
        part = self.work.slice_works[number]
        held = {name: self._put(array) for name, array in part.parameters.items()}
        return number, part, held | {names.TARGETS: self._put(part.targets[request.batch])}

    def _held(self, layer: LayerWork, batch: int) -> dict[str, int]:
        """Send a layer's parameters and keyword arguments. Return their wire IDs by graph input."""
        return {name: self._put(array) for name, array in layer.inputs(batch).items()}

    # --- messages ---

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
        """Tell the device to drop the arrays with these wire IDs."""
        ids = tuple(dict.fromkeys(arrays))
        if ids:
            self.occupied_bytes -= sum(self._sizes.pop(id) for id in ids)
            self._send(messages.Drop(ids))


def _pieces(
    key: tuple[Any, ...], array: int, rows: int, columns: int, nbytes: int = _PIECE_BYTES
) -> Iterator[RowsPiece]:
    """Divide an array into blocks of rows. Each block's name is `key` and its first row."""
    step = max(1, nbytes // (_FP32 * columns))
    for first in range(0, rows, step):
        yield RowsPiece((*key, first), array, first, min(step, rows - first), columns)


def _state_names(moments: int) -> list[str]:
    return [names.WEIGHT, *map(names.moment, range(moments))]


def _item_bytes(dtype: str) -> int:
    return _FP32 if dtype == "fp32" else 2


def sums_of(work: StepWork, layer: int) -> Mapping[str, SumShape]:
    """Return the shapes of the gradient sums of a layer, of the loss, or of a loss slice.

    Args:
        layer: a layer number, `LOSS_LAYER`, or a value of `slice_layer`.
    """
    if (number := slice_of_layer(layer)) is not None:
        return work.slice_works[number].sums
    if layer != LOSS_LAYER:
        return work.layers[layer].sums
    assert work.loss is not None
    return work.loss.sums


def arrays_of(
    work: StepWork, stage: PlannedStage, kept_batches: KeptBatches = NOTHING_KEPT
) -> Iterator[StageArray | StageGraph]:
    """Yield the arrays and graphs that a device must store during a step to run a stage."""
    for layer in work.layers[stage.first : stage.stop]:
        yield from (layer.forward, layer.backward)
        if layer.from_activations is not None and kept_batches.activations:
            yield layer.from_activations
        yield from layer.parameters.values()
        yield from layer.extras.values()
    if work.resident is not None:
        for _, one in work.resident.of_stage(stage):
            yield from one.moments
    if stage.loss and work.loss is not None:
        yield work.loss.graph
        yield from work.loss.parameters.values()
    if stage.slice is not None:
        part = work.slice_works[stage.slice.number]
        yield from (part.forward, part.backward)
        yield from part.parameters.values()


def masks_of(work: StepWork, layers: range, batch: int) -> Iterable[StageArray]:
    """Return the layer arguments, such as masks, that only one micro-batch uses."""
    found = (work.layers[n].of_batch[batch] for n in layers if work.layers[n].of_batch)
    return dict.fromkeys(mask for masks in found for mask in masks.values())
