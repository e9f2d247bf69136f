"""Data structures of a round of local updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from cleave.scheduler.stages.arrays import StageArray
from cleave.scheduler.stages.work import EmbeddingWork, StageGraph, StepWork, SumName


@dataclass(frozen=True, slots=True)
class Returned:
    """An output of a difference graph, and the shape and dtype in which devices return it."""

    name: str
    rows: int
    columns: int
    dtype: str

    @property
    def kept_bytes(self) -> int:
        """Return the output's size in a device's memory, in fp32."""
        return 4 * self.rows * self.columns


@dataclass(frozen=True, slots=True)
class ExchangeWork:
    """The graphs that a device runs to compute a parameter's difference and update the parameter.

    `cleave.graphs.exchange_graphs` creates these graphs.

    Attributes:
        difference: graph with two inputs: the weight at the beginning of the round and the current
            weight. With `keeps_error`, the error is a further input, and the new error a further
            output.
        returned: the other outputs of `difference`.
        added: graph that computes the new weight from the weight at the beginning of the last round
            and the arrays of an update.
        keeps_error: whether devices keep the error, which is the unreturned part of their
            differences.
    """

    difference: StageGraph
    returned: Sequence[Returned]
    added: StageGraph
    keeps_error: bool = False


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model that every device trains as a whole, with its own optimizer.

    Attributes:
        step: the layers and the loss. `step.resident` has the trained parameters of the whole
            model. Parameters outside the layers have the layer number `LOSS_LAYER`.
        exchange: the graphs of the exchange, for each trained parameter.
        zeros: graph that returns zeros in the shape of a weight, to initialize moments.
        mixed: graph that combines the server's new weight with the device's own weight; None if the
            device continues with the server's weight.
        clip: graph that clips gradients by scaling an update's coefficients; None if gradients are
            not clipped.
        estimate: graph that estimates second moments from the first gradient, on devices that join
            late; None if the optimizer has no second moments.
        held_bytes: size of all arrays that stay on a device, in bytes.
        working_bytes: further memory for a micro-batch, without retained activations.
        activations_bytes: size of all retained activations of a micro-batch.
    """

    step: StepWork
    embedding: EmbeddingWork
    exchange: Mapping[SumName, ExchangeWork]
    zeros: StageGraph
    mixed: StageGraph | None
    clip: StageGraph | None
    estimate: StageGraph | None
    held_bytes: int
    working_bytes: int
    activations_bytes: int


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A micro-batch: its token IDs, its target tokens and a loss factor for each token."""

    ids: StageArray
    targets: StageArray
    scale: StageArray
    tokens: int


@dataclass(frozen=True, slots=True)
class InnerState:
    """A device's training state besides its weights: optimizer moments and errors.

    Attributes:
        updates: number of updates in the optimizer moments.
        late: whether the moments began after the first round of the run; see `LocalWorker.late`.
        arrays: for each trained parameter, its moments and, if devices keep errors, its error.
    """

    updates: int
    late: bool
    arrays: Mapping[SumName, Mapping[str, StageArray]]


DeviceKey: TypeAlias = tuple[str, int | None]
"""A device's name and its `Session.identity`. Saved states find their device by this pair."""


@dataclass(frozen=True, slots=True)
class RoundWork:
    """A round of local updates: each device's data, and the weight changes since the last round.

    Attributes:
        number: number of the round in this process, from 1.
        steps: for each device, its local steps. A step has one or more micro-batches.
        weights: the current value of each trained parameter, for devices that lack the model.
        updates: for each trained parameter, the change since the beginning of the last round, as
            arrays by the graph input of `ExchangeWork.added`.
        scalars: returns the coefficients of an optimizer step, given the index of the local step in
            the round, the number of previous updates of the device's moments, and
            `InnerState.late`.
        returned: the trained parameters whose differences devices return.
        overlap: number of local steps before a device adds `updates`, and number of local steps
            after it has computed the difference.
        states: maps a device to its saved states. If this device lacks the model, it
            removes the first state and begins with it, instead of with new moments.
        collected: dtype in which devices return their `InnerState`, and do nothing else. The state
            is from the end of the last round, or from its beginning if the round is incomplete.
            Empty in normal rounds.
    """

    model: LocalModel
    number: int
    steps: Mapping[int, Sequence[Sequence[MicroBatch]]]
    weights: Mapping[SumName, StageArray]
    updates: Mapping[SumName, Mapping[str, StageArray]]
    scalars: Callable[[int, int, bool], Sequence[StageArray]]
    returned: Sequence[SumName]
    overlap: tuple[int, int] = (0, 0)
    states: Mapping[DeviceKey, list[InnerState]] = field(default_factory=dict)
    collected: str = ""
    token: object = field(default_factory=object)


@dataclass(frozen=True, slots=True)
class RoundPart:
    """One device's work in a round.

    Attributes:
        tokens: number of tokens in the local steps.
        losses: the returned loss of each micro-batch, by (local step, micro-batch).
        difference: for each returned parameter, the rows of each returned array, in order.
        compute_s: computation time of the local steps in seconds, as reported by the device.
        flops: floating-point operations of the local steps.
        updates: number of updates in the device's optimizer moments.
        late: see `InnerState.late`.
        identity: see `Session.identity`.
    """

    device: int
    name: str
    steps: int
    tokens: int
    losses: Mapping[tuple[int, int], Any]
    difference: Mapping[SumName, Mapping[str, Sequence[Any]]]
    compute_s: float
    flops: int
    updates: int = 0
    late: bool = False
    identity: int | None = None


@dataclass(frozen=True, slots=True)
class RoundResult:
    """The result of a round. `lost` maps names of devices to reasons why their work was lost."""

    parts: Sequence[RoundPart]
    lost: Mapping[str, str]
