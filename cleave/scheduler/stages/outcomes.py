"""Messages from a step by stages to the training thread: requests and results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from cleave.planner.stages.model import PlannedStage
from cleave.scheduler.stages.arrays import StageArray
from cleave.scheduler.stages.resident import Holding, KeptState, Snapshot
from cleave.scheduler.stages.usual_sizes import Place


@dataclass(frozen=True, slots=True)
class OutputReady:
    """The last layer's output for a micro-batch. The training thread must return the gradient."""

    batch: int
    payload: Any


@dataclass(frozen=True, slots=True)
class InputWanted:
    """The output of stage `stage`, which is followed by layers on the PS.

    The training thread must run the PS's layers, and return the input of the next stage.
    """

    stage: int
    batch: int
    payload: Any


@dataclass(frozen=True, slots=True)
class GradientWanted:
    """The gradient of stage `stage + 1`'s input. Layers on the PS precede this stage.

    The training thread must run the backward pass of the PS's layers, and return the gradient of
    stage `stage`'s output.
    """

    stage: int
    batch: int
    payload: Any


@dataclass(frozen=True, slots=True)
class SlicesReady:
    """The forward results of all loss slices for a micro-batch.

    The training thread must return the log-sum-exp over the whole vocabulary, shape (tokens, 1),
    fp32.
    """

    batch: int
    # for each slice, its log-sum-exp and the target's logit, shape (tokens, 2), fp32
    payloads: Sequence[Any]


@dataclass(frozen=True, slots=True)
class SlicesBack:
    """Each loss slice's share of the gradient of the last layer's output.

    The training thread must return the sum of the shares.
    """

    batch: int
    payloads: Sequence[Any]


@dataclass(frozen=True, slots=True)
class SumsRecord:
    """Gradient sums that one device returned."""

    device: int
    batches: frozenset[int]  # the micro-batches whose gradients are in the sums
    # maps (layer number, parameter, first row) to rows of a sum
    found: Mapping[tuple[int, str, int], Any]


@dataclass(frozen=True, slots=True)
class StageRecord:
    """Inputs and results of a stage in one step, by micro-batch, for audits.

    Attributes:
        x, dy: the stage's input, and the gradient of the stage's output.
        y, dx: the stage's output and the gradient of its input, as devices returned them.
        forward_by, backward_by: the devices that returned `y` and `dx`.
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
    """Unusual values from a device. The training thread must decide whether they are correct.

    A value is unusual if it is not finite or much larger than usual, or if no usual magnitude is
    known yet. The step uses the values only if `StageStep.resolve` accepts them.
    """

    device: int
    record: StageRecord  # inputs and results of one micro-batch, or the device's gradient sums
    losses: Mapping[int, Any]  # maps the micro-batch to its loss, if the device returned a loss
    # maps the place of each unusual array to the array's largest magnitude
    sizes: Mapping[Place, float]


@dataclass(frozen=True, slots=True)
class PassDone:
    """A backward pass listed in `StepWork.watched` has finished and may now be audited.

    Attributes:
        stage: index of the stage in `StepWork.planned`.
        losses: maps the micro-batch to its loss, if a device computed the loss.
        record: inputs and results of this micro-batch.
    """

    stage: int
    device: int
    batch: int
    record: StageRecord
    losses: Mapping[int, Any]


@dataclass(frozen=True, slots=True)
class StageDone:
    """A stage has finished. The training thread may use its results before the step ends.

    Attributes:
        number: index of the stage in `StepResult.records`.
        losses: maps a micro-batch to its loss; empty if the stage does not compute the loss.
        gradients: maps (layer number, parameter) to gradient sums, as in `StepResult`.
    """

    number: int
    record: StageRecord
    losses: Mapping[int, Any]
    gradients: Mapping[tuple[int, str], Sequence[Sequence[Any]]]


TIMELINE_PARTS: Final = 40  # parts of a step in a device's timeline


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """One device's busy times in a step by stages, in seconds.

    Attributes:
        name: the device's name.
        compute_s: computation time that the device reported.
        down_s, up_s: sizes of all messages to and from the device, divided by its link rates.
        timeline: for each of `TIMELINE_PARTS` equal parts of the step, the share of time that the
            device spent computing. A computation counts as finished when its answer arrives.
    """

    name: str
    compute_s: float
    down_s: float
    up_s: float
    timeline: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a completed step by stages.

    Attributes:
        gradients: maps (layer number, parameter) to gradient sums, one for each accumulator, in a
            fixed order. Each sum is a list of blocks of consecutive rows.
        used: busy times of the busiest devices in the step, busiest first.
        holders: the devices that returned `state`, by stage number.
        squares: with trained state on devices, each stage's sum of squared gradients.
        fetching: number of updates before the snapshot that devices are still returning; None if no
            snapshot is being fetched.
        restored: number of stages whose trained state a device rebuilt from a snapshot and the log.
        kept: the trained state on devices after the step.
        left: names of the devices that left during the step while they had a stage.
    """

    losses: Mapping[int, Any]  # maps a micro-batch to its loss, if devices computed the loss
    # maps a micro-batch to the gradient of `StepWork.x`, if this gradient was wanted
    dx: Mapping[int, Any]
    gradients: Mapping[tuple[int, str], Sequence[Sequence[Any]]]
    records: Sequence[StageRecord] = ()  # one record for each stage
    used: Sequence[DeviceUse] = ()
    # the trained state that devices returned, by array and first row; see `Resident.fetches`
    state: Mapping[tuple[StageArray, int], Any] = field(default_factory=dict)
    holders: Mapping[int, Holding] = field(default_factory=dict)
    squares: Sequence[float] = ()
    fetching: int | None = None
    snapshot: Snapshot | None = None  # of an earlier step, if it finished during this step
    restored: int = 0
    kept: Sequence[KeptState] = ()
    left: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class UpdateWanted:
    """All devices have accumulated their gradients and wait for the optimizer coefficients.

    This outcome occurs only in steps with trained state on devices. The training thread must return
    the coefficients.

    Attributes:
        squares: sum of the squared elements of all gradients on devices.
        losses, dx: as in `StepResult`.
    """

    squares: float
    losses: Mapping[int, Any]
    dx: Mapping[int, Any]


@dataclass(frozen=True, slots=True)
class StepFailed:
    """A step by stages failed for this reason. If `final`, a retry would also fail."""

    reason: str
    final: bool = False


StageOutcome = (
    OutputReady
    | InputWanted
    | GradientWanted
    | SlicesReady
    | SlicesBack
    | Suspect
    | PassDone
    | StageDone
    | UpdateWanted
    | StepResult
    | StepFailed
)
