"""The messages that request micro-batch passes and gradient sums from one device."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from cleave import graph_names as names
from cleave.planner.stages.model import NOTHING_KEPT, Keep, KeptBatches, PlannedStage
from cleave.scheduler.stages.arrays import StageArray
from cleave.scheduler.stages.device_arrays import DeviceArrays, row_pieces
from cleave.scheduler.stages.work import (
    LOSS_LAYER,
    EmbeddingWork,
    KeptLayer,
    LayerWork,
    LossWork,
    RequestKind,
    SliceWork,
    StageGraph,
    StageRequest,
    StepWork,
    SumName,
    SumShape,
    slice_layer,
    slice_of_layer,
)

_FP32: Final = 4


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


class StagePasses(DeviceArrays):
    """Queues messages for a device's micro-batch passes."""

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
            dx = self._through(request, kept, put, tokens)
            self._end_backward(request, dx, name, tokens)
        self._forget_masks(request)

    def embedding_forward(self, request: StageRequest, ids: StageArray) -> None:
        """Request the embedding of a micro-batch and fetch the first stage's input."""
        work = self.work
        tokens = work.tokens[request.batch - work.batches]
        y = self._embedded(request, ids, tokens)
        self._fetch(request, names.Y, y, 0, tokens, work.width, work.dtype)
        self._forget(ids)
        self.drop([y])

    def embedding_backward(self, request: StageRequest, ids: StageArray, dy: StageArray) -> None:
        """Request the backward pass of a micro-batch's embedding, which adds to the sums."""
        self._add_embedding(request, ids, self._put(dy))
        self._forget(dy)

    def last(self, request: StageRequest, x: StageArray) -> None:
        """Request the last stage's forward pass, loss and backward pass for a micro-batch."""
        tokens = self.work.tokens[request.batch]
        embeds = self.work.inner_embedding is not None
        x_array = self._embedded(request, x, tokens) if embeds else self._put(x)
        y, kept = self._forward(request, request.layers, x_array, tokens)
        if not embeds:
            self._rename(x)
        assert self.work.loss is not None
        targets = {names.TARGETS: self.work.loss.targets[request.batch]}
        loss, dy = self._loss(request, y, tokens, targets)
        if request.kind is RequestKind.LAST:  # not if a logged step is repeated
            self._fetch(request, names.LOSS, loss, 0, 1, 1, "fp32")
        self.drop([y, loss])
        if self.work.evaluates:
            self.drop([dy, *(array for layer in kept for array in layer)])
            if embeds:
                self._forget(x)
            self._forget_masks(request)
            return
        dx = self._through(request, kept, dy, tokens)
        if embeds:
            self._add_embedding(request, x, dx)
            self.drop([dx])
        else:
            self._end_backward(request, dx, names.DX, tokens)
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

        `more_rows` later requests the sums that exceed the limit on bytes in flight.
        """
        self.drop(array for what, array in accumulator.sums.items() if what not in wanted)
        accumulator.sums = {
            what: array for what, array in accumulator.sums.items() if what in wanted
        }
        for (layer, name), array in accumulator.sums.items():
            shape = sums_of(self.work, layer)[name]
            size, dtype = (shape.rows, shape.columns), self.work.gradients
            request.rest += row_pieces((layer, name), array, *size, dtype)
        accumulator.taken = True
        self.more_rows(request)

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

    def _through(
        self, request: StageRequest, kept: Sequence[KeptLayer], dy: int, tokens: int
    ) -> int:
        """Request the backward pass of a stage's layers. Return the input gradient's wire ID."""
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
        return dy

    def _embedded(self, request: StageRequest, ids: StageArray, tokens: int) -> int:
        """Request the embedding of token IDs. Return the wire ID of the first layer's input."""
        embedding = self._embedding
        feed = {names.IDS: self._put(ids)} | self._put_all(embedding.parameters)
        made = {names.Y: _FP32 * tokens * self.work.width}
        return self._run(request, embedding.forward, feed, made, 0)[names.Y]

    def _add_embedding(self, request: StageRequest, ids: StageArray, dy: int) -> None:
        """Request the backward pass of the embedding, if it is trained, and drop the token IDs."""
        embedding = self._embedding
        if embedding.backward is not None:
            feed = {names.IDS: self._put(ids), names.DY: dy}
            feed |= self._put_all(embedding.parameters)
            self._added(request, embedding.backward, feed, {}, 0, LOSS_LAYER, embedding)
        self._forget(ids)

    def _end_backward(self, request: StageRequest, dx: int, name: Any, tokens: int) -> None:
        """Fetch the gradient of a stage's input if it is wanted, then drop it from the device."""
        if request.dx_wanted and (request.plan.first > 0 or self.work.embeds):
            self._fetch(request, name, dx, 0, tokens, self.work.width, self.work.dtype)
        self.drop([dx])

    def _forget_masks(self, request: StageRequest) -> None:
        """Drop the layer arguments, such as masks, that only this micro-batch uses."""
        for mask in masks_of(self.work, request.layers, request.batch):
            self._forget(mask)

    def _loss(
        self, request: StageRequest, y: int, tokens: int, given: Mapping[str, StageArray]
    ) -> tuple[int, int]:
        """Request the loss of a micro-batch. Return the wire IDs of the loss and `y`'s gradient.

        Args:
            given: the graph inputs of this micro-batch alone, such as targets.
        """
        loss = self.work.loss
        assert loss is not None
        feed = {names.X: y} | self._put_all({**loss.parameters, **given})
        made = {names.LOSS: _FP32, names.DX: _FP32 * tokens * self.work.width}
        found = self._added(request, loss.graph, feed, made, loss.flops * tokens, LOSS_LAYER, loss)
        for array in given.values():
            self._forget(array)
        return found[names.LOSS], found[names.DX]

    def _added(
        self,
        request: StageRequest,
        graph: StageGraph,
        feed: dict[str, int],
        made: dict[str, int],
        flops: int,
        number: int,
        of: LayerWork | LossWork | SliceWork | EmbeddingWork,
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
        held = self._put_all(part.parameters)
        return number, part, held | {names.TARGETS: self._put(part.targets[request.batch])}

    def _held(self, layer: LayerWork, batch: int) -> dict[str, int]:
        """Send a layer's parameters and keyword arguments. Return their wire IDs by graph input."""
        return self._put_all(layer.inputs(batch))

    def _put_all(self, arrays: Mapping[str, StageArray]) -> dict[str, int]:
        """Send all arrays that the device lacks. Return their wire IDs by graph input."""
        return {name: self._put(array) for name, array in arrays.items()}

    @property
    def _embedding(self) -> EmbeddingWork:
        assert self.work.embedding is not None
        return self.work.embedding


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
    return work.loss.sums if work.embedding is None else {**work.loss.sums, **work.embedding.sums}


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
        if (embedding := work.embedding) is not None:
            yield embedding.forward
            if embedding.backward is not None:
                yield embedding.backward
            yield from embedding.parameters.values()
    if stage.slice is not None:
        part = work.slice_works[stage.slice.number]
        yield from (part.forward, part.backward)
        yield from part.parameters.values()


def masks_of(work: StepWork, layers: range, batch: int) -> Iterable[StageArray]:
    """Return the layer arguments, such as masks, that only one micro-batch uses."""
    found = (work.layers[n].of_batch[batch] for n in layers if work.layers[n].of_batch)
    return dict.fromkeys(mask for masks in found for mask in masks.values())
