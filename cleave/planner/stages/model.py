"""Stages: consecutive layers, the devices that train them, and the predicted step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from cleave.planner.plan import DeviceRates, PsRates

_NAMED: Final = 8
"""More stages than these are summarised instead of listed."""

_PIECES: Final = 4
"""The most chunks of a sequence whose tokens do not depend on each other."""

_LEAST_PIECE: Final = 128
"""The fewest tokens of a sequence chunk."""

PIECE_COST: Final = 1.6
"""Largest slowdown by chunks: each run reads all weights and adds to all gradient sums."""


def pieces_of_sequence(tokens: int) -> int:
    """Return the number of chunks of a sequence whose tokens do not depend on each other."""
    return next((n for n in range(_PIECES, 1, -1) if _fits(tokens, n)), 1)


def _fits(tokens: int, pieces: int) -> bool:
    return tokens % pieces == 0 and tokens // pieces >= _LEAST_PIECE


@dataclass(frozen=True, slots=True)
class LayerCost:
    """The costs of one layer, or of the loss.

    Attributes:
        frozen_bytes: parameters that are not trained, and stay on devices between steps.
        weight_bytes: trained parameters, as sent to a device in every step.
        gradient_bytes: their gradients, as sent back.
        sum_bytes: their accumulated gradients on the device, in fp32.
        flops: FLOPs per token, forward and backward; the backward graph recomputes the forward.
        forward_flops: FLOPs per token of the forward pass alone.
        working_bytes: memory per token of a graph run, without its inputs.
        largest_bytes: its largest parameter, in fp32.
        activation_bytes: bytes per token that its forward pass can keep for the backward pass, in
            addition to its input; 0 if nothing.
        spared_flops: backward FLOPs per token that these kept activations save.
        dequantized_bytes: fp32 weights that its graphs dequantize, with the codes they read.
        pieces: number of chunks of a sequence, if tokens do not depend on each other; else 1.
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
    """What a device keeps of a micro-batch between a stage's forward and backward passes."""

    NOTHING = "nothing"
    """Nothing: the PS sends the stage's input again, and the layers' inputs are recomputed."""

    INPUTS = "inputs"
    """The inputs of the layers: each layer's forward pass is recomputed."""

    ACTIVATIONS = "activations"
    """The inputs, and the results of the products within the layers."""


@dataclass(frozen=True, slots=True)
class KeptBatches:
    """The number of micro-batches that a device keeps between forward and backward passes.

    Attributes:
        inputs: micro-batches with only layer inputs kept.
        activations: micro-batches with all activations kept; they are used first.
    """

    inputs: int = 0
    activations: int = 0

    def next(self, inputs: int, activations: int) -> Keep:
        """Return what to keep of another micro-batch, given the numbers that are kept already."""
        if activations < self.activations:
            return Keep.ACTIVATIONS
        return Keep.INPUTS if inputs < self.inputs else Keep.NOTHING


NOTHING_KEPT: Final = KeptBatches()


@dataclass(frozen=True, slots=True)
class PsLayers:
    """Layers that the PS computes itself, because no device can.

    Attributes:
        before: number of the device layer that follows; the number of device layers if none does.
        forward_flops: FLOPs per token of the forward pass.
        flops: FLOPs per token, forward and backward, without recomputation.
    """

    before: int
    forward_flops: float
    flops: float


@dataclass(frozen=True, slots=True)
class StageModel:
    """A model and a batch, as stages see them.

    Attributes:
        layers: the layers that devices can compute, in order.
        loss: what follows the layers, with the loss.
        width: width of activations, in elements.
        element_bytes: bytes of an activation's element, as sent.
        tokens: tokens of each micro-batch.
        embeds: whether the gradient of the first layer's input is needed.
        coded_ratio: compressed over plain bytes of weights and activations.
        gradient_coded_ratio: compressed over plain bytes of weight gradients.
        in_parts: whether `layers` are parts of layers, with attention and MLP apart.
        most_slices: the most slices by vocabulary of the loss; 1 if it cannot be cut.
        ps_layers: layers that only the PS can compute, in order. No stage may cross them. If they
            follow the last layer, the PS computes the loss.
        beside_bytes: bytes per token, as sent, of layer arguments besides the input that differ
            between micro-batches, such as masks of packed documents.
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
        """Return the numbers of the layers before which a stage has to end."""
        return [p.before for p in self.ps_layers if 0 < p.before < len(self.layers)]

    @property
    def ends_at_ps(self) -> bool:
        """Return whether layers of the PS follow the last layer."""
        return any(p.before == len(self.layers) for p in self.ps_layers)

    def most_pieces(self, stage: PlannedStage) -> int:
        """Return the most chunks in which a stage can compute a micro-batch, one run for each.

        Only a stage of one layer has several: later layers or the loss may need the whole sequence.
        """
        alone = stage.stop == stage.first + 1 and not stage.loss
        return self.layers[stage.first].pieces if alone else 1

    def slice_of_loss(self, count: int) -> LayerCost:
        """Return the costs of one of `count` slices of the loss.

        Its backward pass recomputes its logits. The small modules before the LM head are left out.
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
    """The PS's own throughput.

    Attributes:
        flops_per_s: throughput for the loss, or for the whole step alone.
        optimizer_s: seconds of an optimizer step.
        rates: its network card; None if unlimited.
    """

    flops_per_s: float
    optimizer_s: float
    rates: PsRates | None = None


@dataclass(frozen=True, slots=True)
class HeadSlice:
    """A slice of the LM head's rows, with its part of the loss (`cleave.graphs.loss_slices`).

    Attributes:
        number: index of the slice.
        of: number of slices, of about equal size.
    """

    number: int
    of: int

    def rows(self, vocabulary: int) -> tuple[int, int]:
        """Return its first row and the one after its last."""
        return self.number * vocabulary // self.of, (self.number + 1) * vocabulary // self.of


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """Consecutive layers, and the devices that may take micro-batches through them.

    Attributes:
        first, stop: the number of its first layer, and of the one after its last.
        devices: ids of at least one device.
        loss: whether it also computes the loss; only the last stage can.
        slice: its slice of the loss; `first` and `stop` are then the number of layers.
        pieces: number of chunks of a micro-batch, each with its own run. A device receives one,
            computes another and sends a third at once. A run needs memory for one chunk only.
    """

    first: int
    stop: int
    devices: tuple[int, ...]
    loss: bool = False
    slice: HeadSlice | None = None
    pieces: int = 1

    @property
    def named(self) -> str:
        """Return a description in words, with layers counted from 1."""
        if self.slice is not None:
            return f"slice {self.slice.number + 1} of {self.slice.of} of the loss"
        return f"layers {self.first + 1} to {self.stop}"


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Stages and the predicted step.

    Attributes:
        kept_batches: by device, how many micro-batches it keeps.
        step_s: predicted seconds of a step, including the optimizer.
        memory_bytes: by device, its peak memory.
        downlink_bytes, uplink_bytes: traffic of all devices, after any compression.
        reason: what takes most of the step, in a sentence.
        slices: slices of the loss, in order; empty if it is not cut by vocabulary.
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
        """Return the stages, then the slices of the loss."""
        return *self.stages, *self.slices

    @property
    def devices(self) -> set[int]:
        return {device for stage in self.planned for device in stage.devices}

    @property
    def loss_at_ps(self) -> bool:
        """Return whether the PS computes the loss."""
        return not self.slices and not self.stages[-1].loss

    @property
    def where_loss(self) -> str:
        """Return where the loss is computed, in words."""
        if not self.slices:
            return "on the parameter server" if self.loss_at_ps else "on the last stage"
        devices = sum(len(part.devices) for part in self.slices)
        count = len(self.slices)
        slices = "1 slice" if count == 1 else f"{count} slices"
        return f"in {slices} on {devices} device{'s' if devices > 1 else ''}"

    def described(self, model: StageModel) -> str:
        """Return a sentence, without its full stop, that describes the plan."""
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
    """Return the range of some numbers of things in words."""
    least, most = min(numbers), max(numbers)
    number = f"{least}" if least == most else f"{least} to {most}"
    return f"{number} {one if most == 1 else many}"


class StagePlanner(Protocol):
    """Chooses stages."""

    def __call__(
        self, model: StageModel, devices: Sequence[DeviceRates], ps: PsCompute
    ) -> StagePlan:
        """Return the stages with the shortest predicted step.

        Raises:
            PlanError: when no stages fit these devices.
        """
        ...
