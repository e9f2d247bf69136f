"""Data structures of a round of local updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cleave.scheduler.stages.arrays import StageArray
from cleave.scheduler.stages.work import EmbeddingWork, StageGraph, StepWork, SumName


@dataclass(frozen=True, slots=True)
class Returned:
    """An output of a difference graph, and how it is returned."""

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
    """The graphs with which a device returns the difference of a parameter, and updates it.

    `cleave.graphs.exchange_graphs` makes them.

    Attributes:
        difference: graph with two inputs: the weight at the beginning of a round, and now. With
            `keeps_error`, the graph also has the error as an input, and the new one as an output.
        returned: the other outputs of `difference`.
        added: graph from the weight at the beginning of the last round, and the arrays of an
            update, to the new weight.
        keeps_error: whether devices keep the part of their differences that they do not return.
    """

    difference: StageGraph
    returned: Sequence[Returned]
    added: StageGraph
    keeps_error: bool = False


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model that each device trains whole, with its optimizer.

    Attributes:
        step: the layers and the loss. `step.resident` has the trained parameters of the whole
            model. Parameters outside the layers have the layer number `LOSS_LAYER`.
        exchange: the graphs of the exchange, for each trained parameter.
        zeros: graph that returns zeros in the shape of a weight, for moments.
        mixed: graph from the server's new weight and the device's own to the one with which the
            device continues; None if it continues with the server's.
        clip: graph that clips the coefficients of an update; None without clipping.
        held_bytes: size of all arrays that stay on a device.
        working_bytes: further memory for a micro-batch, without retained activations.
        activations_bytes: size of all retained activations of a micro-batch.
    """

    step: StepWork
    embedding: EmbeddingWork
    exchange: Mapping[SumName, ExchangeWork]
    zeros: StageGraph
    mixed: StageGraph | None
    clip: StageGraph | None
    held_bytes: int
    working_bytes: int
    activations_bytes: int


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Token IDs, target tokens and the factor of each token's loss."""

    ids: StageArray
    targets: StageArray
    scale: StageArray
    tokens: int


@dataclass(frozen=True, slots=True)
class InnerState:
    """What a device has learned besides its weights.

    Attributes:
        updates: number of updates in the optimizer moments.
        arrays: for each trained parameter, its moments and, if devices keep errors, its error.
    """

    updates: int
    arrays: Mapping[SumName, Mapping[str, StageArray]]


@dataclass(frozen=True, slots=True)
class RoundWork:
    """A round: the data of each device, and the change of the weights since the last round.

    Attributes:
        number: number of the round in this process, from 1.
        steps: for each device, its local steps. A step has one or more micro-batches.
        weights: the present value of each trained parameter, for devices that lack it.
        updates: for each trained parameter, the change since the beginning of the last round, as
            arrays by the graph input of `ExchangeWork.added`.
        scalars: returns the coefficients of an optimizer step, given the number of the local step
            in the round, and the number of earlier updates of the device's moments.
        returned: the trained parameters whose differences devices return.
        overlap: number of local steps before a device adds `updates`, and number of local steps
            after it has computed the difference.
        states: what devices of a name begin with if they lack the model, instead of new moments.
            Each state is removed by the first device that begins with it.
        collected: dtype in which devices return their `InnerState` of the beginning of the last
            round, or of its end if it is complete. They do nothing else. Empty in normal rounds.
    """

    model: LocalModel
    number: int
    steps: Mapping[int, Sequence[Sequence[MicroBatch]]]
    weights: Mapping[SumName, StageArray]
    updates: Mapping[SumName, Mapping[str, StageArray]]
    scalars: Callable[[int, int], Sequence[StageArray]]
    returned: Sequence[SumName]
    overlap: tuple[int, int] = (0, 0)
    states: Mapping[str, list[InnerState]] = field(default_factory=dict)
    collected: str = ""
    token: object = field(default_factory=object)


@dataclass(frozen=True, slots=True)
class RoundPart:
    """The work of one device in a round.

    Attributes:
        tokens: number of tokens in the local steps.
        losses: the returned loss of each micro-batch, by (local step, micro-batch).
        difference: for each returned parameter, the rows of each returned array, in order.
        compute_s: computation time of the local steps in seconds, as reported by the device.
        flops: floating-point operations of the local steps.
        updates: number of updates in the device's optimizer moments.
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


@dataclass(frozen=True, slots=True)
class RoundResult:
    """The result of a round. `lost` maps the name of each device whose work is lost to why."""

    parts: Sequence[RoundPart]
    lost: Mapping[str, str]
