"""What a training step by stages consists of: arrays, graphs, layers, and how they are spread.

A *micro-batch* is a part of the step's batch that goes through the layers by itself. A *stage* is a
run of consecutive layers on one device, or on several that each take some of the micro-batches.
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
"""The number that stands for the loss among the numbers of layers."""


def slice_layer(number: int) -> int:
    """Return the number that stands for a slice of the loss among the numbers of layers."""
    return LOSS_LAYER - 1 - number


def slice_of_layer(layer: int) -> int | None:
    """Return the slice of the loss that a number of a layer stands for; None for none."""
    return LOSS_LAYER - 1 - layer if layer < LOSS_LAYER else None


SumName: TypeAlias = tuple[int, str]
"""Names the sum of a parameter's gradients: the layer's number, and the parameter."""


@dataclass(frozen=True, slots=True)
class SumPiece:
    """Names the rows of a sum that a device returns in one message.

    Attributes:
        name: the sum's layer and parameter, and the first row.
        array: the sum, as a wire id.
        rows, columns: of the piece.
    """

    name: tuple[int, str, int]
    array: int
    rows: int
    columns: int


class StageFailedError(CleaveError):
    """Tells that a step by stages cannot be completed."""


@dataclass(frozen=True, slots=True, eq=False)
class StageGraph:
    """Holds a graph that devices are sent.

    Attributes:
        model: the ONNX model.
        inputs, outputs: their names, in order.
    """

    model: bytes
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Return its size on a device."""
        return len(self.model)


@dataclass(frozen=True, slots=True)
class SumShape:
    """Gives the sum of a parameter's gradients a shape: rows and columns of fp32."""

    rows: int
    columns: int

    @property
    def nbytes(self) -> int:
        """Return its size on a device."""
        return 4 * self.rows * self.columns


@dataclass(frozen=True, slots=True)
class LayerWork:
    """Holds what devices need to know of one layer in one step.

    Attributes:
        forward, backward, from_activations: its graphs (see `cleave.graphs.layer_graphs`).
        parameters: by graph input.
        sums: by name of each parameter that is trained.
        beside: what the layer is called with beside its input, by graph input.
        forward_flops, backward_flops: for each token; backward computes the forward pass again.
        activations: bytes for each sample of what the forward pass can keep for the backward pass,
            by name.
        sample_tokens: tokens of a sample.
        from_activations_flops: of a backward pass with these, for each token.
        of_batch: by micro-batch, what of `beside` differs between them, as masks do; empty if
            nothing does.
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
        """Return what a micro-batch is computed with beside its activations, by graph input."""
        of_batch = self.of_batch[batch] if self.of_batch else {}
        return {**self.parameters, **self.beside, **of_batch}


@dataclass(frozen=True, slots=True)
class LossWork:
    """Holds what follows the last layer, with the loss and all of its gradients.

    Attributes:
        graph: see `cleave.graphs.loss_graph`.
        parameters: by graph input, the scale of the loss among them.
        sums: by name of each parameter that is trained.
        targets: by micro-batch.
        flops: for each token.
    """

    graph: StageGraph
    parameters: Mapping[str, StageArray]
    sums: Mapping[str, SumShape]
    targets: Sequence[StageArray]
    flops: int


@dataclass(frozen=True, slots=True)
class SliceWork:
    """Holds a slice of the loss by vocabulary (see `cleave.graphs.loss_slices`).

    Attributes:
        forward, backward: its graphs.
        parameters: by graph input; its first row and the scale of the loss are among them.
        sums: by name of each parameter that is trained; of the LM head, its rows.
        targets: by micro-batch; all slices have the same.
        forward_flops, backward_flops: for each token; backward computes the logits again.
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
    """Holds one step by stages: its arrays, its graphs, and which device does what.

    Attributes:
        layers: of the model, in order.
        loss: None where no device computes the whole loss.
        x: by micro-batch, the first layer's input, in the dtype in which activations travel.
        width: of activations.
        tokens: by micro-batch, how many tokens it has.
        stages: the plan.
        gradients: the dtype in which sums travel.
        embeds: whether the gradient of the first layer's input is wanted.
        kept_batches: by device, of how many micro-batches it keeps what; of one that is not in it,
            nothing.
        slices: the plan of the loss where it is cut by vocabulary; else empty.
        slice_works: what devices need to know of each slice.
        ps_after: the numbers of stages after which the PS does layers itself.
        model: tells the model from others that the fleet trains.
        token: tells this step from others; copies with other devices have the same.
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
        """Return the least bytes down and up, if nothing is coded and no device is lost.

        Every parameter that is trained goes down once and its gradient up once. What a stage
        returns and its gradient go up and down once to the next stage, or to the PS where that
        computes the loss; so do the first stage's input down and its gradient up. The last output
        goes down to every slice of the loss, if it is cut, and its gradient comes up from each.

        Args:
            gradient_bytes: of an element of a gradient as it travels.
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
"""What a device keeps of a layer, as wire ids: its input, then its activations, if any."""


class UnitKind(Enum):
    """Tells what a device does with a micro-batch at once."""

    FORWARD = "forward"
    BACKWARD = "backward"
    LAST = "forward, loss and backward"
    """Forward, loss and backward at once, of the stage that computes the loss.

    Its output never travels.
    """

    SUMS = "sums"
    """The sums of gradients are sent to the PS, of all micro-batches that are in them."""


@dataclass(slots=True, eq=False)
class Unit:
    """Names something that a device was asked for: one order, or several, each answered.

    Attributes:
        kind, stage, batch, device: what it is; `batch` is the number of the micro-batch.
        keep: what stays on the device until the backward pass; within the last stage's unit it is
            dropped then.
        answers: orders that are not answered yet, and the bytes of what answers each.
        rest: pieces of sums that will be asked for as others come.
        found: what was fetched, by name.
        sizes: the largest magnitudes in it, by place; of what is emulated as a size, none.
        kept: of each layer, its input and its activations that stay there, as wire ids; of each
            piece, where a stage of one layer is computed in pieces.
        flops: of all its orders.
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
        """Note the largest magnitude of a part of what was fetched."""
        if math.isnan(size) or size > self.sizes.get(place, -1.0):
            self.sizes[place] = size

    def fetched(self, name: str) -> Any:
        """Return what was fetched under a name, all pieces of it as one; None for nothing."""
        pieces = [
            self.found[key] for n in range(len(self.found)) if (key := (name, n)) in self.found
        ]
        return joined(pieces) if pieces else self.found.get(name)


@dataclass(frozen=True, slots=True)
class StageOrder:
    """Tells what the PS knows of one order to a device: the detail of its task.

    Attributes:
        unit: what it belongs to.
        name: what a fetched array is, within the unit; None for a graph that is run.
        rows, columns, out: the form of the answer.
    """

    unit: Unit
    name: Any
    rows: int = 0
    columns: int = 0
    out: str = ""

    @property
    def kind(self) -> TrafficKind:
        """Return what an array counts as that answers it."""
        sums = self.unit.kind is UnitKind.SUMS
        return TrafficKind.GRADIENTS if sums else TrafficKind.ACTIVATIONS
