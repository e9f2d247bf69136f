"""What a run reports as it goes: one record a line in `metrics.jsonl` and under `--json`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar, TypeAlias


@dataclass(frozen=True, slots=True)
class StartRecord:
    """A run begins, or goes on.

    Attributes:
        step: the last one that is done; 0 at the beginning.
        steps: that are to be done in all.
        run_folder: where everything is written.
    """

    EVENT: ClassVar[str] = "start"
    step: int
    steps: int
    run_folder: str


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step.

    Attributes:
        step: counted from 1.
        loss: mean cross-entropy over the step's tokens, before its update.
        tokens: in this step.
        clock: what `fleet_s` counts: `virtual` or `wall`.
        wall_s: the whole step.
        fleet_s: time on the fleet's clock spent waiting for GEMMs.
        ps_s: wall seconds of the PS's own work (everything but waiting for the fleet).
        verify_s: processor time of checking results.
        downlink_bytes, uplink_bytes: encoded messages.
        floor_bytes: every operand and result of every GEMM crossing once.
        tiles, blocks, reissued: planned tiles, blocks that came back, units given out again.
        local_gemms: multiplied on the PS because no device was there.
        journal_bytes: products that went into the journal.
        journal_s: seconds that the journal cost the step.
        journal_saved_s: seconds that products taken from the journal had needed.
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


@dataclass(frozen=True, slots=True)
class EvalRecord:
    """Held-out loss after `step` steps."""

    EVENT: ClassVar[str] = "eval"
    step: int
    eval_loss: float


@dataclass(frozen=True, slots=True)
class NoteRecord:
    """Something a user should know: what is being prepared, a checkpoint, a resumed step."""

    EVENT: ClassVar[str] = "note"
    text: str


@dataclass(frozen=True, slots=True)
class PresenceRecord:
    """The last device left while work was waiting, or one came back.

    Attributes:
        step: the step under way.
        state: who multiplies now: `present`, `absent` or `local` (`cleave.fleet.local_fallback`).
        text: for people.
    """

    EVENT: ClassVar[str] = "fleet"
    step: int
    state: str
    text: str


@dataclass(frozen=True, slots=True)
class DiskRecord:
    """The disk of the run folder is full and training waits, or there is space again.

    Attributes:
        step: the last one that is done.
        state: `full` or `free`.
        text: for people.
    """

    EVENT: ClassVar[str] = "disk"
    step: int
    state: str
    text: str


@dataclass(frozen=True, slots=True)
class DoneRecord:
    """The end of a run.

    Attributes:
        steps: the last step done.
        first_loss, loss: of this run's first and last step.
        run_folder: where everything was written.
        stopped: whether the run was asked to stop before its last step.
        offload: `all` or `auto`.
        gemms: multiplications of the run that a fleet was there for.
        kept_gemms: how many of them stayed on the PS, or with `all` would have with `auto`.
        kept_saves_s: predicted seconds that this saved, or would have.
        kept_reasons: one sentence a shape.
        local_gemms, journal_bytes, journal_s, journal_saved_s: as in the steps, in sum.
        journal_gemms: how many products came from the journal.
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


Record: TypeAlias = (
    StartRecord | StepRecord | EvalRecord | NoteRecord | PresenceRecord | DiskRecord | DoneRecord
)


def to_dict(record: Record) -> dict[str, Any]:
    """The record as it is written: its event's name first."""
    return {"event": record.EVENT, **asdict(record)}
