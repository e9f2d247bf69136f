"""What the training thread is told of a step by stages: what is wanted of it, and what came."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cleave.planner.stages.model import PlannedStage
from cleave.scheduler.stages.arrays import StageArray
from cleave.scheduler.stages.usual_sizes import Place


@dataclass(frozen=True, slots=True)
class OutputReady:
    """Tells that the last layer's output of a micro-batch is here: its gradient is wanted."""

    batch: int
    payload: Any


@dataclass(frozen=True, slots=True)
class InputWanted:
    """Tells what a stage returned before layers of the PS: the next stage's input is wanted.

    Attributes:
        stage: the number of the stage before these layers.
        batch: the micro-batch.
        payload: what the stage returned.
    """

    stage: int
    batch: int
    payload: Any


@dataclass(frozen=True, slots=True)
class GradientWanted:
    """Tells the gradient after layers of the PS: that of the stage before them is wanted.

    Attributes:
        stage: the number of the stage before these layers.
        batch: the micro-batch.
        payload: the gradient of the next stage's input.
    """

    stage: int
    batch: int
    payload: Any


@dataclass(frozen=True, slots=True)
class SlicesReady:
    """Tells what all slices of the loss found of a micro-batch: the loss can be made of that.

    What is wanted is the log-sum-exp over the whole vocabulary, shape (tokens, 1), fp32.

    Attributes:
        batch: the micro-batch.
        payloads: of each slice, log-sum-exp and target's logit, shape (tokens, 2), fp32.
    """

    batch: int
    payloads: Sequence[Any]


@dataclass(frozen=True, slots=True)
class SlicesBack:
    """Tells the gradients of the last layer's output by all slices: their sum is wanted."""

    batch: int
    payloads: Sequence[Any]


@dataclass(frozen=True, slots=True)
class SumsRecord:
    """Holds sums of gradients as one device sent them.

    Attributes:
        device: whose they are.
        batches: the micro-batches that are in them.
        found: the sums by layer's number, parameter and first row.
    """

    device: int
    batches: frozenset[int]
    found: Mapping[tuple[int, str, int], Any]


@dataclass(frozen=True, slots=True)
class StageRecord:
    """Holds what devices were given for a stage and what they returned, to be audited.

    Attributes:
        plan: its layers.
        x, dy: by micro-batch, its input and the gradient of its output.
        y, dx: by micro-batch, what devices returned.
        forward_by, backward_by: by micro-batch, the device that returned `y`, and `dx`.
        sums: the sums of gradients.
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
    """Tells that a device returned numbers that stand out: the caller is to say what they are.

    They are not finite, or much larger than usual, or nothing is known of what is usual. Nothing
    is made of them before `StageStep.resolve`.

    Attributes:
        device: which returned them.
        record: what it was given for them, and the numbers: of one micro-batch, or its sums.
        losses: the loss by micro-batch, if that is among them.
        sizes: the largest magnitudes that stand out, by place.
    """

    device: int
    record: StageRecord
    losses: Mapping[int, Any]
    sizes: Mapping[Place, float]


@dataclass(frozen=True, slots=True)
class StepResult:
    """Holds what came of a step by stages that is done.

    Attributes:
        losses: by micro-batch, where devices computed them.
        dx: by micro-batch, the gradient with respect to `StepWork.x`, if it was wanted.
        gradients: by layer's number and parameter, the sums of each group of micro-batches that was
            on one device, in a fixed order, cut into consecutive rows.
        records: of each stage.
    """

    losses: Mapping[int, Any]
    dx: Mapping[int, Any]
    gradients: Mapping[tuple[int, str], Sequence[Sequence[Any]]]
    records: Sequence[StageRecord] = ()


@dataclass(frozen=True, slots=True)
class StepFailed:
    """Tells that a step by stages cannot be completed.

    Attributes:
        reason: a text for people.
        final: whether it is no use to try again.
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
