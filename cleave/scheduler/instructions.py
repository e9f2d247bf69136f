"""What the server's core wants done by the session manager and by the runtime.

The scheduler speaks of arrays and runs, and the session manager turns these into messages. The
session manager's helpers decide about sessions, and it carries that out. So a runtime
(`cleave.fleet.runtime`) carries out only the instructions of the last part.
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
    """Cut this array out of its operand and send it."""

    device: int
    array: ArrayRef


@dataclass(slots=True)
class SendRun:
    """Ask the device to do this task, under this run's number."""

    device: int
    run: int
    task: Task


@dataclass(slots=True)
class SendDrop:
    """Tell the device to forget these arrays."""

    device: int
    ids: tuple[int, ...]


@dataclass(slots=True)
class SendCancel:
    """Tell the device that these runs are not wanted any more."""

    device: int
    runs: tuple[int, ...]


@dataclass(slots=True)
class Drained:
    """A draining device has answered everything; its session may end."""

    device: int


@dataclass(slots=True)
class Stuck:
    """For information: no connected device can do this job, or part of it; it waits."""

    job: int
    reason: str


# --- from a step by stages to the session manager ---


@dataclass(slots=True)
class SendStage:
    """Send this message of a step by stages; with a task, an answer to it is expected."""

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
    """End this session with a `bye`: nothing went wrong."""

    session: int
    code: ByeCode


# --- to the runtime ---


@dataclass(slots=True)
class Send:
    """Send this message on this session, after those sent before; `kind` is what it counts as."""

    session: int
    message: Message
    kind: TrafficKind = TrafficKind.OTHER


@dataclass(slots=True)
class Close:
    """End this session."""

    session: int


@dataclass(slots=True)
class Check:
    """Check this result of a device, then call `SessionManager.checked`."""

    session: int
    run: int
    task: Task
    payload: Any


@dataclass(slots=True)
class Place:
    """Put this result in its place in the output of its job, at once."""

    task: Task
    payload: Any


@dataclass(slots=True)
class Done:
    """All results of this job are in place."""

    job: int


@dataclass(slots=True)
class Failed:
    """This job cannot be completed."""

    job: int
    reason: str


@dataclass(slots=True)
class TellStep:
    """Tell the thread that waits for a step by stages what has come of it."""

    outcome: StageOutcome
    work: StepWork | None = None


@dataclass(slots=True)
class Joined:
    """For information: this device may be given work from now on."""

    session: int


@dataclass(slots=True)
class Overdue:
    """For information: a device does not answer in time, or answers again."""

    session: int
    overdue: bool


@dataclass(slots=True)
class Aside:
    """For information: this device gets no work for now, and why; or it gets some again."""

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
"""What a step by stages wants."""

Decision: TypeAlias = Refuse | Dismiss | Event | SendStage | ForRuntime
"""What a helper of the session manager decides; events are for the scheduler."""
