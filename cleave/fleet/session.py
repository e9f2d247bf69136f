"""One device session, as the PS sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from cleave.dispatch.work import Unit
from cleave.fleet.admission import Contribution
from cleave.fleet.allowance import Allowance, Crossing
from cleave.fleet.probe import Probe
from cleave.fleet.reputation import Reputation, Suspects
from cleave.planner.plan import DeviceRates
from profiles.device_profile import DeviceKind


class DeviceState(Enum):
    """What a device session is doing; the values are what users read."""

    JOINING = "joining"
    PROBING = "probing"
    READY = "ready"
    BUSY = "busy"
    OVERDUE = "overdue"
    DRAINING = "draining"
    LOST = "lost"


@dataclass(slots=True)
class Session:
    """One device session, as the PS sees it."""

    id: int
    opened_s: float
    address: str = ""
    identity: int | None = None  # which device it is, see `Admission`
    state: DeviceState = DeviceState.JOINING
    reason: str = ""
    name: str = ""
    profile: str = ""
    kind: DeviceKind | None = None  # as it says itself
    heard_s: float = 0.0
    blocks: int = 0
    flops: float = 0.0
    compute_s: float = 0.0
    downlink_bytes: int = 0  # counted by the shell
    uplink_bytes: int = 0
    credited: Contribution = field(default_factory=Contribution)  # what the door knows of these
    reputation: Reputation = field(default_factory=Reputation)
    suspects: Suspects = field(default_factory=Suspects)
    rates: DeviceRates | None = None
    measure: bool = False  # it came to have its link measured, not to work
    measured_by: str = ""  # what it came by then, see `Admission`
    telemetry: dict[str, float] = field(default_factory=dict)
    expected: dict[int, Unit] = field(default_factory=dict)
    crossing: Crossing = field(default_factory=Crossing)
    allowance: Allowance | None = None  # from its welcome on
    probe: Probe | None = None
