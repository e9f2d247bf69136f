"""Instructions to the session manager and the runtime.

The session manager turns instructions about arrays and runs into protocol messages, and applies its
helpers' decisions about sessions. A runtime (`cleave.fleet.runtime`) receives only `ForRuntime`
instructions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from cleave.protocol.messages import ByeCode, ErrorCode, Message
from cleave.scheduler.counters import TrafficKind
from cleave.scheduler.events import Event
from cleave.scheduler.rounds.work import RoundResult, RoundWork
from cleave.scheduler.stages.outcomes import StageOutcome
from cleave.scheduler.stages.work import StepWork
from cleave.scheduler.tiles.tasks import ArrayRef, Task

# --- from the scheduler to the session manager ---


@dataclass(slots=True)
class SendArray:
    """Send this region of an operand to the device."""

    device: int
    array: ArrayRef


@dataclass(slots=True)
class SendRun:
    """Ask the device to run this task. `run` identifies the request."""

    device: int
    run: int
    task: Task


@dataclass(slots=True)
class SendDrop:
    """Tell the device to drop the arrays with these IDs."""

    device: int
    ids: tuple[int, ...]


@dataclass(slots=True)
class SendCancel:
    """Tell the device to cancel these runs."""

    device: int
    runs: tuple[int, ...]


@dataclass(slots=True)
class Drained:
    """End the session of a draining device that has answered all its runs."""

    device: int


@dataclass(slots=True)
class Stuck:
    """Report that tasks of this job are waiting because no connected device can run them."""

    job: int
    reason: str


# --- from a step by stages to the session manager ---


@dataclass(slots=True)
class SendStage:
    """Send this message for a step by stages. If `task` is set, the device must answer."""

    device: int
    message: Message
    task: Task | None = None
    kind: TrafficKind = TrafficKind.OTHER


# --- from the session manager's helpers to the session manager ---


@dataclass(slots=True)
class Refuse:
    """End this session with an error message. Do nothing if the session has already ended."""

    session: int
    code: ErrorCode
    reason: str


@dataclass(slots=True)
class Dismiss:
    """End this session with a `bye` message instead of an error."""

    session: int
    code: ByeCode


# --- to the runtime ---


@dataclass(slots=True)
class Send:
    """Send this message to the device of this session. A session's messages are sent in order."""

    session: int
    message: Message
    kind: TrafficKind = TrafficKind.OTHER


@dataclass(slots=True)
class Close:
    """Close the connection of this session."""

    session: int


@dataclass(slots=True)
class Check:
    """Verify this device's result, then call `SessionManager.checked` with the outcome."""

    session: int
    run: int
    task: Task
    payload: Any


@dataclass(slots=True)
class Place:
    """Write this result into its job's output matrix immediately."""

    task: Task
    payload: Any


@dataclass(slots=True)
class Done:
    """Report that all results of this job have been written."""

    job: int


@dataclass(slots=True)
class Failed:
    """Report that this job cannot be completed."""

    job: int
    reason: str


@dataclass(slots=True)
class TellStep:
    """Pass an outcome of a step by stages, or of a round, to the waiting training thread."""

    outcome: StageOutcome | RoundResult
    work: StepWork | RoundWork | None = None


@dataclass(slots=True)
class Joined:
    """Report that this device is now available for tasks."""

    session: int


@dataclass(slots=True)
class Overdue:
    """Report that a device became overdue, or that an overdue device answered."""

    session: int
    overdue: bool


@dataclass(slots=True)
class Aside:
    """Report that a device was set aside, with the reason, or that it gets tasks again."""

    session: int
    aside: bool
    reason: str


@dataclass(slots=True)
class Note:
    """Show this message to the operator."""

    text: str


ForRuntime: TypeAlias = (
    Send | Close | Check | Place | Done | Failed | TellStep | Joined | Overdue | Aside | Note
)
Instruction: TypeAlias = SendArray | SendRun | SendDrop | SendCancel | Drained | Stuck | ForRuntime
ForSteps: TypeAlias = SendStage | TellStep | Note  # what a step by stages can return

# what the session manager's helpers return
Decision: TypeAlias = Refuse | Dismiss | Event | SendStage | ForRuntime
