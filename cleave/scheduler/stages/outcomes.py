"""Messages from a stage-wise step to the training thread: requests and results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cleave.planner.stages.model import PlannedStage
from cleave.scheduler.stages.arrays import Place, StageArray


@dataclass(frozen=True, slots=True)
class OutputReady:
    """The last layer's output for a micro-batch.

    The caller must return the gradient of this output.
    """

    batch: int
    payload: Any


@dataclass(frozen=True, slots=True)
class InputWanted:
    """A stage's output, which the PS's own layers need as input.

    The caller must run these layers and return the input of the next stage.

    Attributes:
        stage: number of the stage before the PS's layers.
        batch: index of the micro-batch.
        payload: the stage's output.
    """

    stage: int
    batch: int
    payload: Any


@dataclass(frozen=True, slots=True)
class GradientWanted:
    """The gradient of a stage's input, which the backward pass of the PS's own layers needs.

    The caller must run this backward pass and return the gradient of stage `stage`'s output.

    Attributes:
        stage: number of the stage before the PS's layers.
        batch: index of the micro-batch.
        payload: the gradient of the input of stage `stage + 1`.
    """

    stage: int
    batch: int
    payload: Any


@dataclass(frozen=True, slots=True)
class SlicesReady:
    """The forward results of all loss slices for a micro-batch.

    The caller must return the log-sum-exp over the whole vocabulary, shape (tokens, 1), fp32.

    Attributes:
        batch: index of the micro-batch.
        payloads: for each slice, the slice's log-sum-exp and the target's logit, shape (tokens, 2),
            fp32.
    """

    batch: int
    payloads: Sequence[Any]


@dataclass(frozen=True, slots=True)
class SlicesBack:
    """Each loss slice's gradient of the last layer's output, for a micro-batch.

    The caller must sum these gradients and return the sum.
    """

    batch: int
    payloads: Sequence[Any]


@dataclass(frozen=True, slots=True)
class SumsRecord:
    """Gradient sums that one device returned.

    Attributes:
        device: the device that returned the sums.
        batches: the micro-batches whose gradients are in the sums.
        found: maps (layer number, parameter, first row) to rows of a sum.
    """

    device: int
    batches: frozenset[int]
    found: Mapping[tuple[int, str, int], Any]


@dataclass(frozen=True, slots=True)
class StageRecord:
    """Inputs and results of a stage in one step, for auditing.

    Attributes:
        plan: the stage's layers.
        x: maps a micro-batch to the stage's input.
        dy: maps a micro-batch to the gradient of the stage's output.
        y: maps a micro-batch to the output that a device returned.
        dx: maps a micro-batch to the gradient of the stage's input that a device returned.
        forward_by, backward_by: map a micro-batch to the device that returned `y` or `dx`.
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
    """Unusual values from a device. The caller must decide whether the values are correct.

    A value is unusual if it is not finite or is much larger than usual, or if no usual magnitude is
    known yet. The step does not use the values before `StageStep.resolve` is called.

    Attributes:
        device: the device that returned the values.
        record: inputs and results of one micro-batch, or of the device's gradient sums.
        losses: maps the micro-batch to its loss, if the device returned a loss.
        sizes: maps the place of each unusual array to the array's largest magnitude.
    """

    device: int
    record: StageRecord
    losses: Mapping[int, Any]
    sizes: Mapping[Place, float]


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a completed stage-wise step.

    Attributes:
        losses: maps a micro-batch to its loss, if devices computed the loss.
        dx: maps a micro-batch to the gradient of `StepWork.x`, if this gradient was wanted.
        gradients: maps (layer number, parameter) to a list of gradient sums, one for each
            accumulator, in a fixed order. Each sum is a list of blocks of consecutive rows.
        records: one record for each stage.
    """

    losses: Mapping[int, Any]
    dx: Mapping[int, Any]
    gradients: Mapping[tuple[int, str], Sequence[Sequence[Any]]]
    records: Sequence[StageRecord] = ()


@dataclass(frozen=True, slots=True)
class StepFailed:
    """A stage-wise step cannot be completed.

    Attributes:
        reason: a description for people.
        final: whether a retry would fail as well.
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
