"""Data structures of a step by stages: arrays, graphs, layers, and device assignment.

A *micro-batch* is a part of the step's batch that passes through the layers separately. A *stage*
is a sequence of consecutive layers. Each device of a stage runs some of the micro-batches.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, TypeAlias

from cleave.errors import CleaveError
from cleave.graph_names import parameter
from cleave.planner.stages.model import Keep, KeptBatches, PlannedStage
from cleave.scheduler.counters import TrafficKind
from cleave.scheduler.stages.arrays import StageArray, joined
from cleave.scheduler.stages.resident import KeptState, ResidentParameter
from cleave.scheduler.stages.usual_sizes import Place

LOSS_LAYER: Final = -1  # the layer number that identifies the loss


def slice_layer(number: int) -> int:
    """Return the layer number that identifies a loss slice."""
    return LOSS_LAYER - 1 - number


def slice_of_layer(layer: int) -> int | None:
    """Return the number of the loss slice with this layer number; None if no slice has it."""
    return LOSS_LAYER - 1 - layer if layer < LOSS_LAYER else None


SumName: TypeAlias = tuple[int, str]  # a parameter's gradient sum: (layer number, parameter name)


@dataclass(frozen=True, slots=True)
class RowsPiece:
    """A block of consecutive rows, fetched in one message.

    The rows belong to a gradient sum, a weight, a moment or a difference.

    Attributes:
        name: key of the answer in `StageRequest.found`.
        first: number of the first row.
        rows, columns: shape of the block.
        dtype: dtype in which the rows are sent.
    """

    name: Any
    array: int  # wire ID of the whole array
    first: int
    rows: int
    columns: int
    dtype: str


class StageFailedError(CleaveError):
    """Raised when a step by stages cannot be completed."""


def layers_of(stage: PlannedStage) -> list[int]:
    """Return the numbers of a stage's layers, and `LOSS_LAYER` if the stage computes the loss."""
    return [*range(stage.first, stage.stop), *([LOSS_LAYER] if stage.loss else [])]


@dataclass(frozen=True, slots=True, eq=False)
class StageGraph:
    """An ONNX graph that the PS sends to devices.

    Attributes:
        inputs, outputs: names of the graph's inputs and outputs, in order.
        products: the 16-bit dtype in which devices may compute matrix products; empty for fp32.
    """

    model: bytes  # the serialized ONNX model
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    products: str = ""

    @property
    def nbytes(self) -> int:
        """Return the size of the graph in a device's memory, in bytes."""
        return len(self.model)


@dataclass(frozen=True, slots=True)
class SumShape:
    """The shape of a parameter's gradient sum, stored as an fp32 matrix."""

    rows: int
    columns: int

    @property
    def nbytes(self) -> int:
        """Return the size of the sum in a device's memory, in bytes."""
        return 4 * self.rows * self.columns


@dataclass(frozen=True, slots=True)
class LayerWork:
    """The arrays, graphs and costs of one layer in one step. FLOPs are per token.

    Attributes:
        forward, backward: graphs of the layer's forward and backward passes.
        from_activations: graph of the backward pass that uses retained activations instead of
            recomputing them; None if unavailable.
        of_batch: for each micro-batch, the keyword arguments that differ between micro-batches,
            such as masks, keyed by graph input. Empty if no argument differs.
    """

    forward: StageGraph
    backward: StageGraph
    parameters: Mapping[str, StageArray]  # the layer's parameters, by graph input
    # the shapes of the gradient sums of trained parameters, by parameter name
    sums: Mapping[str, SumShape]
    # keyword arguments of the layer that all micro-batches share, by graph input
    extras: Mapping[str, StageArray]
    forward_flops: int
    backward_flops: int  # includes recomputation of the forward pass
    from_activations: StageGraph | None = None
    # bytes per sample of the activations that a device can retain, by name
    activations: Mapping[str, int] = field(default_factory=dict)
    sample_tokens: int = 1  # number of tokens per sample
    from_activations_flops: int = 0
    of_batch: Sequence[Mapping[str, StageArray]] = ()

    def inputs(self, batch: int) -> dict[str, StageArray]:
        """Map each graph input to the parameter or keyword argument to use for a micro-batch."""
        of_batch = self.of_batch[batch] if self.of_batch else {}
        return {**self.parameters, **self.extras, **of_batch}


@dataclass(frozen=True, slots=True)
class LossWork:
    """The arrays, graph and cost of the loss, which follows the last layer."""

    graph: StageGraph  # computes the loss and its gradients (see `cleave.graphs.loss_graph`)
    parameters: Mapping[str, StageArray]  # arrays by graph input; includes the loss scale
    sums: Mapping[str, SumShape]
    targets: Sequence[StageArray]  # one array of targets for each micro-batch
    flops: int  # FLOPs per token


@dataclass(frozen=True, slots=True)
class EmbeddingWork:
    """The graphs and arrays of everything before the first layer."""

    forward: StageGraph
    backward: StageGraph | None  # None if nothing in the embedding is trained
    parameters: Mapping[str, StageArray]  # arrays by graph input
    sums: Mapping[str, SumShape]


@dataclass(frozen=True, slots=True)
class SliceWork:
    """The arrays, graphs and costs of one vocabulary-parallel loss slice. FLOPs are per token."""

    forward: StageGraph  # see `cleave.graphs.loss_graph`
    backward: StageGraph
    # arrays by graph input; includes the slice's first row and the loss scale
    parameters: Mapping[str, StageArray]
    # as in `LayerWork`. The sum of the LM head contains only the slice's rows.
    sums: Mapping[str, SumShape]
    targets: Sequence[StageArray]  # one array of targets for each micro-batch, shared by all slices
    forward_flops: float
    backward_flops: float
    logits_bytes: int = 0  # size of the logits per token, in fp32


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """A completed step: all that is needed to repeat the updates of a stage.

    Attributes:
        work: the step's layers and their arguments.
        x, dy: for each stage, its inputs and the gradients of its outputs, by pass number (see
            `StepWork.embedding`).
        scalars: coefficients of the optimizer step, by `ResidentParameter.group`.
    """

    work: StepWork
    x: Sequence[Mapping[int, StageArray]]
    dy: Sequence[Mapping[int, StageArray]]
    scalars: Sequence[StageArray]

    def backward(self, stage: int) -> list[int]:
        """Return the numbers of a stage's passes that add gradients to sums, in order."""
        x, dy = self.x[stage], self.dy[stage]
        return [number for number in sorted(x) if number < self.work.batches or number in dy]


@dataclass(frozen=True, slots=True)
class Resident:
    """The trained state of a step's layers, which stays on devices.

    Attributes:
        parameters: the trained parameters of all layers.
        update: graph that updates a parameter; see `cleave.graphs.optimizer_graphs`.
        squares: graph that sums the squares of a gradient's elements.
        log: all steps since the snapshot, oldest first.
        position: total number of updates before the snapshot (`Snapshot.position`).
        fetches: whether the step only fetches the state as a new snapshot, without any passes.
        evaluates: whether the step only computes losses, without gradients and updates.
        copies: maximum number of stages that hot spares follow; None if unlimited.
        keep: stores a received payload of a new snapshot and returns the object to put into
            `Snapshot.state`.
        kept: records of the state that devices had when an earlier process of the PS ended.
        arrays: the weights and moments of all parameters.
    """

    parameters: Mapping[SumName, ResidentParameter]
    update: StageGraph
    squares: StageGraph
    log: Sequence[LoggedStep] = ()
    position: int = 0
    fetches: bool = False
    evaluates: bool = False
    copies: int | None = None
    keep: Callable[[Any], Any] = lambda payload: payload
    kept: Sequence[KeptState] = ()
    arrays: frozenset[StageArray] = field(init=False)

    def __post_init__(self) -> None:
        held = frozenset(a for one in self.parameters.values() for a in one.arrays)
        object.__setattr__(self, "arrays", held)

    @property
    def keyed(self) -> dict[tuple[int, str, int], StageArray]:
        """Return all weights and moments by their keys in `KeptState.state`."""
        return {
            (*key, number): array
            for key, one in self.parameters.items()
            for number, array in enumerate(one.arrays)
        }

    @property
    def now(self) -> int:
        """Return the total number of updates before this step."""
        return self.position + len(self.log)

    def of_stage(self, stage: PlannedStage) -> Iterator[tuple[SumName, ResidentParameter]]:
        """Yield the trained parameters of a stage's layers and of its loss and embedding."""
        numbers = {*layers_of(stage)}
        for key, one in self.parameters.items():
            if key[0] in numbers:
                yield key, one

    def arrays_of(self, stage: PlannedStage) -> Iterator[StageArray]:
        """Yield the weights and moments of the parameters in `of_stage`."""
        for _, one in self.of_stage(stage):
            yield from one.arrays


@dataclass(frozen=True, slots=True)
class StepWork:
    """The inputs of a step by stages: arrays, graphs, and the assignment of devices to stages.

    Attributes:
        kept_batches: maps a device to the maximum numbers of micro-batches whose arrays the device
            retains for the backward pass. A device that is not in the map retains no arrays.
        forward_first: whether a device with requests in both directions runs the forward pass; if
            False, the device alternates between directions.
        watched: (stage index in `planned`, device) pairs. The training thread receives a `PassDone`
            after each backward pass of such a pair.
        resident: the trained state of all layers, which stays on devices; None if the PS sends
            parameters and fetches gradients in each step.
        embedding: the embedding, if the stage with the loss also computes it; None if the PS does.
            In this stage, pass numbers below `batches` stand for the layers and the loss. The
            number `batches` + n stands for the embedding of micro-batch n. If there is no other
            stage, its passes begin with the embedding, and their input is the token IDs.
        ids: with `embedding`, the token IDs of each micro-batch. `x` then has sizes only.
    """

    layers: Sequence[LayerWork]
    loss: LossWork | None  # the whole loss; None if no device computes the whole loss
    # for each micro-batch, the first layer's input, in the dtype in which activations are sent
    x: Sequence[StageArray]
    width: int  # number of columns of an activation
    tokens: Sequence[int]  # for each micro-batch, the number of tokens
    stages: Sequence[PlannedStage]
    gradients: str  # dtype in which devices return gradient sums
    embeds: bool = True  # whether the PS needs the gradient of the first layer's input
    kept_batches: Mapping[int, KeptBatches] = field(default_factory=dict)
    # the planned loss slices; empty unless the loss is vocabulary-parallel
    slices: Sequence[PlannedStage] = ()
    slice_works: Sequence[SliceWork] = ()
    ps_after: Set[int] = frozenset()  # numbers of the stages that are followed by layers on the PS
    forward_first: bool = False
    watched: Set[tuple[int, int]] = frozenset()
    resident: Resident | None = None
    model: int = 0  # ID of the model, unique in the fleet
    embedding: EmbeddingWork | None = None
    ids: Sequence[StageArray] = ()
    # identifies the step. Copies of this object with other devices share the token.
    token: object = field(default_factory=object)

    @property
    def evaluates(self) -> bool:
        """Return whether the step only computes losses."""
        return self.resident is not None and self.resident.evaluates

    @property
    def planned(self) -> Sequence[PlannedStage]:
        """Return the planned stages, followed by the planned loss slices."""
        return [*self.stages, *self.slices]

    @property
    def inner_embedding(self) -> EmbeddingWork | None:
        """Return the embedding if one stage computes everything from token IDs; otherwise None."""
        if self.embedding is None or not self.stages[0].is_whole:
            return None
        return self.embedding

    @property
    def batches(self) -> int:
        """Return the number of micro-batches."""
        return len(self.tokens)

    @property
    def dtype(self) -> str:
        """Return the dtype in which activations and their gradients are sent."""
        return self.x[0].dtype

    def floor_bytes(self, gradient_bytes: int) -> tuple[int, int]:
        """Return the minimum numbers of bytes that the PS sends and receives in a step.

        The minimum assumes that no payload is compressed and no device is lost. Each trained
        parameter is sent once, and its gradient is returned once, unless its state stays on
        devices. Between two stages, the output and its gradient are both returned to the PS and
        sent on. If the PS computes the loss, the last output is returned and its gradient is sent.
        The first stage's input is sent, and its gradient is returned if the PS needs the gradient.
        For a vocabulary-parallel loss, the last layer's output is sent to every slice, and each
        slice returns a gradient. If a device computes the embedding, the first stage's input is
        returned, and its gradient is sent, unless the same stage has all layers.

        Args:
            gradient_bytes: size of one returned gradient element, in bytes.
        """
        parts: list[LayerWork | LossWork | SliceWork] = [*self.layers, *self.slice_works]
        if self.loss is not None:
            parts.append(self.loss)
        if self.resident is not None:
            parts = [] if self._head_is_resident else parts[len(self.layers) :]
        weights = sum(part.parameters[parameter(n)].nbytes for part in parts for n in part.sums)
        elements = sum(each.rows * each.columns for part in parts for each in part.sums.values())
        gradients = elements * gradient_bytes
        activations = sum(x.nbytes for x in self.x) if self.inner_embedding is None else 0
        between, at_ps = 2 * (len(self.stages) - 1), int(self.loss is None)
        passes = between + at_ps + len(self.slices)
        embedding = int(self.embedding is not None)  # of the first stage's input
        down = weights + (1 + passes + embedding * self.embeds) * activations
        return down, gradients + (self.embeds + passes + embedding) * activations

    @property
    def _head_is_resident(self) -> bool:
        """Return whether the trained state of the loss stays on a device."""
        return self.resident is not None and any(
            k == LOSS_LAYER for k, _ in self.resident.parameters
        )


# Wire IDs of a layer's arrays that a device retains: the layer's input, then any activations.
KeptLayer: TypeAlias = tuple[int, ...]


class RequestKind(Enum):
    """The kind of a request to a device."""

    FORWARD = "forward"
    BACKWARD = "backward"
    # Runs the stage with the loss. The stage's output stays on the device.
    LAST = "forward, loss and backward"
    SUMS = "sums"  # the device returns its gradient sums to the PS
    # For stages whose trained state stays on the device:
    RESTORE = "restore"  # the device gets the snapshot and repeats the steps in the log
    SQUARES = "squares"  # the device returns the sum of its squared gradients
    UPDATE = "update"  # the device updates its weights and moments
    STATE = "state"  # the device returns its weights and moments to the PS
    # For devices that train the whole model alone (`cleave.scheduler.rounds`):
    LOCAL = "local step"
    DIFFERENCE = "difference"  # the device returns how its weights differ from the round's first

    @property
    def is_pass(self) -> bool:
        """Return whether the request is a pass of a micro-batch."""
        return self in (RequestKind.FORWARD, RequestKind.BACKWARD, RequestKind.LAST)


@dataclass(slots=True, eq=False)
class StageRequest:
    """A request to a device, for example for one pass of a micro-batch or for gradient sums.

    A request consists of one or more tasks, and the device answers each task.

    Attributes:
        kept: wire IDs of retained arrays, with one entry for each layer, or for each sequence chunk
            in a one-layer stage with chunks.
    """

    kind: RequestKind
    stage: int
    plan: PlannedStage
    batch: int  # index of the micro-batch; -1 for gradient sums
    device: int
    # arrays that the device retains until the backward pass. A `LAST` request drops them itself.
    keep: Keep = Keep.NOTHING
    # wire IDs of the gradient sums to which the backward pass adds
    sums: dict[SumName, int] = field(default_factory=dict)
    dx_wanted: bool = True  # whether the device returns the gradient of the stage's input
    # maps each task in flight to the expected size of the answer in bytes
    answers: dict[int, int] = field(default_factory=dict)
    # blocks of gradient sums, trained state or differences that are not requested yet
    rest: deque[RowsPiece] = field(default_factory=deque)
    # micro-batches that are not repeated yet; None stands for a step's update
    replay: deque[tuple[LoggedStep, int | None]] = field(default_factory=deque)
    # micro-batches of the step under way that a restoring device has added to `sums`
    added: set[int] = field(default_factory=set)
    # maps a name to the array that the device returned
    found: dict[Any, Any] = field(default_factory=dict)
    # maps a place to the largest magnitude returned; empty for emulated payloads
    sizes: dict[Place, float] = field(default_factory=dict)
    kept: Sequence[KeptLayer] = ()
    flops: int = 0  # FLOPs of all tasks together

    @property
    def steps_left(self) -> int:
        """Return the number of logged steps whose updates have not been requested yet."""
        return sum(batch is None for _, batch in self.replay)

    @property
    def layers(self) -> range:
        """Return the numbers of the stage's layers."""
        return range(self.plan.first, self.plan.stop)

    def note_size(self, place: Place, size: float) -> None:
        """Record an array's magnitude `size` if it is NaN or the largest so far at `place`."""
        if math.isnan(size) or size > self.sizes.get(place, -1.0):
            self.sizes[place] = size

    def fetched(self, name: str) -> Any:
        """Return a fetched array, with any sequence chunks joined; None if it was not fetched."""
        pieces = [
            self.found[key] for n in range(len(self.found)) if (key := (name, n)) in self.found
        ]
        return joined(pieces) if pieces else self.found.get(name)


@dataclass(frozen=True, slots=True)
class StageOrder:
    """The PS's record of one task of a stage request, stored in `Task.detail`.

    Attributes:
        rows, columns, out: shape and dtype of the requested array.
    """

    request: StageRequest
    name: Any  # name of the requested array within the request; None if the task runs a graph
    rows: int = 0
    columns: int = 0
    out: str = ""

    @property
    def kind(self) -> TrafficKind:
        """Return the traffic kind of the answer to this task."""
        match self.request.kind:
            case RequestKind.SUMS | RequestKind.DIFFERENCE:
                return TrafficKind.GRADIENTS
            case RequestKind.STATE:
                return TrafficKind.WEIGHTS
            case _:
                return TrafficKind.ACTIVATIONS
