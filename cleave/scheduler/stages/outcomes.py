"""Messages to the training thread about a step by stages: requests and results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cleave.planner.stages.model import PlannedStage
from cleave.scheduler.stages.arrays import StageArray
from cleave.scheduler.stages.usual_sizes import Place


@dataclass(frozen=True, slots=True)
class OutputReady:
    """The last layer's output of a micro-batch; the caller must return its gradient."""

    batch: int
    payload: Any


@dataclass(frozen=True, slots=True)
class InputWanted:
    """A stage's output; the caller must run the PS's layers and return the next stage's input.

    Attributes:
        stage: number of the stage before the PS's layers.
        payload: the stage's output.
    """

    stage: int
    batch: int
    payload: Any


@dataclass(frozen=True, slots=True)
class GradientWanted:
    """A stage's input gradient; the caller must return the gradient for the previous stage.

    Attributes:
        stage: number of the stage before the PS's layers.
        payload: the gradient of the next stage's input.
    """

    stage: int
    batch: int
    payload: Any


@dataclass(frozen=True, slots=True)
class SlicesReady:
    """The forward results of all slices of the loss for a micro-batch.

    The caller must return the log-sum-exp over the whole vocabulary, shape (tokens, 1), fp32.

    Attributes:
        payloads: by slice, log-sum-exp and target's logit, shape (tokens, 2), fp32.
    """

    batch: int
    payloads: Sequence[Any]


@dataclass(frozen=True, slots=True)
class SlicesBack:
    """The last output's gradients from all slices of the loss; the caller must sum them."""

    batch: int
    payloads: Sequence[Any]


@dataclass(frozen=True, slots=True)
class SumsRecord:
    """Gradient sums as one device sent them.

    Attributes:
        device: the device that sent them.
        batches: the micro-batches that they contain.
        found: the sums, by layer number, parameter and first row.
    """

    device: int
    batches: frozenset[int]
    found: Mapping[tuple[int, str, int], Any]


@dataclass(frozen=True, slots=True)
class StageRecord:
    """Inputs and results of a stage, for auditing.

    Attributes:
        plan: the stage's layers.
        x, dy: by micro-batch, the stage's input and the gradient of its output.
        y, dx: by micro-batch, the output and the input's gradient that devices returned.
        forward_by, backward_by: by micro-batch, the devices that returned `y` and `dx`.
        sums: the gradient sums.
    """

    plan: PlannedStage
    x: Mapping[int, StageArray]
    dy: Mapping[int, StageArray]
    y: Mapping[int, Any]
    dx: Mapping[int, Any]
    forward_by: Mapping[int, int]
    backward_by: Mapping[int, int]
    sums: Sequence[SumsRecord]


@dataclass(frozen=True, slots=True)
class Suspect:
    """Unusual numbers from a device, for the caller to judge.

    The numbers are not finite, much larger than usual, or without a known usual magnitude. They are
    not used before `StageStep.resolve`.

    Attributes:
        device: the device that returned them.
        record: inputs and results of one micro-batch, or of the device's sums.
        losses: the loss by micro-batch, if it was returned.
        sizes: the unusual magnitudes, by place.
    """

    device: int
    record: StageRecord
    losses: Mapping[int, Any]
    sizes: Mapping[Place, float]


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a completed step by stages.

    Attributes:
        losses: losses by micro-batch, if devices computed them.
        dx: by micro-batch, the gradient of `StepWork.x`, if it was wanted.
        gradients: by layer number and parameter, the sums of each device's group of micro-batches,
            in a fixed order, cut into consecutive rows.
        records: the record of each stage.
    """

    losses: Mapping[int, Any]
    dx: Mapping[int, Any]
    gradients: Mapping[tuple[int, str], Sequence[Sequence[Any]]]
    records: Sequence[StageRecord] = ()


@dataclass(frozen=True, slots=True)
class StepFailed:
    """A step by stages cannot be completed.

    Attributes:
        reason: a text for people.
        final: whether a retry is pointless.
    """

    reason: str
    final: bool = False


StageOutcome = (
    OutputReady
    | InputWanted
    | GradientWanted
    | SlicesReady
    | SlicesBack
    | Suspect
    | StepResult
    | StepFailed
)
