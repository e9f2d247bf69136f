"""The interface of stage planners: models, stages and plans.

A stage consists of consecutive layers of a model and of the devices that train these layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from cleave.planner.plan import DeviceRates, PsRates

_NAMED: Final = 8
"""Maximum number of stages that a plan's description lists one by one."""

_PIECES: Final = 4
"""Maximum number of chunks into which a sequence is cut."""

_LEAST_PIECE: Final = 128
"""Minimum number of tokens in a sequence chunk."""

PIECE_COST: Final = 1.6
"""Largest factor by which sequence chunks slow down a micro-batch's computation.

The run of each chunk reads all weights, and adds its gradients to all accumulated gradients.
"""


def pieces_of_sequence(tokens: int) -> int:
    """Return the number of chunks into which a layer without attention cuts each sequence.

    Args:
        tokens: tokens per sequence.
    """
    return next((n for n in range(_PIECES, 1, -1) if _fits(tokens, n)), 1)


def _fits(tokens: int, pieces: int) -> bool:
    return tokens % pieces == 0 and tokens // pieces >= _LEAST_PIECE


@dataclass(frozen=True, slots=True)
class LayerCost:
    """The costs of one layer, or of the loss.

    Attributes:
        frozen_bytes: size of the frozen parameters, which stay on devices between steps.
        weight_bytes: size of the trained parameters, which are sent to a device in every step.
        gradient_bytes: size of the weight gradients that a device returns in every step.
        sum_bytes: size of the accumulated weight gradients on a device, in fp32.
        flops: FLOPs per token of the forward and the backward pass. The backward pass recomputes
            the forward pass.
        forward_flops: FLOPs per token of the forward pass alone.
        working_bytes: memory per token while a graph runs, without the graph's inputs.
        largest_bytes: size of the largest parameter, in fp32.
        activation_bytes: size per token of the activations, other than the layer's input, that the
            forward pass can retain for the backward pass; 0 if none can be retained.
        spared_flops: FLOPs per token that the backward pass saves if activations are retained.
        dequantized_bytes: memory for weights dequantized to fp32, and for the integer codes of one
            weight.
        pieces: number of chunks into which a sequence can be cut; 1 if tokens depend on each other.
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


class Keep(StrEnum):
    """What a device retains of a micro-batch between a stage's forward and backward passes."""

    NOTHING = "nothing"
    """The device retains nothing. For the backward pass, the PS sends the stage's input again, and
    the device recomputes the input of each layer and each layer's forward pass."""

    INPUTS = "inputs"
    """The device retains the input of each layer, and recomputes each layer's forward pass."""

    ACTIVATIONS = "activations"
    """The device retains the input of each layer and the results of its matrix multiplications."""


@dataclass(frozen=True, slots=True)
class KeptBatches:
    """How many micro-batches a device may retain between their forward and backward passes.

    Attributes:
        inputs: number of micro-batches of which the device retains only the layer inputs.
        activations: number of micro-batches of which the device retains all activations. As long
            as fewer are retained, the next micro-batch is retained with all activations.
    """

    inputs: int = 0
    activations: int = 0

    def next(self, inputs: int, activations: int) -> Keep:
        """Return what to retain of the next micro-batch.

        Args:
            inputs, activations: number of micro-batches of which the device already retains only
                the layer inputs, or all activations.
        """
        if activations < self.activations:
            return Keep.ACTIVATIONS
        return Keep.INPUTS if inputs < self.inputs else Keep.NOTHING


NOTHING_KEPT: Final = KeptBatches()


@dataclass(frozen=True, slots=True)
class PsLayers:
    """Consecutive layers that the PS computes, because devices do not support them.

    Attributes:
        before: index, among the layers that devices compute, of the layer that follows. If no such
            layer follows, the number of layers that devices compute.
        forward_flops: FLOPs per token of the forward pass.
        flops: FLOPs per token of the forward and the backward pass, without recomputation.
    """

    before: int
    forward_flops: float
    flops: float


@dataclass(frozen=True, slots=True)
class StageModel:
    """The costs of a model and the micro-batches of a batch, as input of a stage planner.

    Attributes:
        layers: costs of the layers that devices can compute, in order.
        loss: costs of all modules after the last layer, including the LM head and the loss.
        width: elements per token of an activation between layers.
        element_bytes: bytes per element of an activation in messages.
        tokens: number of tokens in each micro-batch.
        embeds: whether the input gradient of the first layer is needed, to train the embedding.
        coded_ratio: compressed size of weights and activations divided by uncompressed size.
        gradient_coded_ratio: compressed size of weight gradients divided by uncompressed size.
        in_parts: whether each layer is divided, so that attention and MLP are separate entries of
            `layers`.
        most_slices: maximum number of slices for a vocabulary-parallel loss; 1 if the loss cannot
            be cut into slices.
        ps_layers: layers that only the PS can compute, in order. A stage cannot contain layers on
            both sides of such a layer. If one follows the last of `layers`, the PS computes the
            loss.
        beside_bytes: size per token in messages of layer arguments, other than the input, that
            differ between micro-batches, such as masks of packed documents.
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

    @property
    def cuts(self) -> list[int]:
        """Return the indices of layers before which a stage must end, because PS layers precede."""
        return [p.before for p in self.ps_layers if 0 < p.before < len(self.layers)]

    @property
    def ends_at_ps(self) -> bool:
        """Return True if the PS computes layers that follow the last of `layers`."""
        return any(p.before == len(self.layers) for p in self.ps_layers)

    def most_pieces(self, stage: PlannedStage) -> int:
        """Return the maximum number of chunks into which a stage can cut a micro-batch.

        The result is 1 for a stage with several layers or with the loss, because later layers or
        the loss may need the whole sequence.
        """
        alone = stage.stop == stage.first + 1 and not stage.loss
        return self.layers[stage.first].pieces if alone else 1

    def slice_of_loss(self, count: int) -> LayerCost:
        """Return the costs of one slice of a loss that is cut into `count` slices.

        The backward pass of a slice recomputes the logits of the slice. The small modules before
        the LM head are ignored.
        """

        def part(nbytes: int) -> int:
            return -(-nbytes // count)

        loss = self.loss
        return LayerCost(
            part(loss.frozen_bytes),
            part(loss.weight_bytes),
            part(loss.gradient_bytes),
            part(loss.sum_bytes),
            (loss.flops + loss.forward_flops) / count,
            loss.forward_flops / count,
            loss.working_bytes / count,
            part(loss.largest_bytes),
        )


@dataclass(frozen=True, slots=True)
class PsCompute:
    """The throughput of the parameter server.

    Attributes:
        flops_per_s: compute throughput for all parts of a step that the PS computes.
        optimizer_s: seconds of an optimizer step.
        rates: rates of the PS's network card; None if the card limits no transfer.
    """

    flops_per_s: float
    optimizer_s: float
    rates: PsRates | None = None


@dataclass(frozen=True, slots=True)
class HeadSlice:
    """One slice of a vocabulary-parallel loss: consecutive rows of the LM head.

    See `cleave.graphs.loss_graph`.

    Attributes:
        number: index of the slice, from 0.
        of: number of slices of the loss. All slices have about the same number of rows.
    """

    number: int
    of: int

    def rows(self, vocabulary: int) -> tuple[int, int]:
        """Return the first row of the slice, and the row after the last row of the slice."""
        return self.number * vocabulary // self.of, (self.number + 1) * vocabulary // self.of


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """A stage, or a slice of the loss: consecutive layers and the devices that run these layers.

    Attributes:
        first: index of the first layer.
        stop: index of the last layer plus one.
        devices: IDs of the stage's devices, at least one.
        loss: whether the stage also computes the loss. Only the last stage can.
        slice: the slice of the loss that the devices compute, instead of layers; None for a stage
            of layers. For a slice, `first` and `stop` both equal the number of layers.
        pieces: number of chunks into which a micro-batch is cut. Each chunk is a separate graph
            run, so a device can receive one chunk, compute another chunk and return a third chunk
            at the same time. A run needs memory for one chunk only.
    """

    first: int
    stop: int
    devices: tuple[int, ...]
    loss: bool = False
    slice: HeadSlice | None = None
    pieces: int = 1

    @property
    def named(self) -> str:
        """Return a name for the user, such as "layers 1 to 3". Layers are counted from 1."""
        if self.slice is not None:
            return f"slice {self.slice.number + 1} of {self.slice.of} of the loss"
        return f"layers {self.first + 1} to {self.stop}"


@dataclass(frozen=True, slots=True)
class StagePlan:
    """The stages of a model, and the predictions for a training step.

    Attributes:
        stages: the stages in the order of the layers.
        kept_batches: maps each device ID to how many micro-batches the device may retain.
        step_s: predicted seconds of a step, including the optimizer step.
        memory_bytes: maps each device ID to the predicted peak memory of the device.
        downlink_bytes, uplink_bytes: traffic of all devices in a step, after any compression.
        reason: a sentence that says what takes most of the step.
        slices: slices of the loss, in order; empty if the loss is not vocabulary-parallel.
    """

    stages: tuple[PlannedStage, ...]
    kept_batches: dict[int, KeptBatches]
    step_s: float
    memory_bytes: dict[int, int]
    downlink_bytes: int
    uplink_bytes: int
    reason: str = ""
    slices: tuple[PlannedStage, ...] = ()

    @property
    def planned(self) -> tuple[PlannedStage, ...]:
        """Return all stages, followed by all slices of the loss."""
        return *self.stages, *self.slices

    @property
    def devices(self) -> set[int]:
        return {device for stage in self.planned for device in stage.devices}

    @property
    def loss_at_ps(self) -> bool:
        """Return True if the PS computes the loss, instead of a stage or slices on devices."""
        return not self.slices and not self.stages[-1].loss

    @property
    def where_loss(self) -> str:
        """Return a phrase that says where the loss is computed, such as "on the last stage"."""
        if not self.slices:
            return "on the parameter server" if self.loss_at_ps else "on the last stage"
        devices = sum(len(part.devices) for part in self.slices)
        count = len(self.slices)
        slices = "1 slice" if count == 1 else f"{count} slices"
        return f"in {slices} on {devices} device{'s' if devices > 1 else ''}"

    def described(self, model: StageModel) -> str:
        """Return a sentence, without its full stop, that describes the plan to the user.

        Args:
            model: the model for which the plan was made.
        """
        one, many = ("part", "parts") if model.in_parts else ("layer", "layers")
        parts = [
            f"{one} {stage.stop}"
            if stage.first + 1 == stage.stop
            else f"{many} {stage.first + 1} to {stage.stop}"
            for stage in self.stages
        ]
        held = [
            f"{part} on {len(stage.devices)} device{'s' if len(stage.devices) > 1 else ''}"
            for part, stage in zip(parts, self.stages, strict=True)
        ]
        if len(held) > _NAMED:
            sizes = _span([stage.stop - stage.first for stage in self.stages], one, many)
            devices = _span([len(stage.devices) for stage in self.stages], "device", "devices")
            held = [f"{len(held)} of {sizes} on {devices} each"]
        if model.ps_layers:
            held.append("the others on the parameter server")
        where = "there" if self.stages[-1].loss else self.where_loss
        return f"stages: {', '.join(held)}; the loss {where}; {self.step_s:.3g} s a step predicted"


def _span(numbers: Sequence[int], one: str, many: str) -> str:
    """Return the range of `numbers` as text, such as "2 to 4 layers".

    Args:
        one, many: the request in singular and in plural.
    """
    least, most = min(numbers), max(numbers)
    number = f"{least}" if least == most else f"{least} to {most}"
    return f"{number} {one if most == 1 else many}"


class StagePlanner(Protocol):
    """A function that divides a model into stages for a fleet."""

    def __call__(
        self, model: StageModel, devices: Sequence[DeviceRates], ps: PsCompute
    ) -> StagePlan:
        """Return the plan with the shortest predicted step that was found.

        Args:
            model: costs of the layers, and the micro-batches.
            devices: devices of the fleet.
            ps: throughput of the parameter server.

        Raises:
            PlanError: when the model cannot be divided into stages for these devices.
        """
        ...
