"""One device's arrays for stages, and the messages for its micro-batch passes.

A device is a small store of arrays. Arrays are written once, except for gradient sums: each
backward pass replaces a sum, so a device holds it only once. A device executes orders in sequence,
so nothing is added to a sum twice.

After a failed order, a device is asked *carefully* for a while. Each order is sent after the answer
to the previous one. If memory allows, a backward pass keeps the old sums until the new ones are
complete, so a failed order can be repeated and nothing else is lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
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
    SliceWork,
    StageGraph,
    StageOrder,
    StepWork,
    SumName,
    SumPiece,
    SumShape,
    Unit,
    UnitKind,
    slice_layer,
    slice_of_layer,
)
from cleave.scheduler.tiles.device_memory import Names
from cleave.scheduler.tiles.tasks import Task
from cleave.scheduler.traffic import TrafficKind

_PIECE_BYTES = 8 * 2**20  # of sums per message, so that other messages get a turn
_AWAITED_BYTES = 16 * 2**20  # of requested sums, which a device holds twice
_FP32 = 4

STEADY_AFTER: Final = 256
"""Number of consecutive completed orders after which a device is no longer asked carefully."""


@dataclass(slots=True, eq=False)
class Generation:
    """Gradient sums on one device, with the micro-batches that they contain.

    Attributes:
        device: the device that holds the sums.
        sums: wire ids of the sums, by layer number and parameter; 0 stands for zeros.
        batches: micro-batches that are certainly in the sums.
        asked: micro-batches whose backward pass is in flight.
        taken: whether the PS requested the sums, after which nothing is added.
        landed: whether all sums are at the PS.
        found: sums received, by layer, parameter and first row.
    """

    device: int
    sums: dict[SumName, int] = field(default_factory=dict)
    batches: set[int] = field(default_factory=set)
    asked: set[int] = field(default_factory=set)
    taken: bool = False
    landed: bool = False
    found: dict[tuple[int, str, int], Any] = field(default_factory=dict)


class StageDevice:
    """Tracks one device's arrays for stages, and makes the messages for its passes.

    Args:
        device: the device's session id.
        ids: the source of array and run ids.

    Attributes:
        occupied_bytes: bytes of the arrays and graphs on the device.
    """

    def __init__(self, device: int, ids: Names) -> None:
        self.device = device
        self.occupied_bytes = 0
        self._ids = ids
        self._sent: dict[StageArray | StageGraph, int] = {}
        self._sizes: dict[int, int] = {}
        self._out: deque[SendStage] = deque()
        self._asked: dict[int, SendStage] = {}  # orders in flight, by run
        self._careful_bytes: int | None = None  # the device's memory in careful mode
        self._done = 0  # consecutive completed orders

    # --- micro-batch passes ---

    def forward(self, work: StepWork, stage: PlannedStage, unit: Unit, x: StageArray) -> None:
        """Request the stage's output for a micro-batch."""
        layers, pieces = range(stage.first, stage.stop), stage.pieces
        tokens = work.tokens[unit.batch] // pieces
        for number, piece in enumerate(x.pieces(pieces)):
            y, kept = self._forward(work, layers, unit, self._put(piece), tokens)
            name = (names.Y, number) if pieces > 1 else names.Y
            self._fetch(unit, name, y, 0, tokens, work.width, work.dtype)
            self._rename(piece)
            if unit.keep is Keep.NOTHING:
                self._drop(id for layer in kept for id in layer)
            else:
                unit.kept = [*unit.kept, *kept]
            self._drop([y])
        if unit.keep is Keep.NOTHING:
            self._forget_masks(work, layers, unit.batch)

    def backward(
        self,
        work: StepWork,
        stage: PlannedStage,
        unit: Unit,
        generation: Generation,
        given: StageArray | Sequence[KeptLayer],
        dy: StageArray,
        *,
        dx_wanted: bool = True,
    ) -> None:
        """Request the gradient of the stage's input, and add weight gradients to the sums.

        Args:
            work, stage, unit: the step, its stage and the pass.
            generation: the sums.
            given: the stage's input, or the kept arrays of each layer or sequence chunk.
            dy: the gradient of the stage's output.
            dx_wanted: whether the gradient of the stage's input is returned.
        """
        layers, pieces = range(stage.first, stage.stop), stage.pieces
        tokens = work.tokens[unit.batch] // pieces
        inputs: Sequence[StageArray | Sequence[KeptLayer]]
        if isinstance(given, StageArray):
            inputs = given.pieces(pieces)
        else:  # each chunk has one layer
            inputs = [given] if pieces == 1 else [[layer] for layer in given]
        for number, (x, piece) in enumerate(zip(inputs, dy.pieces(pieces), strict=True)):
            if isinstance(x, StageArray):
                last, kept = self._forward(work, layers[:-1], unit, self._put(x), tokens)
                kept = [*kept, (last,)]
                self._rename(x)
            else:
                kept = list(x)
            put = self._put(piece)
            self._rename(piece)
            dx = self._backward(work, layers, unit, generation, kept, put, tokens)
            name = (names.DX, number) if pieces > 1 else names.DX
            self._end_backward(work, stage, unit, dx, name, tokens, dx_wanted=dx_wanted)
        self._forget_masks(work, layers, unit.batch)

    def last(
        self,
        work: StepWork,
        stage: PlannedStage,
        unit: Unit,
        generation: Generation,
        x: StageArray,
        *,
        dx_wanted: bool = True,
    ) -> None:
        """Request a micro-batch's loss and all gradients of the last stage."""
        assert work.loss is not None
        layers = range(stage.first, stage.stop)
        tokens = work.tokens[unit.batch]
        y, kept = self._forward(work, layers, unit, self._put(x), tokens)
        self._rename(x)
        loss, dy = self._loss(work, work.loss, unit, generation, y)
        self._fetch(unit, names.LOSS, loss, 0, 1, 1, "fp32")
        self._drop([y, loss])
        dx = self._backward(work, layers, unit, generation, kept, dy, tokens)
        self._end_backward(work, stage, unit, dx, names.DX, tokens, dx_wanted=dx_wanted)
        self._forget_masks(work, layers, unit.batch)

    def slice_forward(self, work: StepWork, stage: PlannedStage, unit: Unit, x: StageArray) -> None:
        """Request the forward result of a slice of the loss for a micro-batch."""
        part, held = self._slice(work, stage, unit.batch)
        tokens = work.tokens[unit.batch]
        x_array = self._put(x)
        made = {names.Y: _FP32 * names.SLICE_COLUMNS * tokens}
        flops = round(part.forward_flops * tokens)
        found = self._run(unit, part.forward, {names.X: x_array} | held, made, flops)
        self._fetch(unit, names.Y, found[names.Y], 0, tokens, names.SLICE_COLUMNS, "fp32")
        self._rename(x)
        self._forget(part.targets[unit.batch])
        if unit.keep is Keep.NOTHING:
            self._drop([x_array])
        else:
            unit.kept = [(x_array,)]
        self._drop([found[names.Y]])

    def slice_backward(
        self,
        work: StepWork,
        stage: PlannedStage,
        unit: Unit,
        generation: Generation,
        given: StageArray | Sequence[KeptLayer],
        total: StageArray,
        *,
        dx_wanted: bool = True,
    ) -> None:
        """Request a slice's part of the gradient of its input, and add to the sums.

        Args:
            work, stage, unit, generation, dx_wanted: see `backward`.
            given: the slice's input, or its kept arrays.
            total: the log-sum-exp over the whole vocabulary.
        """
        assert stage.slice is not None
        part, held = self._slice(work, stage, unit.batch)
        tokens = work.tokens[unit.batch]
        if isinstance(given, StageArray):
            x = self._put(given)
            self._rename(given)
        else:
            ((x, *_),) = given
        feed = {names.X: x, names.DY: self._put(total)} | held
        made = {names.DX: self._activation_bytes(work, unit.batch)}
        flops = round(part.backward_flops * tokens)
        layer = slice_layer(stage.slice.number)
        found = self._added(unit, part.backward, feed, made, flops, generation, layer, part)
        self._forget(total)
        self._forget(part.targets[unit.batch])
        if dx_wanted:
            self._fetch(unit, names.DX, found[names.DX], 0, tokens, work.width, work.dtype)
        self._drop([x, found[names.DX]])

    def sums(
        self, work: StepWork, unit: Unit, generation: Generation, wanted: Container[SumName]
    ) -> None:
        """Request the wanted sums of a generation, a few at a time, and drop the other sums."""
        self._drop(array for what, array in generation.sums.items() if what not in wanted)
        generation.sums = {what: array for what, array in generation.sums.items() if what in wanted}
        for (layer, name), array in generation.sums.items():
            shape = sums_of(work, layer)[name]
            step = max(1, _PIECE_BYTES // (_FP32 * shape.columns))
            for first in range(0, shape.rows, step):
                rows = min(step, shape.rows - first)
                unit.rest.append(SumPiece((layer, name, first), array, rows, shape.columns))
        generation.taken = True
        self.more_sums(work, unit)

    def more_sums(self, work: StepWork, unit: Unit) -> None:
        """Request as many of the remaining sums as the device has room for.

        A device counts requested sums against its memory until it has sent them.
        """
        while unit.rest:
            piece = unit.rest[0]
            nbytes = piece.rows * piece.columns * _item_bytes(work.gradients)
            if unit.answers and sum(unit.answers.values()) + nbytes > _AWAITED_BYTES:
                return
            unit.rest.popleft()
            first = piece.name[2]
            self._fetch(
                unit, piece.name, piece.array, first, piece.rows, piece.columns, work.gradients
            )

    # --- memory ---

    def holds(self, array: StageArray | StageGraph) -> bool:
        """Return whether the device has an array or a graph, or is being sent it."""
        return array in self._sent

    def load(self, arrays: Iterable[StageArray | StageGraph]) -> None:
        """Send the arrays and graphs that the device does not hold."""
        for array in arrays:
            if isinstance(array, StageGraph):
                self._put_graph(array)
            else:
                self._put(array)

    def keep_only(self, wanted: Iterable[StageArray | StageGraph]) -> None:
        """Drop everything that is no longer wanted."""
        keep = {self._sent[w] for w in wanted if w in self._sent}
        self._sent = {what: id for what, id in self._sent.items() if id in keep}
        self._drop([id for id in self._sizes if id not in keep])

    def drop(self, arrays: Iterable[int]) -> None:
        """Drop arrays that the device computed."""
        self._drop(arrays)

    def take(self) -> list[SendStage]:
        """Return, once, the messages to send now."""
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
        """Return whether messages wait for the answer to an order."""
        return bool(self._out)

    @property
    def _careful(self) -> bool:
        return self._careful_bytes is not None

    def be_careful(self, memory_bytes: int) -> None:
        """Ask the device carefully until it has completed `STEADY_AFTER` orders in a row.

        Args:
            memory_bytes: the device's memory.
        """
        self._careful_bytes, self._done = memory_bytes, 0

    def answered(self, run: int) -> None:
        """Record a completed order."""
        if self._asked.pop(run, None) is not None:
            self._done += 1
            if self._done >= STEADY_AFTER:
                self._careful_bytes = None

    def ask_again(self, run: int, unit: Unit) -> bool:
        """Repeat a failed order; return False if later orders may use it or it replaced a sum."""
        failed = self._asked.pop(run, None)
        self._done = 0
        if failed is None or not (self._careful or unit.kind is UnitKind.SUMS):
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
        unit.answers[self._ids.runs] = unit.answers.pop(run)
        again.append(replace(failed, message=replace(message, id=self._ids.runs)))
        self._out.extendleft(reversed(again))
        return True

    def start_over(self, wanted: Iterable[StageArray | StageGraph] = ()) -> None:
        """Cancel all orders, and drop everything that is no longer wanted."""
        if self._asked:
            self._send(messages.Cancel(tuple(self._asked)))
        self.end(wanted)

    def end(self, wanted: Iterable[StageArray | StageGraph] = ()) -> None:
        """Discard all orders, and drop everything that is no longer wanted."""
        self._asked = {}
        self._out = deque(sent for sent in self._out if sent.task is None)
        self.keep_only(wanted)

    # --- parts of passes ---

    def _forward(
        self, work: StepWork, layers: range, unit: Unit, x: int, tokens: int
    ) -> tuple[int, list[KeptLayer]]:
        """Run layers; return the output and the kept arrays of each layer."""
        kept: list[KeptLayer] = []
        for number in layers:
            layer = work.layers[number]
            feed = {names.X: x} | self._held(layer, unit.batch)
            made = {names.Y: _FP32 * tokens * work.width}
            if unit.keep is Keep.ACTIVATIONS:
                samples = tokens // layer.sample_tokens
                made |= {name: each * samples for name, each in layer.activations.items()}
            found = self._run(unit, layer.forward, feed, made, layer.forward_flops * tokens)
            kept.append((x, *(found[name] for name in made if name != names.Y)))
            x = found[names.Y]
        return x, kept

    def _backward(
        self,
        work: StepWork,
        layers: range,
        unit: Unit,
        generation: Generation,
        kept: Sequence[KeptLayer],
        dy: int,
        tokens: int,
    ) -> int:
        """Run layers backward, last first, adding to the sums; return dx."""
        made = {names.DX: _FP32 * tokens * work.width}
        for number, (x, *activations) in zip(reversed(layers), reversed(kept), strict=True):
            layer = work.layers[number]
            feed = {names.X: x, names.DY: dy} | self._held(layer, unit.batch)
            graph, flops = layer.backward, layer.backward_flops
            if activations and layer.from_activations is not None:
                graph, flops = layer.from_activations, layer.from_activations_flops
                feed |= zip(layer.activations, activations, strict=True)
            found = self._added(unit, graph, feed, made, flops * tokens, generation, number, layer)
            self._drop([x, *activations, dy])
            dy = found[names.DX]
        return dy

    def _end_backward(
        self,
        work: StepWork,
        stage: PlannedStage,
        unit: Unit,
        dx: int,
        name: Any,
        tokens: int,
        *,
        dx_wanted: bool,
    ) -> None:
        """Request the gradient of a stage's input, if it is wanted, and drop it on the device."""
        if dx_wanted and (stage.first > 0 or work.embeds):
            self._fetch(unit, name, dx, 0, tokens, work.width, work.dtype)
        self._drop([dx])

    def _forget_masks(self, work: StepWork, layers: range, batch: int) -> None:
        """Drop the layer arguments that belong to this micro-batch alone, such as masks."""
        for mask in masks_of(work, layers, batch):
            self._forget(mask)

    def _loss(
        self, work: StepWork, loss: LossWork, unit: Unit, generation: Generation, y: int
    ) -> tuple[int, int]:
        """Run the loss; return the loss and the gradient of its input, as wire ids."""
        feed = {names.X: y, names.TARGETS: self._put(loss.targets[unit.batch])}
        feed |= {name: self._put(array) for name, array in loss.parameters.items()}
        made = {names.LOSS: _FP32, names.DX: self._activation_bytes(work, unit.batch)}
        flops = loss.flops * work.tokens[unit.batch]
        found = self._added(unit, loss.graph, feed, made, flops, generation, LOSS_LAYER, loss)
        self._forget(loss.targets[unit.batch])
        return found[names.LOSS], found[names.DX]

    def _added(
        self,
        unit: Unit,
        graph: StageGraph,
        feed: dict[str, int],
        made: dict[str, int],
        flops: int,
        generation: Generation,
        number: int,
        of: LayerWork | LossWork | SliceWork,
    ) -> dict[str, int]:
        """Run a graph that adds to sums. Sums keep their ids unless old and new ones coexist."""
        before = {name: generation.sums.get((number, name), 0) for name in of.sums}
        feed |= {names.total(name): array for name, array in before.items()}
        sizes = {names.new_total(name): shape.nbytes for name, shape in of.sums.items()}
        held = {names.new_total(name): array for name, array in before.items() if array}
        room = (self._careful_bytes or 0) - self.occupied_bytes
        beside = self._careful and sum(made.values()) + sum(sizes.values()) <= room
        found = self._run(unit, graph, feed, made | sizes, flops, {} if beside else held)
        for name in of.sums:
            generation.sums[number, name] = found[names.new_total(name)]
        if beside:
            self._drop(held.values())
        return found

    def _slice(
        self, work: StepWork, stage: PlannedStage, batch: int
    ) -> tuple[SliceWork, dict[str, int]]:
        """Send a slice's arguments apart from its input; return the slice and its wire ids."""
        assert stage.slice is not None
        part = work.slice_works[stage.slice.number]
        held = {name: self._put(array) for name, array in part.parameters.items()}
        return part, held | {names.TARGETS: self._put(part.targets[batch])}

    def _held(self, layer: LayerWork, batch: int) -> dict[str, int]:
        """Send a layer's arguments apart from its input; return their wire ids by graph input."""
        return {name: self._put(array) for name, array in layer.inputs(batch).items()}

    @staticmethod
    def _activation_bytes(work: StepWork, batch: int) -> int:
        return _FP32 * work.tokens[batch] * work.width

    # --- messages ---

    def _send(
        self,
        message: Message,
        task: Task | None = None,
        kind: TrafficKind = TrafficKind.OTHER,
    ) -> None:
        """Queue a message. With a task, the device must answer."""
        self._out.append(SendStage(self.device, message, task, kind))

    def _next_array(self, nbytes: int) -> int:
        self._ids.arrays += 1
        self._sizes[self._ids.arrays] = nbytes
        self.occupied_bytes += nbytes
        return self._ids.arrays

    def _next_run(self, unit: Unit, name: Any, output_bytes: int, flops: int, form: Any) -> Task:
        self._ids.runs += 1
        unit.answers[self._ids.runs] = output_bytes
        unit.flops += flops
        return Task(0, (), flops, output_bytes, StageOrder(unit, name, *form))

    def _put(self, array: StageArray) -> int:
        """Return an array's id, after sending the array unless the device holds it."""
        id = self._sent.get(array)
        if id is None:
            id = self._sent[array] = self._next_array(array.nbytes)
            if array.parts:
                parts = tuple(self._put_part(part) for part in array.parts)
                self._send(messages.Concat(id, parts), kind=array.kind)
            else:
                self._send_put(id, array)
        return id

    def _put_part(self, part: StageArray) -> int:
        """Send a part of an array under its own id, which ends when the parts are concatenated."""
        self._ids.arrays += 1
        self._send_put(self._ids.arrays, part)
        return self._ids.arrays

    def _send_put(self, id: int, array: StageArray) -> None:
        put = messages.Put(id, array.rows, array.columns, array.dtype, array.payload)
        self._send(put, kind=array.kind)

    def _put_graph(self, graph: StageGraph) -> int:
        id = self._sent.get(graph)
        if id is None:
            id = self._sent[graph] = self._next_array(graph.nbytes)
            self._send(messages.Graph(id, graph.model), kind=TrafficKind.GRAPHS)
        return id

    def _forget(self, array: StageArray) -> None:
        self._drop([self._sent.pop(array)])

    def _rename(self, array: StageArray) -> None:
        """Forget an array's name; it is now dropped by its id."""
        self._sent.pop(array)

    def _run(
        self,
        unit: Unit,
        graph: StageGraph,
        feed: Mapping[str, int],
        made: Mapping[str, int],
        flops: int,
        held: Mapping[str, int] | None = None,
    ) -> dict[str, int]:
        """Run a graph; return the ids of its outputs: those in `held`, and new ones."""
        id = self._put_graph(graph)
        new = {n: self._next_array(nbytes) for n, nbytes in made.items() if n not in (held or {})}
        found = {**new, **(held or {})}
        task = self._next_run(unit, None, 0, flops, ())
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
        self, unit: Unit, name: Any, array: int, first: int, rows: int, columns: int, out: str
    ) -> None:
        """Request rows of an array, to be stored in the unit under `name`."""
        nbytes = rows * columns * _item_bytes(out)
        task = self._next_run(unit, name, nbytes, 0, (rows, columns, out))
        self._send(messages.Fetch(self._ids.runs, array, first, rows, columns, out), task)

    def _drop(self, arrays: Iterable[int]) -> None:
        ids = tuple(dict.fromkeys(arrays))
        if ids:
            self.occupied_bytes -= sum(self._sizes.pop(id) for id in ids)
            self._send(messages.Drop(ids))


def _item_bytes(dtype: str) -> int:
    return _FP32 if dtype == "fp32" else 2


def sums_of(work: StepWork, layer: int) -> Mapping[str, SumShape]:
    """Return the sums of a layer, of the loss, or of a slice of the loss."""
    if (number := slice_of_layer(layer)) is not None:
        return work.slice_works[number].sums
    if layer != LOSS_LAYER:
        return work.layers[layer].sums
    assert work.loss is not None
    return work.loss.sums


def arrays_of(
    work: StepWork, stage: PlannedStage, kept_batches: KeptBatches = NOTHING_KEPT
) -> Iterator[StageArray | StageGraph]:
    """Yield the arrays and graphs that a device of a stage needs throughout a step."""
    for layer in work.layers[stage.first : stage.stop]:
        yield from (layer.forward, layer.backward)
        if layer.from_activations is not None and kept_batches.activations:
            yield layer.from_activations
        yield from layer.parameters.values()
        yield from layer.beside.values()
    if stage.loss and work.loss is not None:
        yield work.loss.graph
        yield from work.loss.parameters.values()
    if stage.slice is not None:
        part = work.slice_works[stage.slice.number]
        yield from (part.forward, part.backward)
        yield from part.parameters.values()


def masks_of(work: StepWork, layers: range, batch: int) -> Iterable[StageArray]:
    """Return the layer arguments that belong to one micro-batch alone, such as masks."""
    found = (work.layers[n].of_batch[batch] for n in layers if work.layers[n].of_batch)
    return dict.fromkeys(mask for masks in found for mask in masks.values())
