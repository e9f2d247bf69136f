"""Records of a run, one per line in `metrics.jsonl` and under `--json`."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, TypeAlias

from cleave.scheduler.traffic import Traffic


@dataclass(frozen=True, slots=True)
class StartRecord:
    """The start of a run, or of a resumed run.

    Attributes:
        step: the last completed step; 0 at the beginning.
        steps: steps in total.
    """

    EVENT: ClassVar[str] = "start"
    step: int
    steps: int
    run_folder: str


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step.

    Attributes:
        step: step number, counted from 1.
        loss: mean cross-entropy over the step's tokens, before its update.
        clock: the clock of `fleet_s`: `virtual` or `wall`.
        wall_s: wall seconds of the whole step.
        fleet_s: seconds on the fleet's clock spent waiting for GEMMs or a step by stages.
        ps_s: wall seconds of the PS's own work (everything but waiting for the fleet).
        verify_s: processor seconds for checking results.
        downlink_bytes, uplink_bytes: bytes of encoded messages.
        floor_bytes: bytes if GEMM operands and results move once; by stages `StepWork.floor_bytes`.
        tiles, blocks, reissued: planned tiles, returned blocks, reissued tasks.
        local_gemms: GEMMs multiplied on the PS by `cleave.fleet.local_fallback`.
        journal_bytes: bytes of products written to the journal.
        journal_s: seconds that the journal cost in this step.
        journal_saved_s: seconds originally spent on products that now came from the journal.
        traffic: `downlink_bytes` and `uplink_bytes` by purpose.
        saved: bytes saved by compression, by purpose.
        against_loss: the loss of this step in the compared run; omitted from output without one.
    """

    EVENT: ClassVar[str] = "step"
    step: int
    loss: float
    tokens: int
    learning_rate: float
    clock: str
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
    journal_bytes: int = 0
    journal_s: float = 0.0
    journal_saved_s: float = 0.0
    traffic: Traffic = field(default_factory=Traffic)
    saved: Traffic = field(default_factory=Traffic)
    against_loss: float | None = None


@dataclass(frozen=True, slots=True)
class EvalRecord:
    """The held-out loss after `step` steps."""

    EVENT: ClassVar[str] = "eval"
    step: int
    eval_loss: float


@dataclass(frozen=True, slots=True)
class NoteRecord:
    """A message for the user, such as the path of a written checkpoint."""

    EVENT: ClassVar[str] = "note"
    text: str


@dataclass(frozen=True, slots=True)
class PresenceRecord:
    """A change of who multiplies: the last device has left, or a device is connected again.

    Attributes:
        step: the current step.
        state: who multiplies now: `present`, `absent` or `local` (`cleave.fleet.local_fallback`).
        text: a description for people.
    """

    EVENT: ClassVar[str] = "fleet"
    step: int
    state: str
    text: str


@dataclass(frozen=True, slots=True)
class DiskRecord:
    """The run folder's disk is full and training waits, or the disk has space again.

    Attributes:
        step: the last completed step.
        state: `full` or `free`.
        text: a description for people.
    """

    EVENT: ClassVar[str] = "disk"
    step: int
    state: str
    text: str


@dataclass(frozen=True, slots=True)
class ServersRecord:
    """Several servers wait for room in their cluster, or run again.

    Attributes:
        state: `waiting` or `running`.
        text: a description for people.
    """

    EVENT: ClassVar[str] = "servers"
    state: str
    text: str


@dataclass(frozen=True, slots=True)
class DoneRecord:
    """The end of a run.

    Attributes:
        steps: the last completed step.
        first_loss, loss: losses of this process's first and last step; NaN if it did none.
        stopped: whether the run was stopped before its last step.
        offload: `all` or `auto`.
        gemms: GEMMs submitted to the fleet, including those that the PS kept.
        kept_gemms: number of them that the PS kept; with `all`, that `auto` would have kept.
        kept_saves_s: predicted seconds that this saved, or would have saved.
        kept_reasons: a sentence for each shape that saves most.
        local_gemms, journal_bytes, journal_s, journal_saved_s: sums over the steps of this process.
        journal_gemms: GEMMs whose products came from the journal.
        traffic: `downlink_bytes` and `uplink_bytes` by purpose.
        saved: bytes saved by compression, by purpose.
        resumed_after: the step after which this process began; 0 for a run from its start.
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
    """A part of a model's text: the prompt, then what the model adds."""

    EVENT: ClassVar[str] = "text"
    text: str


@dataclass(frozen=True, slots=True)
class ProgressRecord:
    """Progress of an evaluation, in windows of a text or in questions."""

    EVENT: ClassVar[str] = "progress"
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class PredictedRecord:
    """How well a model predicts a text.

    Attributes:
        loss: mean cross-entropy, in nats per predicted token.
        perplexity: e to the loss.
        tokens: number of predicted tokens.
        text: a description for people.
    """

    EVENT: ClassVar[str] = "predicted"
    loss: float
    perplexity: float
    tokens: int
    text: str


@dataclass(frozen=True, slots=True)
class AnsweredRecord:
    """How a model answered multiple-choice questions.

    Attributes:
        accuracy: the share of right answers.
        right, questions: number of right answers, and of questions.
        cut: number of questions whose beginning did not fit the model.
        text: a description for people.
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
    """Return the record as written, event name first; None replaces numbers that are not finite."""
    values = asdict(record).items()
    return {
        "event": record.EVENT,
        **{k: None if _not_finite(v) else v for k, v in values if (k, v) != _NOT_COMPARED},
    }


def _not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


_NOT_COMPARED = ("against_loss", None)
