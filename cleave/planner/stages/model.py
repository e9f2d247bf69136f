"""The interface for stage planners: costs of models, stages and plans.

A stage is a group of consecutive layers, together with the devices that train them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, Protocol

from cleave.attention_blocks import BLOCKS, Blocks
from cleave.planner.plan import DeviceRates, PsRates

_NAMED: Final = 8  # maximum number of stages that a plan's description lists
_PIECES: Final = 4  # maximum number of chunks into which a sequence is cut
_LEAST_PIECE: Final = 128  # minimum number of tokens in a sequence chunk

# Largest factor by which sequence chunks slow down a micro-batch's computation. The run of each
# chunk reads all weights and updates all accumulated gradients.
PIECE_COST: Final = 1.6


# An AdamW update of one parameter takes a device as long as this many FLOPs of a layer. ONNX
# Runtime on two x86 cores takes 2.2 ns for an update, and computes layers at 215 GFLOP/s.
UPDATE_FLOPS: Final = 480


def pieces_of_sequence(tokens: int) -> int:
    """Return the number of chunks into which a sequence is cut for a layer without attention."""
    numbers = range(_PIECES, 1, -1)
    return next((n for n in numbers if tokens % n == 0 and tokens // n >= _LEAST_PIECE), 1)


@dataclass(frozen=True, slots=True)
class LayerCost:
    """The costs of one layer, or of the loss. FLOPs are per token.

    Attributes:
        frozen_bytes: size of the frozen parameters, which stay on devices between steps.
        weight_bytes, gradient_bytes: sizes of the trained parameters, which the PS sends in every
            step, and of their gradients, which a device returns in every step.
        sum_bytes: size of the accumulated weight gradients on a device, in fp32.
        flops: FLOPs of both passes. The backward pass recomputes the forward pass.
        working_bytes: memory per token while a graph runs, without the graph's inputs.
        largest_bytes: size of the largest parameter, in fp32.
        activation_bytes: size per token of the activations that the forward pass can retain for
            the backward pass, without the layer's input; 0 if it can retain none.
        spared_flops: FLOPs that the backward pass saves if activations are retained.
        dequantized_bytes: memory for weights dequantized to fp32, and for one matrix's codes.
        pieces: number of chunks into which a sequence is cut; 1 if the layer has attention.
        update_flops: time of the device's update of the layer in each step, expressed in FLOPs; 0
            if the PS updates the layer.
        update_bytes: memory for new values while a device updates its largest parameter; 0 if the
            PS updates the layer.
    """

    frozen_bytes: int
    weight_bytes: int
    gradient_bytes: int
    sum_bytes: int
    flops: float
    forward_flops: float
    working_bytes: float
    largest_bytes: int = 0
    activation_bytes: float = 0.0
    spared_flops: float = 0.0
    dequantized_bytes: int = 0
    pieces: int = 1
    update_flops: float = 0.0
    update_bytes: int = 0


NO_COST: Final = LayerCost(0, 0, 0, 0, 0.0, 0.0, 0.0)


class Keep(StrEnum):
    """What a device retains of a micro-batch between the forward and backward passes."""

    NOTHING = "nothing"
    """The device retains nothing. For the backward pass, the PS sends the stage's input again, and
    the device recomputes the input of each layer and each layer's forward pass."""

    INPUTS = "inputs"
    """The device retains the input of each layer, and recomputes each layer's forward pass."""

    ACTIVATIONS = "activations"
    """The device retains the input of each layer, and activations inside the layer."""


@dataclass(frozen=True, slots=True)
class KeptBatches:
    """Limits on the micro-batches that a device retains between the forward and backward passes.

    Attributes:
        inputs: maximum number of micro-batches for which the device retains only layer inputs.
        activations: maximum number for which the device also retains activations of the layers.
    """

    inputs: int = 0
    activations: int = 0

    def next(self, inputs: int, activations: int) -> Keep:
        """Return what to retain of the next micro-batch, given how many are already retained."""
        if activations < self.activations:
            return Keep.ACTIVATIONS
        return Keep.INPUTS if inputs < self.inputs else Keep.NOTHING


NOTHING_KEPT: Final = KeptBatches()


@dataclass(frozen=True, slots=True)
class PsLayers:
    """Consecutive layers that the PS computes, because devices do not support them.

    Attributes:
        before: index in `StageModel.layers` of the next layer that devices compute; the length of
            `StageModel.layers` if no such layer follows.
        flops: FLOPs per token of the forward and backward passes, without recomputation.
    """

    before: int
    forward_flops: float
    flops: float


@dataclass(frozen=True, slots=True)
class StageModel:
    """The costs of a model and the sizes of its micro-batches, as input to a stage planner.

    Attributes:
        layers: costs of the layers that devices can compute, in order.
        loss: costs of all modules after the last layer, including the LM head and the loss.
        width: elements per token of an activation between layers.
        element_bytes: bytes per element of an activation in messages.
        embeds: whether the embedding is trained, so the first layer must return its input gradient.
        coded_ratio: compressed size of weights and activations divided by their uncompressed size.
        gradient_coded_ratio: the same ratio for weight gradients.
        in_parts: whether the attention and the MLP of each layer are separate entries of `layers`.
        most_slices: maximum number of slices for a vocabulary-parallel loss, which is the number of
            tokens in the vocabulary; 1 if the loss cannot be cut into slices.
        ps_layers: layers that only the PS can compute, in order. No stage may span one. If PS
            layers follow the last entry in `layers`, the PS also computes the loss.
        beside_bytes: bytes sent per token for layer arguments that differ between micro-batches,
            such as attention masks for packed documents. The layer's input is excluded.
        head_may_move: whether the state of the LM head and the loss can be on a device.
        tied: whether the embedding and the LM head share a trained parameter. A device with the
            state of the LM head then also computes the embedding.
        embedding_bytes: size in fp32 of the trained parameters that only the embedding uses.
        resident_head: whether the state of the LM head and the loss is on a device.
    """

    layers: Sequence[LayerCost]
    loss: LayerCost
    width: int
    element_bytes: int
    tokens: Sequence[int]
    embeds: bool = True
    coded_ratio: float = 1.0
    gradient_coded_ratio: float = 1.0
    in_parts: bool = False
    most_slices: int = 1
    ps_layers: Sequence[PsLayers] = ()
    beside_bytes: float = 0.0
    head_may_move: bool = False
    tied: bool = False
    embedding_bytes: int = 0
    resident_head: bool = False

    def embeds_on_device(self, stages: Sequence[PlannedStage]) -> bool:
        """Return whether a device returns the first stage's inputs and receives their gradients.

        It does not if it has all layers, because these arrays then stay on it.
        """
        return self.tied and self.resident_head and not stages[0].is_whole

    def is_from_ids(self, stage: PlannedStage) -> bool:
        """Return whether a stage computes everything from token IDs to the loss."""
        return self.tied and self.resident_head and stage.is_whole

    @property
    def cuts(self) -> list[int]:
        """Return the indices of layers that follow PS layers. A stage must end before each."""
        return [p.before for p in self.ps_layers if 0 < p.before < len(self.layers)]

    @property
    def ends_at_ps(self) -> bool:
        """Return True if the PS computes layers that follow the last of `layers`."""
        return any(p.before == len(self.layers) for p in self.ps_layers)

    def most_pieces(self, stage: PlannedStage) -> int:
        """Return the maximum number of chunks into which a stage can cut a micro-batch.

        The number is 1 for a stage with several layers or with the loss, because these may need
        the whole sequence.
        """
        alone = stage.stop == stage.first + 1 and not stage.loss
        return self.layers[stage.first].pieces if alone else 1

    def slice_of_loss(self, share: float) -> LayerCost:
        """Return the costs of a slice that has the share `share` of the LM head's rows.

        The backward pass recomputes the logits, unless the device retains them. The costs of the
        modules before the LM head, which are small, are multiplied by `share` as well.
        """
        loss = self.loss
        sizes = loss.frozen_bytes, loss.weight_bytes, loss.gradient_bytes, loss.sum_bytes
        frozen, weights, gradients, sums = (math.ceil(nbytes * share) for nbytes in sizes)
        return LayerCost(
            frozen,
            weights,
            gradients,
            sums,
            (loss.flops + loss.forward_flops) * share,
            loss.forward_flops * share,
            loss.working_bytes * share,
            math.ceil(loss.largest_bytes * share),
            _FP32_BYTES * self.most_slices * share,
            loss.forward_flops * share,
        )


@dataclass(frozen=True, slots=True)
class PsCompute:
    """The throughput, optimizer time and network card of the parameter server.

    Attributes:
        flops_per_s: throughput in both passes of layers.
        optimizer_s: time per step, in seconds, that devices wait while the PS reads gradients,
            updates the parameters and prepares the next step.
        rates: rates of the network card; None if it is never the bottleneck.
        loss_flops_per_s: throughput in the LM head and the loss; 0 means `flops_per_s`.
        graph_flops_per_s: throughput in layer graphs; 0 means `flops_per_s`.
        parameter_s: part of `optimizer_s` for each trained parameter, in seconds.
        own_device: ID of the device on the PS's computer; None without such a device. It computes
            only while the PS computes nothing.
    """

    flops_per_s: float
    optimizer_s: float
    rates: PsRates | None = None
    loss_flops_per_s: float = 0.0
    graph_flops_per_s: float = 0.0
    parameter_s: float = 0.0
    own_device: int | None = None

    def without_updates_of(self, parameters: float) -> PsCompute:
        """Return a copy for steps in which devices update `parameters` parameters."""
        return replace(self, optimizer_s=max(0.0, self.optimizer_s - parameters * self.parameter_s))

    def loss_s(self, loss: LayerCost) -> float:
        """Return the time in seconds per token for both passes of the loss."""
        return loss.flops / (self.loss_flops_per_s or self.flops_per_s)


@dataclass(frozen=True, slots=True)
class HeadSlice:
    """Slice `number` (from 0) of a vocabulary-parallel loss: consecutive rows of the LM head.

    The LM head is cut into `of` slices. See `cleave.graphs.loss_graph`.

    Attributes:
        cuts: boundaries of all slices, starting at 0, in units of 1 / `cuts[-1]` of the LM head;
            empty if all slices have about the same number of rows.

    Example:
        >>> HeadSlice(1, 2, (0, 3, 4)).rows(1000)  # the last quarter
        (750, 1000)
    """

    number: int
    of: int
    cuts: tuple[int, ...] = ()

    @property
    def share(self) -> float:
        """Return the slice's share of the rows of the LM head."""
        cuts = self.cuts or range(self.of + 1)
        return (cuts[self.number + 1] - cuts[self.number]) / cuts[-1]

    def rows(self, vocabulary: int) -> tuple[int, int]:
        """Return the slice's first row of the LM head, and its stop (last row plus one)."""
        cuts = self.cuts or range(self.of + 1)
        first, stop = cuts[self.number], cuts[self.number + 1]
        return first * vocabulary // cuts[-1], stop * vocabulary // cuts[-1]


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """A stage (consecutive layers) or a slice of the loss, with the devices that compute it.

    Attributes:
        stop: index of the last layer plus one.
        devices: IDs of the stage's devices, at least one.
        loss: whether the stage also computes the loss. Only the last stage can.
        slice: the slice of the loss that the devices compute, instead of layers; None for a stage
            of layers. For a slice, `first` and `stop` both equal the number of layers.
        pieces: number of chunks into which a micro-batch is cut. Each chunk is a separate graph
            run, during which the device can receive and return other chunks.
    """

    first: int
    stop: int
    devices: tuple[int, ...]
    loss: bool = False
    slice: HeadSlice | None = None
    pieces: int = 1

    @property
    def is_whole(self) -> bool:
        """Return whether the stage has all layers and the loss."""
        return self.loss and not self.first

    @property
    def named(self) -> str:
        """Return a user-facing name, such as "layers 1 to 3". Layers are counted from 1."""
        if self.slice is not None:
            return f"slice {self.slice.number + 1} of {self.slice.of} of the loss"
        if self.first == self.stop:
            return "the loss"
        return f"layers {self.first + 1} to {self.stop}"


@dataclass(frozen=True, slots=True)
class StagePlan:
    """The stages of a model, and predictions for a training step.

    Attributes:
        stages: the stages in the order of the layers.
        kept_batches: numbers of micro-batches that each device may retain, by device ID.
        step_s: predicted time of a step in seconds, including the optimizer step.
        memory_bytes: predicted peak memory of each device, by device ID.
        downlink_bytes, uplink_bytes: traffic of all devices in a step, after any compression.
        reason: a clause that names what takes most of the step.
        slices: slices of the loss, in order; empty if the loss is not vocabulary-parallel.
        forward_first: whether a device that could run a pass in either direction always runs the
            forward pass. If false, the device alternates.
        own_delay: factor by which the PS's work lengthens the graph runs of the device on the PS's
            computer.
    """

    stages: tuple[PlannedStage, ...]
    kept_batches: dict[int, KeptBatches]
    step_s: float
    memory_bytes: dict[int, int]
    downlink_bytes: int
    uplink_bytes: int
    reason: str = ""
    slices: tuple[PlannedStage, ...] = ()
    forward_first: bool = False
    own_delay: float = 1.0

    @property
    def planned(self) -> tuple[PlannedStage, ...]:
        """Return all stages, followed by all slices of the loss."""
        return *self.stages, *self.slices

    @property
    def head_slices(self) -> list[HeadSlice]:
        """Return the LM head rows of each slice of the loss, in order."""
        return [each.slice for each in self.slices if each.slice is not None]

    @property
    def devices(self) -> set[int]:
        return {device for stage in self.planned for device in stage.devices}

    @property
    def loss_at_ps(self) -> bool:
        """Return True if the PS computes the loss, instead of a stage or slices on devices."""
        return not self.slices and not self.stages[-1].loss

    @property
    def where_loss(self) -> str:
        """Return where the loss is computed, as text such as "on the last stage"."""
        if not self.slices and self.stages[-1].first == self.stages[-1].stop:
            return "on 1 device"
        if not self.slices:
            return "on the server" if self.loss_at_ps else "on the last stage"
        devices = sum(len(part.devices) for part in self.slices)
        slices = _span([len(self.slices)], "slice", "slices")
        return f"in {slices} on {_span([devices], 'device', 'devices')}"

    def described(self, model: StageModel) -> str:
        """Return a user-facing description of the plan, without a full stop."""
        one, many = ("part", "parts") if model.in_parts else ("layer", "layers")
        stages = [stage for stage in self.stages if stage.first < stage.stop]
        if len(stages) > _NAMED:
            sizes = _span([stage.stop - stage.first for stage in stages], one, many)
            devices = _span([len(stage.devices) for stage in stages], "device", "devices")
            held = [f"{len(stages)} of {sizes} on {devices} each"]
        else:
            held = [
                (
                    f"{one} {stage.stop}"
                    if stage.first + 1 == stage.stop
                    else f"{many} {stage.first + 1} to {stage.stop}"
                )
                + f" on {_span([len(stage.devices)], 'device', 'devices')}"
                for stage in stages
            ]
        if model.ps_layers:
            held.append("the others on the server")
        loss, step = f"the loss {self.where_loss}", f"predicted step {self.step_s:.3g} s"
        return f"stages: {', '.join(held)}; {loss}; {step}"


def _span(numbers: Sequence[int], one: str, many: str) -> str:
    """Return the range of `numbers` as text with a noun, such as "2 to 4 layers"."""
    least, most = min(numbers), max(numbers)
    number = f"{least}" if least == most else f"{least} to {most}"
    return f"{number} {one if most == 1 else many}"


class StagePlanner(Protocol):
    """A function that divides a model into stages for a fleet."""

    def __call__(
        self, model: StageModel, devices: Sequence[DeviceRates], ps: PsCompute
    ) -> StagePlan:
        """Return the plan with the shortest predicted step among all plans tried.

        Raises:
            PlanError: if the model cannot be divided into stages for these devices.
        """
        ...


_FP32_BYTES: Final = 4
_INDEX_BYTES: Final = 2  # bytes per element: two 4-bit codes are indexed by one 32-bit integer


def working_bytes(
    matrices: Sequence[tuple[int, int]],
    width: int,
    heads: int,
    sequence: int,
    blocks: Blocks = BLOCKS,
    *,
    squeezed: bool = False,
) -> float:
    """Return the working memory of a layer's graphs, in bytes per token, without graph inputs.

    All graphs of a layer share one memory arena. The peak is in the backward graph, during the
    gradients of the MLP or of attention (see `benchmarks/layer_memory.py`).

    Args:
        matrices: shapes of the layer's weight matrices.
        width: elements per token of an activation between layers.
        heads: number of attention heads; 0 without attention.
        sequence: tokens per sequence.
        blocks: memory limits above which attention is computed in blocks of queries.
        squeezed: whether attention scores are soft-capped, as in Gemma 2.
    """
    inner = max((max(shape) for shape in matrices), default=width)
    of_mlp = sum(max(shape) == inner and min(shape) == width for shape in matrices)
    rows = blocks.rows(heads, sequence, sequence)
    scores = heads * rows  # elements per token of the scores that are computed at once
    whole = rows == sequence
    mlp = 7.5 * width + (2 + 2 * of_mlp) * inner + (scores if whole else 0)
    copies = (4.5 if whole else 7.5) + (3 if squeezed else 0)  # a Scan reuses buffers less often
    attention = 7 * width + copies * scores
    return _FP32_BYTES * max(mlp, attention)


def dequantized_bytes(elements: Sequence[int]) -> int:
    """Return the memory for a layer's dequantized matrices and for one matrix's codes, in bytes.

    The backward graph uses each dequantized matrix twice, so all of these matrices are in memory at
    the same time. `elements` is the number of elements of each matrix.
    """
    return _FP32_BYTES * sum(elements) + _INDEX_BYTES * max(elements, default=0)
