"""What one device holds for stages, and the messages that ask it for units of a step.

A device is a small store of arrays. A sum of gradients is an array like any other, but that each
backward pass puts the next one in its place, so that a device holds it once. All other arrays are
written once. A device does what it is asked in order, so that nothing is added to a sum twice.

A device that failed an order is asked *carefully* for a while: each order is sent after the answer
to the one before, and a backward pass makes new sums beside the old ones. So whatever fails can be
asked for again, and nothing else is lost.
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

_PIECE_BYTES = 8 * 2**20  # of sums in one message: others get a turn
_AWAITED_BYTES = 16 * 2**20  # of sums at once: a device holds what it was asked for twice
_FP32 = 4

STEADY_AFTER: Final = 256
"""Orders that a device does in a row before it is not asked carefully any more."""


@dataclass(slots=True, eq=False)
class Generation:
    """Holds the sums of gradients on one device, and which micro-batches are in them.

    Attributes:
        device: where they are.
        sums: the arrays that hold them, by layer's number and parameter; 0 for zeros.
        batches: that are in the sums for certain.
        asked: that were asked for, and are not answered yet.
        taken: whether the sums were asked for, after which nothing is added.
        landed: whether all of them are at the PS.
        found: the sums that have come, by layer, parameter and first row.
    """

    device: int
    sums: dict[SumName, int] = field(default_factory=dict)
    batches: set[int] = field(default_factory=set)
    asked: set[int] = field(default_factory=set)
    taken: bool = False
    landed: bool = False
    found: dict[tuple[int, str, int], Any] = field(default_factory=dict)


class StageDevice:
    """Keeps what one device holds for stages, and makes the messages that ask it for units.

    Args:
        device: its session.
        ids: where names of arrays and runs come from.

    Attributes:
        occupied_bytes: size of what it holds.
    """

    def __init__(self, device: int, ids: Names) -> None:
        self.device = device
        self.occupied_bytes = 0
        self._ids = ids
        self._sent: dict[StageArray | StageGraph, int] = {}
        self._sizes: dict[int, int] = {}
        self._out: deque[SendStage] = deque()
        self._asked: dict[int, SendStage] = {}  # by run, orders that were sent and not answered
        self._careful_bytes: int | None = None  # the device's memory, while it is asked carefully
        self._done = 0  # orders in a row

    # --- units ---

    def forward(self, work: StepWork, stage: PlannedStage, unit: Unit, x: StageArray) -> None:
        """Ask for the stage's output of a micro-batch."""
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
        """Ask for the gradient with respect to the stage's input, and add to the sums.

        Args:
            work, stage, unit: what is asked for.
            generation: the sums.
            given: the stage's input; or what was kept of its layers, or pieces.
            dy: the gradient with respect to its output.
            dx_wanted: whether that with respect to its input is to come.
        """
        layers, pieces = range(stage.first, stage.stop), stage.pieces
        tokens = work.tokens[unit.batch] // pieces
        inputs: Sequence[StageArray | Sequence[KeptLayer]]
        if isinstance(given, StageArray):
            inputs = given.pieces(pieces)
        else:  # of each piece its only layer
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
        """Ask for the loss of a micro-batch and all gradients of the last stage."""
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
        """Ask for what a slice of the loss finds of a micro-batch."""
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
        """Ask for a slice's part of the gradient of its input, and add to the sums.

        Args:
            work, stage, unit, generation, dx_wanted: see `backward`.
            given: the slice's input; or what was kept of it.
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
        """Ask for those sums of a generation that are wanted, a few at first; the others end."""
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
        """Ask for as many of the remaining sums as a device has room for.

        A device counts what it is asked for against its memory until it has sent it.
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
        """Say whether the device has an array or a graph, or is being sent it."""
        return array in self._sent

    def load(self, arrays: Iterable[StageArray | StageGraph]) -> None:
        """Send what the device will need, unless it holds it."""
        for array in arrays:
            if isinstance(array, StageGraph):
                self._put_graph(array)
            else:
                self._put(array)

    def keep_only(self, wanted: Iterable[StageArray | StageGraph]) -> None:
        """Drop everything that is not wanted any more."""
        keep = {self._sent[w] for w in wanted if w in self._sent}
        self._sent = {what: id for what, id in self._sent.items() if id in keep}
        self._drop([id for id in self._sizes if id not in keep])

    def drop(self, arrays: Iterable[int]) -> None:
        """Drop arrays that the device made."""
        self._drop(arrays)

    def take(self) -> list[SendStage]:
        """Return the messages that are to be sent now, once."""
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
        """Say whether messages wait for the answer to an order."""
        return bool(self._out)

    @property
    def _careful(self) -> bool:
        return self._careful_bytes is not None

    def be_careful(self, memory_bytes: int) -> None:
        """Ask a device carefully from now on, until it does what it is asked.

        Args:
            memory_bytes: how much it may hold.
        """
        self._careful_bytes, self._done = memory_bytes, 0

    def answered(self, run: int) -> None:
        """Note that the device did an order."""
        if self._asked.pop(run, None) is not None:
            self._done += 1
            if self._done >= STEADY_AFTER:
                self._careful_bytes = None

    def ask_again(self, run: int, unit: Unit) -> bool:
        """Ask once more for an order of a unit that the device could not do.

        Returns:
            False where that cannot be: others that were sent may need it, or it took a sum with it.
        """
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
        """Cancel all orders, and drop everything that is not wanted any more."""
        if self._asked:
            self._send(messages.Cancel(tuple(self._asked)))
        self.end(wanted)

    def end(self, wanted: Iterable[StageArray | StageGraph] = ()) -> None:
        """Ask for nothing more, and drop everything that is not wanted any more."""
        self._asked = {}
        self._out = deque(sent for sent in self._out if sent.task is None)
        self.keep_only(wanted)

    # --- parts of units ---

    def _forward(
        self, work: StepWork, layers: range, unit: Unit, x: int, tokens: int
    ) -> tuple[int, list[KeptLayer]]:
        """Run layers; return the output and what there is of each layer then."""
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
        """Run the backward passes of layers, last first, adding to the sums; return dx."""
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
        """Ask for the gradient of a stage's input, if it is wanted; drop it."""
        if dx_wanted and (stage.first > 0 or work.embeds):
            self._fetch(unit, name, dx, 0, tokens, work.width, work.dtype)
        self._drop([dx])

    def _forget_masks(self, work: StepWork, layers: range, batch: int) -> None:
        """Drop what layers are called with for this micro-batch and not for every other."""
        for mask in masks_of(work, layers, batch):
            self._forget(mask)

    def _loss(
        self, work: StepWork, loss: LossWork, unit: Unit, generation: Generation, y: int
    ) -> tuple[int, int]:
        """Run the loss; return it and the gradient of its input, as arrays."""
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
        """Run a graph that adds gradients to sums. They keep their ids where it may not fail."""
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
        """Send what a slice of the loss needs beside its input; return it, and its arrays."""
        assert stage.slice is not None
        part = work.slice_works[stage.slice.number]
        held = {name: self._put(array) for name, array in part.parameters.items()}
        return part, held | {names.TARGETS: self._put(part.targets[batch])}

    def _held(self, layer: LayerWork, batch: int) -> dict[str, int]:
        """Send what a layer needs beside its input; return its arrays by graph input."""
        return {name: self._put(array) for name, array in layer.inputs(batch).items()}

    @staticmethod
    def _activation_bytes(work: StepWork, batch: int) -> int:
        """Return the size of an activation on a device, in fp32."""
        return _FP32 * work.tokens[batch] * work.width

    # --- messages ---

    def _send(
        self,
        message: Message,
        task: Task | None = None,
        kind: TrafficKind = TrafficKind.OTHER,
    ) -> None:
        """Queue a message; with a task, an answer to it is expected."""
        self._out.append(SendStage(self.device, message, task, kind))

    def _next_array(self, nbytes: int) -> int:
        """Return the id of a new array on the device."""
        self._ids.arrays += 1
        self._sizes[self._ids.arrays] = nbytes
        self.occupied_bytes += nbytes
        return self._ids.arrays

    def _next_run(self, unit: Unit, name: Any, output_bytes: int, flops: int, form: Any) -> Task:
        """Return the task of a new order."""
        self._ids.runs += 1
        unit.answers[self._ids.runs] = output_bytes
        unit.flops += flops
        return Task(0, (), flops, output_bytes, StageOrder(unit, name, *form))

    def _put(self, array: StageArray) -> int:
        """Return the id of an array, which is sent unless the device holds it."""
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
        """Send a part of an array, which has a name of its own until the whole takes it."""
        self._ids.arrays += 1
        self._send_put(self._ids.arrays, part)
        return self._ids.arrays

    def _send_put(self, id: int, array: StageArray) -> None:
        """Queue the `put` of an array."""
        put = messages.Put(id, array.rows, array.columns, array.dtype, array.payload)
        self._send(put, kind=array.kind)

    def _put_graph(self, graph: StageGraph) -> int:
        """Return the id of a graph, which is sent unless the device holds it."""
        id = self._sent.get(graph)
        if id is None:
            id = self._sent[graph] = self._next_array(graph.nbytes)
            self._send(messages.Graph(id, graph.model), kind=TrafficKind.GRAPHS)
        return id

    def _forget(self, array: StageArray) -> None:
        """Drop an array that the device was sent."""
        self._drop([self._sent.pop(array)])

    def _rename(self, array: StageArray) -> None:
        """Keep an array under its id alone: it will be dropped by that."""
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
        """Run a graph; return the arrays that it makes: those in `held`, and new ones."""
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
        """Ask for rows of an array, to be kept under a name in the unit."""
        nbytes = rows * columns * _item_bytes(out)
        task = self._next_run(unit, name, nbytes, 0, (rows, columns, out))
        self._send(messages.Fetch(self._ids.runs, array, first, rows, columns, out), task)

    def _drop(self, arrays: Iterable[int]) -> None:
        """Drop arrays and graphs."""
        ids = tuple(dict.fromkeys(arrays))
        if ids:
            self.occupied_bytes -= sum(self._sizes.pop(id) for id in ids)
            self._send(messages.Drop(ids))


def _item_bytes(dtype: str) -> int:
    """Return the size of an element."""
    return _FP32 if dtype == "fp32" else 2


def sums_of(work: StepWork, layer: int) -> Mapping[str, SumShape]:
    """Return the sums of a layer, of the loss, or of a slice of it."""
    if (number := slice_of_layer(layer)) is not None:
        return work.slice_works[number].sums
    if layer != LOSS_LAYER:
        return work.layers[layer].sums
    assert work.loss is not None
    return work.loss.sums


def arrays_of(
    work: StepWork, stage: PlannedStage, kept_batches: KeptBatches = NOTHING_KEPT
) -> Iterator[StageArray | StageGraph]:
    """Yield what a device of a stage needs all through a step, if it keeps so much."""
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
    """Return what layers are called with for a micro-batch and not for every other."""
    found = (work.layers[n].of_batch[batch] for n in layers if work.layers[n].of_batch)
    return dict.fromkeys(mask for masks in found for mask in masks.values())
