"""The work of a training step by stages: arrays, graphs, layers, and their devices.

A *micro-batch* is a part of the step's batch that goes through the layers by itself. A *stage* is a
run of consecutive layers on one or several devices, each taking some of the micro-batches.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, TypeAlias

from cleave.errors import CleaveError
from cleave.graph_names import parameter
from cleave.planner.stages.model import Keep, KeptBatches, PlannedStage
from cleave.scheduler.stages.arrays import StageArray, joined
from cleave.scheduler.stages.usual_sizes import Place
from cleave.scheduler.traffic import TrafficKind

LOSS_LAYER: Final = -1
"""The layer number that stands for the loss."""


def slice_layer(number: int) -> int:
    """Return the layer number that stands for a slice of the loss."""
    return LOSS_LAYER - 1 - number


def slice_of_layer(layer: int) -> int | None:
    """Return the slice of the loss that a layer number stands for; None if it is no slice."""
    return LOSS_LAYER - 1 - layer if layer < LOSS_LAYER else None


SumName: TypeAlias = tuple[int, str]
"""The name of a parameter's gradient sum: layer number and parameter."""


@dataclass(frozen=True, slots=True)
class SumPiece:
    """Rows of a sum that a device returns in one message.

    Attributes:
        name: the sum's layer and parameter, and the first row.
        array: wire id of the sum.
        rows, columns: shape of the piece.
    """

    name: tuple[int, str, int]
    array: int
    rows: int
    columns: int


class StageFailedError(CleaveError):
    """A step by stages cannot be completed."""


@dataclass(frozen=True, slots=True, eq=False)
class StageGraph:
    """A graph that is sent to devices.

    Attributes:
        model: the ONNX model.
        inputs, outputs: names of inputs and outputs, in order.
    """

    model: bytes
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Return the graph's bytes on a device."""
        return len(self.model)


@dataclass(frozen=True, slots=True)
class SumShape:
    """Shape of a parameter's gradient sum: rows and columns of fp32."""

    rows: int
    columns: int

    @property
    def nbytes(self) -> int:
        """Return the sum's bytes on a device."""
        return 4 * self.rows * self.columns


@dataclass(frozen=True, slots=True)
class LayerWork:
    """One layer's arrays, graphs and costs in one step.

    Attributes:
        forward, backward, from_activations: the layer's graphs (see `cleave.graphs.layer_graphs`).
        parameters: the layer's parameters, by graph input.
        sums: shapes of gradient sums, by trained parameter.
        beside: keyword arguments of the layer apart from its input, by graph input.
        forward_flops, backward_flops: FLOPs per token; backward recomputes the forward pass.
        activations: by name, bytes per sample of activations that can be kept for the backward
            pass.
        sample_tokens: tokens per sample.
        from_activations_flops: FLOPs per token of a backward pass with kept activations.
        of_batch: by micro-batch, the keyword arguments that differ between micro-batches, such as
            masks; empty if none differ.
    """

    forward: StageGraph
    backward: StageGraph
    parameters: Mapping[str, StageArray]
    sums: Mapping[str, SumShape]
    beside: Mapping[str, StageArray]
    forward_flops: int
    backward_flops: int
    from_activations: StageGraph | None = None
    activations: Mapping[str, int] = field(default_factory=dict)
    sample_tokens: int = 1
    from_activations_flops: int = 0
    of_batch: Sequence[Mapping[str, StageArray]] = ()

    def inputs(self, batch: int) -> dict[str, StageArray]:
        """Return a micro-batch's parameters and keyword arguments, by graph input."""
        of_batch = self.of_batch[batch] if self.of_batch else {}
        return {**self.parameters, **self.beside, **of_batch}


@dataclass(frozen=True, slots=True)
class LossWork:
    """The computation after the last layer: the loss and its gradients.

    Attributes:
        graph: see `cleave.graphs.loss_graph`.
        parameters: parameters by graph input, including the scale of the loss.
        sums: shapes of gradient sums, by trained parameter.
        targets: targets of each micro-batch.
        flops: FLOPs per token.
    """

    graph: StageGraph
    parameters: Mapping[str, StageArray]
    sums: Mapping[str, SumShape]
    targets: Sequence[StageArray]
    flops: int


@dataclass(frozen=True, slots=True)
class SliceWork:
    """A slice of the vocabulary-parallel loss (see `cleave.graphs.loss_slices`).

    Attributes:
        forward, backward: the slice's graphs.
        parameters: parameters by graph input, including the slice's first row and the loss scale.
        sums: shapes of gradient sums, by trained parameter; for the LM head, the slice's rows.
        targets: targets of each micro-batch, the same for all slices.
        forward_flops, backward_flops: FLOPs per token; backward recomputes the logits.
    """

    forward: StageGraph
    backward: StageGraph
    parameters: Mapping[str, StageArray]
    sums: Mapping[str, SumShape]
    targets: Sequence[StageArray]
    forward_flops: float
    backward_flops: float


@dataclass(frozen=True, slots=True)
class StepWork:
    """One step by stages: its arrays, graphs, and devices.

    Attributes:
        layers: the model's layers, in order.
        loss: the whole loss; None if no device computes it.
        x: the first layer's input of each micro-batch, in the dtype in which activations travel.
        width: number of columns of activations.
        tokens: number of tokens of each micro-batch.
        stages: the plan of the stages.
        gradients: dtype in which gradient sums travel.
        embeds: whether the gradient of the first layer's input is wanted.
        kept_batches: by device, the number of micro-batches kept for the backward pass, by kind;
            devices not listed keep none.
        slices: the plan of a vocabulary-parallel loss; empty otherwise.
        slice_works: the work of each slice.
        ps_after: numbers of stages that are followed by layers on the PS.
        model: id of the model within the fleet.
        token: identifies the step; copies with other devices share it.
    """

    layers: Sequence[LayerWork]
    loss: LossWork | None
    x: Sequence[StageArray]
    width: int
    tokens: Sequence[int]
    stages: Sequence[PlannedStage]
    gradients: str
    embeds: bool = True
    kept_batches: Mapping[int, KeptBatches] = field(default_factory=dict)
    slices: Sequence[PlannedStage] = ()
    slice_works: Sequence[SliceWork] = ()
    ps_after: Set[int] = frozenset()
    model: int = 0
    token: object = field(default_factory=object)

    @property
    def planned(self) -> Sequence[PlannedStage]:
        """Return the stages, then the slices of the loss."""
        return [*self.stages, *self.slices]

    @property
    def dtype(self) -> str:
        """Return the dtype in which activations and their gradients travel."""
        return self.x[0].dtype

    def floor_bytes(self, gradient_bytes: int) -> tuple[int, int]:
        """Return the minimum bytes down and up, without compression or lost devices.

        Every trained parameter goes down once and its gradient up once. A stage's output and its
        gradient travel up and down once, to the next stage or to the PS if it computes the loss.
        The first stage's input goes down and its gradient up. With a vocabulary-parallel loss, the
        last output goes down to every slice and its gradient up from each.

        Args:
            gradient_bytes: bytes of a gradient element on the wire.
        """
        parts: list[LayerWork | LossWork | SliceWork] = [*self.layers, *self.slice_works]
        if self.loss is not None:
            parts.append(self.loss)
        weights = sum(part.parameters[parameter(n)].nbytes for part in parts for n in part.sums)
        elements = sum(each.rows * each.columns for part in parts for each in part.sums.values())
        gradients = elements * gradient_bytes
        activations = sum(x.nbytes for x in self.x)
        between, at_ps = 2 * (len(self.stages) - 1), int(self.loss is None)
        passes = between + at_ps + len(self.slices)
        down = weights + (1 + passes) * activations
        return down, gradients + (self.embeds + passes) * activations


KeptLayer: TypeAlias = tuple[int, ...]
"""Wire ids that a device keeps of a layer: its input, then its activations, if any."""


class UnitKind(Enum):
    """The kinds of passes that a device can be asked for."""

    FORWARD = "forward"
    BACKWARD = "backward"
    LAST = "forward, loss and backward"
    """Forward, loss and backward at once, in the stage with the loss; its output never travels."""

    SUMS = "sums"
    """The device sends its gradient sums to the PS."""


@dataclass(slots=True, eq=False)
class Unit:
    """A request to a device: one order or several, each answered.

    Attributes:
        kind, stage, batch, device: the pass, its stage, its micro-batch and its device.
        keep: arrays that stay on the device until the backward pass; a `LAST` unit drops them
            itself.
        answers: by order in flight, the bytes of its answer.
        rest: pieces of sums to request as earlier ones arrive.
        found: fetched arrays, by name.
        sizes: largest magnitudes of fetched arrays, by place; none for emulated payloads.
        kept: kept wire ids of each layer, or of each sequence chunk of a one-layer stage.
        flops: total FLOPs of the orders.
    """

    kind: UnitKind
    stage: int
    batch: int
    device: int
    keep: Keep = Keep.NOTHING
    answers: dict[int, int] = field(default_factory=dict)
    rest: deque[SumPiece] = field(default_factory=deque)
    found: dict[Any, Any] = field(default_factory=dict)
    sizes: dict[Place, float] = field(default_factory=dict)
    kept: Sequence[KeptLayer] = ()
    flops: int = 0

    def note_size(self, place: Place, size: float) -> None:
        """Record the largest magnitude of a fetched array."""
        if math.isnan(size) or size > self.sizes.get(place, -1.0):
            self.sizes[place] = size

    def fetched(self, name: str) -> Any:
        """Return the array fetched under a name, with its chunks joined; None if none was."""
        pieces = [
            self.found[key] for n in range(len(self.found)) if (key := (name, n)) in self.found
        ]
        return joined(pieces) if pieces else self.found.get(name)


@dataclass(frozen=True, slots=True)
class StageOrder:
    """The PS's record of one order to a device: the detail of its task.

    Attributes:
        unit: the unit that the order belongs to.
        name: name of the fetched array within the unit; None if the order runs a graph.
        rows, columns, out: shape and dtype of the answer.
    """

    unit: Unit
    name: Any
    rows: int = 0
    columns: int = 0
    out: str = ""

    @property
    def kind(self) -> TrafficKind:
        """Return the traffic category of the answer."""
        sums = self.unit.kind is UnitKind.SUMS
        return TrafficKind.GRADIENTS if sums else TrafficKind.ACTIVATIONS
