"""Records of events in a run. With `--json`, each record is printed as one line of JSON.

Steps, evaluations, samples, changes of the fleet and the end of the run are also written to
`metrics.jsonl`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, TypeAlias

from cleave.scheduler.counters import Traffic
from cleave.scheduler.stages.outcomes import DeviceUse


@dataclass(frozen=True, slots=True)
class StartRecord:
    """Record of the start of a run of `steps` steps, or of its resumption after step `step`.

    `method` is the job's `--method`, which `auto` leaves open.
    """

    EVENT: ClassVar[str] = "start"
    step: int
    steps: int
    run_folder: str
    method: str


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Record of one optimizer step.

    Attributes:
        step: number of the step, counted from 1.
        loss: mean cross-entropy before the update, in nats per learned token, plus the auxiliary
            loss of a mixture of experts.
        clock: the clock that measures `fleet_s` and `predicted_s`: `virtual` or `wall`.
        method: how the step was computed: `stages`, `tiles`, `local` (on the PS alone), or `diloco`
            (this is the last step of a round of local updates).
        predicted_s: predicted duration of a step by stages, in seconds; 0 for other steps.
        planning_s, audit_s: parts of `ps_s` in a step by stages, spent waiting for stage plans and
            for audits, in seconds.
        loss_s, sums_s: parts of `ps_s` in a step by stages, spent on the loss and the PS's own
            layers, and on reading and adding returned gradients, in seconds.
        optimizer_s: part of `ps_s` spent on updating the parameters, in seconds.
        devices: how long the busiest devices were busy in a step by stages.
        wall_s: wall-clock duration of the step in seconds.
        ended_s: Unix time at which the step ended.
        fleet_s: time spent waiting for GEMMs or a step by stages, in seconds on `clock`.
        ps_s: wall-clock time in seconds during which the PS did not wait for the fleet.
        verify_s: CPU time spent verifying the devices' results, in seconds.
        downlink_bytes, uplink_bytes: total size of messages to and from devices, as encoded.
        floor_bytes: fewest bytes that the step can transfer; see `FleetCounters.floor_down_bytes`.
        tiles, blocks, reissued: numbers of planned tiles, returned blocks and reissued tasks.
        local_gemms: number of GEMMs that the PS computed because no device was available.
        journal_bytes: size of the GEMM results written to the journal, in bytes.
        journal_s: time that the training thread spent on the journal, in seconds.
        journal_saved_s: time, in seconds, that the fleet originally took for the GEMM results
            that this step read from the journal.
        traffic: `downlink_bytes` and `uplink_bytes` by category.
        saved: number of bytes in each category that compression saved.
        against_loss: loss of the same step in the run of `--against`. None (and omitted from the
            JSON object) if that run has no loss of this step.
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
    loss_s: float = 0.0
    sums_s: float = 0.0
    optimizer_s: float = 0.0
    devices: Sequence[DeviceUse] = ()
    journal_bytes: int = 0
    journal_s: float = 0.0
    journal_saved_s: float = 0.0
    traffic: Traffic = field(default_factory=Traffic)
    saved: Traffic = field(default_factory=Traffic)
    against_loss: float | None = None
    ended_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EvalRecord:
    """Record of the mean held-out loss after `step` steps, in nats per learned token."""

    EVENT: ClassVar[str] = "eval"
    step: int
    eval_loss: float


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """Record of the text that the model generates from `--prompt` after `step` steps."""

    EVENT: ClassVar[str] = "sample"
    step: int
    prompt: str
    text: str


@dataclass(frozen=True, slots=True)
class NoteRecord:
    """Record of a message for the user, such as the path of a written checkpoint."""

    EVENT: ClassVar[str] = "note"
    text: str


@dataclass(frozen=True, slots=True)
class PresenceRecord:
    """Record of a change between training on devices, waiting for devices, and training on the PS.

    Attributes:
        step: number of the current step, counted from 1.
        state: the new state as a value of `FleetPresence`: `present`, `absent` or `local`.
    """

    EVENT: ClassVar[str] = "fleet"
    step: int
    state: str
    text: str


@dataclass(frozen=True, slots=True)
class DiskRecord:
    """Record that training pauses because the disk is `full`, or continues once it is `free`."""

    EVENT: ClassVar[str] = "disk"
    step: int
    state: str
    text: str


@dataclass(frozen=True, slots=True)
class ServersRecord:
    """Record that a run on several servers is `waiting` for cluster nodes, or is `running`."""

    EVENT: ClassVar[str] = "servers"
    state: str
    text: str


@dataclass(frozen=True, slots=True)
class DoneRecord:
    """Record of the end of a run, with totals over the steps of this process.

    `StepRecord` describes the attributes that are not listed below.

    Attributes:
        steps: number of completed steps, including the steps of earlier processes.
        first_loss, loss: losses of this process's first and last steps; NaN if it ran no step.
        offload: the job's `--offload`: `all` or `auto`.
        gemms: number of GEMMs that could use tiles, computed by the fleet or the PS.
        kept_gemms: number of those GEMMs for which the PS is predicted to be faster. The PS
            computed them, except with `--method tiles --offload all`.
        kept_saves_s: time, in seconds, that computing `kept_gemms` on the PS is predicted to save.
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
    """Record of a prompt, or of a part of the text that the model generates."""

    EVENT: ClassVar[str] = "text"
    text: str


@dataclass(frozen=True, slots=True)
class ProgressRecord:
    """Record of how many text windows or multiple-choice questions have been evaluated."""

    EVENT: ClassVar[str] = "progress"
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class PredictedRecord:
    """Record of a model's loss on a text, in nats per predicted token, and its perplexity."""

    EVENT: ClassVar[str] = "predicted"
    loss: float
    perplexity: float
    tokens: int
    text: str


@dataclass(frozen=True, slots=True)
class AnsweredRecord:
    """Record of a model's accuracy on multiple-choice questions, from 0 to 1.

    `cut` is the number of prompts that were longer than the model's context, so they were cut.
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
    | SampleRecord
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
    """Convert a record to a JSON object that begins with the event name.

    NaN and infinity become None, because JSON cannot represent them.
    """
    values = asdict(record)
    if values.get("against_loss", 0.0) is None:
        del values["against_loss"]
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            values[name] = None
    return {"event": record.EVENT, **values}
