"""Stages: which consecutive layers which devices train, and how long a step takes then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from cleave.planner.plan import DeviceRates, PsRates

_NAMED: Final = 8
"""More stages than these are described together."""

_PIECES: Final = 4
"""Into how many runs a sequence is cut where its tokens do not depend on each other,"""

_LEAST_PIECE: Final = 128
"""if each has so many tokens."""

PIECE_COST: Final = 1.6
"""How many times as long a device computes in all then, at most: each run reads all weights, and
adds to all sums of gradients."""


def pieces_of_sequence(tokens: int) -> int:
    """Return into how many runs a sequence is cut where its tokens do not depend on each other."""
    return next((n for n in range(_PIECES, 1, -1) if _fits(tokens, n)), 1)


def _fits(tokens: int, pieces: int) -> bool:
    return tokens % pieces == 0 and tokens // pieces >= _LEAST_PIECE


@dataclass(frozen=True, slots=True)
class LayerCost:
    """What one layer, or the loss, costs.

    Attributes:
        frozen_bytes: of parameters that are not trained and stay on devices between steps.
        weight_bytes: of those that are trained, as they travel to a device in every step.
        gradient_bytes: of their gradients, as they travel back.
        sum_bytes: of their gradients on the device, in fp32.
        flops: forward and backward, for each token; the backward graph computes the forward again.
        forward_flops: of the forward pass alone.
        working_bytes: what a run of its graph needs beside its inputs, for each token.
        largest_bytes: of its largest parameter, in fp32.
        activation_bytes: what its forward pass can keep for the backward pass beside its input, for
            each token; 0 if nothing.
        spared_flops: of the backward pass where that was kept, for each token.
        dequantized_bytes: of weights in fp32 that its graphs make of quantized ones, and of what
            they make them from.
        pieces: into how many runs a micro-batch can be cut, because tokens do not depend on each
            other.
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
    """What of a micro-batch stays on a device between a stage's forward and backward passes."""

    NOTHING = "nothing"
    """The stage's input comes again, and those of its layers are computed again."""

    INPUTS = "inputs"
    """The inputs of the layers: each layer's forward pass is done again."""

    ACTIVATIONS = "activations"
    """The inputs, and what took products to compute within the layers."""


@dataclass(frozen=True, slots=True)
class KeptBatches:
    """Of how many micro-batches a device keeps something between forward and backward passes.

    Attributes:
        inputs: the inputs of layers alone.
        activations: all activations; of these first.
    """

    inputs: int = 0
    activations: int = 0

    def next(self, inputs: int, activations: int) -> Keep:
        """Return what to keep of another micro-batch, where so many are kept already."""
        if activations < self.activations:
            return Keep.ACTIVATIONS
        return Keep.INPUTS if inputs < self.inputs else Keep.NOTHING


NOTHING_KEPT: Final = KeptBatches()


@dataclass(frozen=True, slots=True)
class PsLayers:
    """Layers that the PS does itself, because no device can.

    Attributes:
        before: the number of the device layer before which they are; the number of those layers
            where they follow the last one.
        forward_flops: of their forward pass, for each token.
        flops: forward and backward, without computing anything again, for each token.
    """

    before: int
    forward_flops: float
    flops: float


@dataclass(frozen=True, slots=True)
class StageModel:
    """A model and a batch, as stages see them.

    Attributes:
        layers: that devices can do, in order.
        loss: what follows them, with the loss.
        width: of activations, in elements.
        element_bytes: of an activation as it travels.
        tokens: of each micro-batch.
        embeds: whether the gradient of the first layer's input is wanted.
        coded_ratio: coded over plain bytes of weights and activations, where they travel coded.
        gradient_coded_ratio: likewise of the gradients of weights.
        in_parts: whether `layers` are parts of layers, attention and MLP apart.
        most_slices: into how many slices by vocabulary the loss can be cut; 1 if it cannot.
        ps_layers: those that only the PS can do, in order. No stage may reach across them, and
            where they follow the last layer the PS computes the loss.
        beside_bytes: of what layers are called with beside their input and that differs between
            micro-batches, as masks of packed documents do; for each token, as it travels.
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
        """Return the numbers of layers before which a stage has to end."""
        return [p.before for p in self.ps_layers if 0 < p.before < len(self.layers)]

    @property
    def ends_at_ps(self) -> bool:
        """Say whether layers of the PS follow the last one."""
        return any(p.before == len(self.layers) for p in self.ps_layers)

    def most_pieces(self, stage: PlannedStage) -> int:
        """Return in how many pieces a stage can do a micro-batch, each with a run of its own.

        What follows in the same stage may need all of it.
        """
        alone = stage.stop == stage.first + 1 and not stage.loss
        return self.layers[stage.first].pieces if alone else 1

    def slice_of_loss(self, count: int) -> LayerCost:
        """Return what one of so many slices of the loss costs.

        Its backward pass computes its logits again. What comes before the LM head, which every
        slice has, is small and left out.
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
    """The PS itself.

    Attributes:
        flops_per_s: how fast it computes the loss, or the whole step alone.
        optimizer_s: how long its optimizer's step takes.
        rates: its network card.
    """

    flops_per_s: float
    optimizer_s: float
    rates: PsRates | None = None


@dataclass(frozen=True, slots=True)
class HeadSlice:
    """Some rows of the LM head: its part of the loss (see `cleave.graphs.loss_slices`).

    Attributes:
        number: which of the slices.
        of: how many slices there are, about equally large.
    """

    number: int
    of: int

    def rows(self, vocabulary: int) -> tuple[int, int]:
        """Return its first row and the one after its last."""
        return self.number * vocabulary // self.of, (self.number + 1) * vocabulary // self.of


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """Consecutive layers and the devices that may take micro-batches through them.

    Attributes:
        first, stop: the numbers of its first layer and of the one after its last.
        devices: at least one.
        loss: whether the loss is computed there as well; of the last stage only.
        slice: what it computes of the loss, if it is a slice of that and has no layers: `first` and
            `stop` are then the number of layers.
        pieces: in how many it does a micro-batch, each with a run of its own: a device receives one
            while it computes another and sends a third, and a run needs memory for one alone.
    """

    first: int
    stop: int
    devices: tuple[int, ...]
    loss: bool = False
    slice: HeadSlice | None = None
    pieces: int = 1

    @property
    def named(self) -> str:
        """Return what it is in words, with layers counted from 1."""
        if self.slice is not None:
            return f"slice {self.slice.number + 1} of {self.slice.of} of the loss"
        return f"layers {self.first + 1} to {self.stop}"


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Stages and what is predicted of them.

    Attributes:
        stages: in order.
        kept_batches: by device, of how many micro-batches it keeps what.
        step_s: the predicted seconds of a step, its optimizer included.
        memory_bytes: by device, what it needs at most.
        downlink_bytes, uplink_bytes: of all devices together, as they travel: coded or not.
        reason: what the step's time consists of mostly, in a sentence.
        slices: of the loss, in order, where it is cut by vocabulary.
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
        """Return all devices that take part."""
        return {device for stage in self.planned for device in stage.devices}

    @property
    def loss_at_ps(self) -> bool:
        """Say whether the PS computes the loss."""
        return not self.slices and not self.stages[-1].loss

    @property
    def where_loss(self) -> str:
        """Say in words where the loss is computed."""
        if not self.slices:
            return "on the parameter server" if self.loss_at_ps else "on the last stage"
        devices = sum(len(part.devices) for part in self.slices)
        count = len(self.slices)
        slices = "1 slice" if count == 1 else f"{count} slices"
        return f"in {slices} on {devices} device{'s' if devices > 1 else ''}"

    def described(self, model: StageModel) -> str:
        """Describe the plan of a model in a sentence without its full stop."""
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
    """Return the least and the most of numbers of something, in words."""
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
