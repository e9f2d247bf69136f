"""What the scheduler is told. What it wants done: `cleave.scheduler.instructions`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from cleave.planner.plan import DeviceRates
from cleave.scheduler.tasks import Job


@dataclass(slots=True)
class DeviceReady:
    """A device is connected and may be given work.

    With `careful`, one run at a time until it did one right.
    """

    rates: DeviceRates
    careful: bool = False


@dataclass(slots=True)
class DeviceAside:
    """A device is to get nothing new for now, and to hold nothing that no run of it needs."""

    device: int


@dataclass(slots=True)
class DeviceBack:
    """A device that was set aside may be given work again; `careful` as above."""

    rates: DeviceRates
    careful: bool = False


@dataclass(slots=True)
class DeviceRated:
    """A device is to be planned with other rates from now on."""

    rates: DeviceRates


@dataclass(slots=True)
class DeviceDraining:
    """A device answers what it has been sent and wants nothing new."""

    device: int


@dataclass(slots=True)
class DeviceLost:
    """A device is gone, with everything it held."""

    device: int


@dataclass(slots=True)
class Submitted:
    """There is new work."""

    job: Job


@dataclass(slots=True)
class ResultArrived:
    """A device answered a run. The payload is not looked at."""

    device: int
    run: int
    payload: Any


@dataclass(slots=True)
class RunFailed:
    """A device could not do a run, or its answer was not valid.

    With `invalidated`, its copies of the inputs may be at fault: they are sent again when needed.
    """

    device: int
    run: int
    reason: str
    invalidated: bool = False


@dataclass(slots=True)
class LateAnswer:
    """A device answered something that nobody waits for any more."""

    device: int


@dataclass(slots=True)
class OperandReleased:
    """Nobody will use this operand again; devices may forget it."""

    operand: int


@dataclass(slots=True)
class Alive:
    """A device that answers nothing said that it is still here."""

    device: int


@dataclass(slots=True)
class Paused:
    """Nothing more is submitted for now: devices are told at once what they may forget."""


@dataclass(slots=True)
class Tick:
    """Time passed."""


@dataclass(slots=True)
class Withdrawn:
    """Nobody wants this work done here any more: it fails, unless it is finished."""

    job: int


Event: TypeAlias = (
    DeviceReady
    | DeviceAside
    | DeviceBack
    | DeviceRated
    | DeviceDraining
    | DeviceLost
    | Submitted
    | ResultArrived
    | RunFailed
    | LateAnswer
    | OperandReleased
    | Alive
    | Paused
    | Tick
    | Withdrawn
)
