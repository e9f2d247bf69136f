"""Records that a run reports: one JSON object per line with `--json`.

`metrics.jsonl` has the same lines, except `start` and `note`.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, TypeAlias

from cleave.scheduler.traffic import Traffic


@dataclass(frozen=True, slots=True)
class StartRecord:
    """Reports that a run of `steps` steps starts, or resumes after `step` completed steps."""

    EVENT: ClassVar[str] = "start"
    step: int
    steps: int
    run_folder: str


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Reports one optimizer step.

    Attributes:
        step: number of the step, counted from 1.
        loss: mean cross-entropy in nats per learned token, computed before the update.
        tokens: number of input tokens of the step.
        clock: the clock that measures `fleet_s` and `predicted_s`: `virtual` or `wall`.
        method: how the step was computed: by `stages`, by `tiles`, or `local`, on the PS alone.
        predicted_s: predicted duration of a step by stages; 0 for other steps.
        planning_s, audit_s: the parts of `ps_s` for plans of stages and for audits of their
            results.
        wall_s: duration of the step in wall seconds.
        fleet_s: seconds on the fleet's clock spent waiting for GEMMs or a step by stages.
        ps_s: wall seconds in which the PS did not wait for the fleet.
        verify_s: processor seconds for verifying the devices' results.
        downlink_bytes, uplink_bytes: bytes of encoded messages to and from devices.
        floor_bytes: bytes if each GEMM operand and result were transferred once. For a step by
            stages, see `StepWork.floor_bytes`.
        tiles, blocks, reissued: numbers of planned tiles, returned blocks and reissued tasks.
        local_gemms: number of GEMMs that the PS computed because no device could.
        journal_bytes: bytes of GEMM results written to the journal.
        journal_s: seconds that the training thread spent on the journal.
        journal_saved_s: seconds that the fleet had originally needed for the GEMM results that
            were read from the journal in this step.
        traffic: `downlink_bytes` and `uplink_bytes`, divided by purpose.
        saved: bytes saved by compression, divided by purpose.
        against_loss: loss of the same step in the compared run. None, and then omitted from the
            output, if no run is compared.
    """

    EVENT: ClassVar[str] = "step"
    step: int
    loss: float
    tokens: int
    learning_rate: float
    clock: str
    method: str
    wall_s: float
    fleet_s: float
    ps_s: float
    verify_s: float
    downlink_bytes: int
    uplink_bytes: int
    floor_bytes: int
    tiles: int
    blocks: int
    reissued: int
    local_gemms: int = 0
    predicted_s: float = 0.0
    planning_s: float = 0.0
    audit_s: float = 0.0
    journal_bytes: int = 0
    journal_s: float = 0.0
    journal_saved_s: float = 0.0
    traffic: Traffic = field(default_factory=Traffic)
    saved: Traffic = field(default_factory=Traffic)
    against_loss: float | None = None


@dataclass(frozen=True, slots=True)
class EvalRecord:
    """Reports the held-out loss after `step` steps, in nats per learned token."""

    EVENT: ClassVar[str] = "eval"
    step: int
    eval_loss: float


@dataclass(frozen=True, slots=True)
class NoteRecord:
    """Reports a message for the user, such as the path of a written checkpoint."""

    EVENT: ClassVar[str] = "note"
    text: str


@dataclass(frozen=True, slots=True)
class PresenceRecord:
    """Reports a change of what computes: devices, nothing, or the PS in place of devices.

    Attributes:
        step: number of the current step, counted from 1.
        state: `present` if devices are connected, `absent` if training waits for a device, `local`
            if the PS computes instead of devices.
    """

    EVENT: ClassVar[str] = "fleet"
    step: int
    state: str
    text: str


@dataclass(frozen=True, slots=True)
class DiskRecord:
    """Reports that training waits (`full`), or that the disk has space again (`free`)."""

    EVENT: ClassVar[str] = "disk"
    step: int
    state: str
    text: str


@dataclass(frozen=True, slots=True)
class ServersRecord:
    """Reports that a run of several servers waits for its cluster (`waiting`), or is `running`."""

    EVENT: ClassVar[str] = "servers"
    state: str
    text: str


@dataclass(frozen=True, slots=True)
class DoneRecord:
    """Reports the end of a run, with totals over the steps that this process has done.

    `StepRecord` describes the attributes that are not listed here.

    Attributes:
        steps: number of completed steps, including the steps of earlier processes.
        first_loss, loss: losses of this process's first and last step; NaN without a step.
        stopped: whether the run was stopped before its last step.
        offload: the job's `--offload`: `all` or `auto`.
        gemms: number of GEMMs of steps by tiles, on the fleet or on the PS.
        kept_gemms: number of GEMMs that `auto` kept on the PS. With `all`, the number that `auto`
            would have kept.
        kept_saves_s: predicted seconds that the kept GEMMs saved, or would have saved.
        kept_reasons: one sentence for each of the GEMM shapes with the largest savings.
        journal_gemms: number of GEMMs whose results were read from the journal.
        resumed_after: number of completed steps when this process began; 0 for a new run.
    """

    EVENT: ClassVar[str] = "done"
    steps: int
    first_loss: float
    loss: float
    tokens: int
    clock: str
    wall_s: float
    fleet_s: float
    downlink_bytes: int
    uplink_bytes: int
    tiles: int
    blocks: int
    reissued: int
    run_folder: str
    stopped: bool
    offload: str = "all"
    gemms: int = 0
    kept_gemms: int = 0
    kept_saves_s: float = 0.0
    kept_reasons: tuple[str, ...] = ()
    local_gemms: int = 0
    journal_bytes: int = 0
    journal_s: float = 0.0
    journal_saved_s: float = 0.0
    journal_gemms: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    saved: Traffic = field(default_factory=Traffic)
    resumed_after: int = 0


@dataclass(frozen=True, slots=True)
class TextRecord:
    """Reports a piece of text: the prompt, or a piece of text that the model has generated."""

    EVENT: ClassVar[str] = "text"
    text: str


@dataclass(frozen=True, slots=True)
class ProgressRecord:
    """Reports how many windows of a text, or how many questions, have been evaluated."""

    EVENT: ClassVar[str] = "progress"
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class PredictedRecord:
    """Reports a model's loss on a text, in nats per predicted token, and its perplexity."""

    EVENT: ClassVar[str] = "predicted"
    loss: float
    perplexity: float
    tokens: int
    text: str


@dataclass(frozen=True, slots=True)
class AnsweredRecord:
    """Reports a model's accuracy on multiple-choice questions, from 0 to 1.

    `cut` is the number of questions whose beginning was cut off, because the prompt is longer than
    the model's context.
    """

    EVENT: ClassVar[str] = "answered"
    accuracy: float
    right: int
    questions: int
    cut: int
    text: str


Record: TypeAlias = (
    StartRecord
    | StepRecord
    | EvalRecord
    | NoteRecord
    | PresenceRecord
    | DiskRecord
    | ServersRecord
    | DoneRecord
    | TextRecord
    | ProgressRecord
    | PredictedRecord
    | AnsweredRecord
)


def to_dict(record: Record) -> dict[str, Any]:
    """Return the record's JSON object, with the event name as its first item.

    None replaces NaN and infinity, because JSON has neither.
    """
    values = asdict(record)
    if values.get("against_loss", 0.0) is None:
        del values["against_loss"]
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            values[name] = None
    return {"event": record.EVENT, **values}
