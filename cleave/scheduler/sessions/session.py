"""The PS's record of a device session, and the states of sessions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import count
from typing import Final, TypeAlias

from cleave.planner.plan import DeviceRates
from cleave.protocol.allowance import Allowance, CancelledRuns, is_answer
from cleave.protocol.device_counters import DeviceCounters
from cleave.protocol.limits import CODED_LEAST_BYTES
from cleave.protocol.messages import Computed, Feature, Message, Result, TaskError
from cleave.scheduler.counters import TrafficKind
from cleave.scheduler.sessions.admission import Behavior
from cleave.scheduler.sessions.pace import Pace
from cleave.scheduler.sessions.probe import FIRST_ID, Probe
from cleave.scheduler.sessions.reputation import Reputation, Rounding, Setbacks, Suspects
from cleave.scheduler.stages.work import StageOrder
from cleave.scheduler.tiles.tasks import Task
from profiles.device_profile import DeviceKind
from profiles.library import believable_j

_ANSWERS: Final = (Result, TaskError, Computed)


class DeviceState(Enum):
    """The state of a device session. The user interface shows the enum values."""

    JOINING = "joining"
    PROBING = "probing"
    READY = "ready"
    BUSY = "busy"
    OVERDUE = "overdue"
    # Consecutive runs failed. The device gets no tasks until it passes a trial.
    ASIDE = "set aside"
    DRAINING = "draining"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Trial:
    """A trial in progress. Until the trial ends, the device gets no tasks."""

    probe: Probe
    begun_s: float
    expected_s: float


@dataclass(slots=True)
class Session:
    """The PS's record of one device session."""

    id: int
    opened_s: float
    address: str = ""
    identity: int | None = None  # see `Admission.identity`
    known_as: int | None = None  # see `Admission.known_as`
    state: DeviceState = DeviceState.JOINING
    reason: str = ""
    name: str = ""
    profile: str = ""
    kind: DeviceKind | None = None  # as stated by the device
    admitted_s: float = math.inf  # time of admission; infinite before admission
    heard_s: float = 0.0
    counters: DeviceCounters = field(default_factory=DeviceCounters)  # the runtime counts bytes
    credited: DeviceCounters = field(default_factory=DeviceCounters)  # counts already reported
    reputation: Reputation = field(default_factory=Reputation)
    rounding: Rounding = field(default_factory=Rounding)
    suspects: Suspects = field(default_factory=Suspects)
    setbacks: Setbacks = field(default_factory=Setbacks)
    pace: Pace = field(default_factory=Pace)
    reserved_bytes: int = 0  # device memory reserved for stages
    noted_s: float | None = None  # time when a failure was last reported
    rates: DeviceRates | None = None
    # As stated by the device; `rates` has the measured speeds.
    claimed_flops_per_s: float = 0.0
    claimed_graph_flops_per_s: float = 0.0
    features: frozenset[Feature] = frozenset()  # protocol features that both sides support
    may_code: bool = False  # the device was told that it may compress results
    measure: bool = False  # the device joined only for a link measurement
    measured_by: str = ""  # see `Admission.measured_by`
    # Secret name of this session's arrays. To continue with its arrays after a lost connection, a
    # device states this name (see `StageRuns.returned`).
    arrays: str = ""
    returning: bool = False  # the device has not yet stated which arrays it kept
    held: frozenset[int] | None = None  # IDs of the arrays that the device kept, if any
    own: bool = False  # the device is the operator's own
    here: bool = False  # the device is known to run on the server's computer
    telemetry: dict[str, float] = field(default_factory=dict)
    expected: dict[int, Task] = field(default_factory=dict)  # key: run in flight
    cancelled_runs: CancelledRuns = field(default_factory=CancelledRuns)
    allowance: Allowance | None = None  # set when the device is welcomed
    probe: Probe | None = None
    probe_ids: Iterator[int] = field(default_factory=lambda: count(FIRST_ID))
    trial: Trial | None = None  # the trial in progress

    @property
    def codes_puts(self) -> bool:
        """Return whether the PS compresses the arrays that it sends to the device."""
        return self.rates is not None and self.rates.codes_downlink

    @property
    def behavior(self) -> Behavior:
        """Return the device's current behavior, to be stored for its next session."""
        estimate = self.pace.estimate
        return Behavior(self.setbacks.times, self.setbacks.last, estimate.slowness, estimate.late_s)

    @property
    def restriction(self) -> str:
        """Return why the device gets fewer tasks or none; an empty string if unrestricted."""
        return self.setbacks.text or self.pace.estimate.text

    @property
    def planned_rates(self) -> DeviceRates:
        """Return the rates for planning, corrected for pace and for memory reserved for stages."""
        assert self.rates is not None
        left = max(0, self.rates.memory_bytes - self.reserved_bytes)
        return replace(self.pace.estimate.of(self.rates), memory_bytes=left)

    def travelling_down(self, nbytes: int, coded_ratio: float) -> float:
        """Return the predicted wire size, in bytes, of an array that the PS sends."""
        if self.rates is None or nbytes < CODED_LEAST_BYTES:
            return nbytes
        return self.rates.down_bytes(nbytes, coded_ratio)

    def travelling_up(self, nbytes: int, coded_ratio: float) -> float:
        """Return the predicted wire size, in bytes, of a result from the device."""
        if self.rates is None or nbytes < CODED_LEAST_BYTES:
            return nbytes
        return self.rates.up_bytes(nbytes, coded_ratio)

    @property
    def awaited_bytes(self) -> tuple[int, int]:
        """Return the sizes, in bytes, of the largest awaited task result and of the largest result.

        The second size also covers the results of cancelled runs and probes.
        """
        job = max((task.output_bytes for task in self.expected.values()), default=0)
        probe = self.probe if self.trial is None else self.trial.probe
        tested = probe.awaited_bytes if probe is not None else 0
        return job, max(job, self.cancelled_runs.largest_bytes, tested)

    def too_much(self, message: Message, nbytes: int, now_s: float) -> str:
        """Return which limit on unrequested messages a message exceeds; empty if none."""
        if isinstance(message, _ANSWERS) and (
            self._measures(message.id) or is_answer(message.id, self.expected, self.cancelled_runs)
        ):
            return ""
        return self.allowance.said(nbytes, now_s) if self.allowance is not None else ""

    def kind_of(self, message: Message) -> TrafficKind:
        """Return the traffic kind of a received message that has not been handled yet."""
        if (
            not isinstance(message, Result)
            or self._measures(message.id)
            or not (message.id in self.expected or message.id in self.cancelled_runs)
        ):
            return TrafficKind.OTHER
        task = self.expected.get(message.id)  # the answer to a cancelled run counts as tiles
        asked = task.detail if task is not None else None
        return asked.kind if isinstance(asked, StageOrder) else TrafficKind.TILES

    def _measures(self, run: int) -> bool:
        """Return whether a run belongs to a probe or a trial."""
        trial = self.trial
        return self.probe is not None or (trial is not None and trial.probe.awaits(run))

    def measured_j(self, now_s: float) -> float | None:
        """Return the energy that the device reported, in joules; None if missing or implausible."""
        said = self.telemetry.get("energy_j")
        if said is None or not believable_j(said, self.profile, now_s - self.opened_s):
            return None
        return said


class EventKind(Enum):
    """The kind of a fleet event. The user interface shows the enum values."""

    JOIN = "join"
    LEAVE = "leave"
    # a device was disconnected or refused because it returned wrong results
    QUARANTINE = "quarantine"
    OVERDUE = "overdue"  # a device became overdue, or an overdue device answered
    ASIDE = "aside"  # a device was set aside, or passed a trial and gets tasks again
    REISSUE = "reissue"  # tasks were reassigned to other devices, or duplicated on other devices
    WRONG = "wrong"
    JOB = "job"
    # training started to wait for devices, disk space or other servers, or training resumed
    PAUSE = "pause"


# Called on the event loop for each event. Arguments: kind of event, session (None if the event does
# not concern a session), and description for users.
EventListener: TypeAlias = Callable[[EventKind, Session | None, str], None]
