"""The events that the scheduler is told. Its answers: `cleave.scheduler.instructions`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from cleave.planner.plan import DeviceRates
from cleave.scheduler.tiles.gemm_job import GemmJob


@dataclass(slots=True)
class DeviceReady:
    """A device is connected and may be given work.

    With `careful` it is sent one run at a time until it has done one right.
    """

    rates: DeviceRates
    careful: bool = False


@dataclass(slots=True)
class DeviceAside:
    """A device gets nothing new for now, and keeps only the arrays that its runs need."""

    device: int


@dataclass(slots=True)
class DeviceBack:
    """A device that was set aside may be given work again; `careful` as in `DeviceReady`."""

    rates: DeviceRates
    careful: bool = False


@dataclass(slots=True)
class DeviceRated:
    """A device is planned with other rates from now on."""

    rates: DeviceRates


@dataclass(slots=True)
class DeviceDraining:
    """A device answers what it was sent and gets nothing new."""

    device: int


@dataclass(slots=True)
class DeviceLost:
    """A device is gone, with everything it held."""

    device: int


@dataclass(slots=True)
class Submitted:
    """A new job was submitted."""

    job: GemmJob


@dataclass(slots=True)
class ResultArrived:
    """A device answered a run. The scheduler does not look at the payload."""

    device: int
    run: int
    payload: Any


@dataclass(slots=True)
class RunFailed:
    """A device could not do a run, or its answer was not valid.

    With `invalidated`, its copies of the inputs may be corrupt: they are sent again when needed.
    """

    device: int
    run: int
    reason: str
    invalidated: bool = False


@dataclass(slots=True)
class LateAnswer:
    """A device answered a run that nobody waits for any more."""

    device: int


@dataclass(slots=True)
class OperandReleased:
    """An operand will not be used again; devices may forget it."""

    operand: int


@dataclass(slots=True)
class Alive:
    """An overdue device said that it is still connected."""

    device: int


@dataclass(slots=True)
class Paused:
    """No more jobs are submitted for now: devices are told at once what they may forget."""


@dataclass(slots=True)
class Tick:
    """Time passed."""


@dataclass(slots=True)
class Withdrawn:
    """A job is not wanted any more: it fails, unless it is finished."""

    job: int


FleetChange: TypeAlias = (
    DeviceReady | DeviceAside | DeviceBack | DeviceRated | DeviceDraining | DeviceLost
)
"""Events that change which devices may be given work, or their rates: a new epoch begins."""

Event: TypeAlias = (
    FleetChange
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
