"""Instructions from the scheduler and its helpers to the session manager and the runtime.

The scheduler's instructions name arrays and runs; the session manager turns them into messages.
The session manager also carries out its helpers' decisions about sessions. A runtime
(`cleave.fleet.runtime`) carries out only the instructions of the last section.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from cleave.protocol.messages import ByeCode, ErrorCode, Message
from cleave.scheduler.events import Event
from cleave.scheduler.stages.outcomes import StageOutcome
from cleave.scheduler.stages.work import StepWork
from cleave.scheduler.tiles.tasks import ArrayRef, Task
from cleave.scheduler.traffic import TrafficKind

# --- from the scheduler to the session manager ---


@dataclass(slots=True)
class SendArray:
    """Extract this array from its operand and send it."""

    device: int
    array: ArrayRef


@dataclass(slots=True)
class SendRun:
    """Ask the device to do this task under this run number."""

    device: int
    run: int
    task: Task


@dataclass(slots=True)
class SendDrop:
    """Tell the device to drop these arrays."""

    device: int
    ids: tuple[int, ...]


@dataclass(slots=True)
class SendCancel:
    """Tell the device to cancel these runs."""

    device: int
    runs: tuple[int, ...]


@dataclass(slots=True)
class Drained:
    """A draining device has answered every run; its session may end."""

    device: int


@dataclass(slots=True)
class Stuck:
    """For information: no connected device can do this job or part of it, so it waits."""

    job: int
    reason: str


# --- from a step by stages to the session manager ---


@dataclass(slots=True)
class SendStage:
    """Send this message of a step by stages. With a task, the device must answer."""

    device: int
    message: Message
    task: Task | None = None
    kind: TrafficKind = TrafficKind.OTHER


# --- from the session manager's helpers to the session manager ---


@dataclass(slots=True)
class Refuse:
    """End this session with an error, unless it has already ended."""

    session: int
    code: ErrorCode
    reason: str


@dataclass(slots=True)
class Dismiss:
    """End this session with a `bye`, without an error."""

    session: int
    code: ByeCode


# --- to the runtime ---


@dataclass(slots=True)
class Send:
    """Send this message on this session, in order. `kind` is its traffic category."""

    session: int
    message: Message
    kind: TrafficKind = TrafficKind.OTHER


@dataclass(slots=True)
class Close:
    """End this session."""

    session: int


@dataclass(slots=True)
class Check:
    """Check this device's result, then call `SessionManager.checked`."""

    session: int
    run: int
    task: Task
    payload: Any


@dataclass(slots=True)
class Place:
    """Write this result into its job's output at once."""

    task: Task
    payload: Any


@dataclass(slots=True)
class Done:
    """All results of this job are written."""

    job: int


@dataclass(slots=True)
class Failed:
    """This job cannot be completed."""

    job: int
    reason: str


@dataclass(slots=True)
class TellStep:
    """Report the outcome of a step by stages to the thread that waits for it."""

    outcome: StageOutcome
    work: StepWork | None = None


@dataclass(slots=True)
class Joined:
    """For information: this device may be given work from now on."""

    session: int


@dataclass(slots=True)
class Overdue:
    """For information: a device is overdue, or an overdue device has answered."""

    session: int
    overdue: bool


@dataclass(slots=True)
class Aside:
    """For information: a device was set aside, and why, or it gets work again."""

    session: int
    aside: bool
    reason: str


@dataclass(slots=True)
class Note:
    """For information: something that an operator should know."""

    text: str


ForSessions: TypeAlias = SendArray | SendRun | SendDrop | SendCancel | Drained | Stuck
ForRuntime: TypeAlias = (
    Send | Close | Check | Place | Done | Failed | TellStep | Joined | Overdue | Aside | Note
)
Instruction: TypeAlias = ForSessions | ForRuntime
ForSteps: TypeAlias = SendStage | TellStep | Note
"""Instructions that a step by stages can return."""

Decision: TypeAlias = Refuse | Dismiss | Event | SendStage | ForRuntime
"""Decisions of the session manager's helpers. The events go to the scheduler."""
