"""Events that the scheduler handles. `cleave.scheduler.instructions` defines the responses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from cleave.planner.plan import DeviceRates
from cleave.scheduler.tiles.gemm_job import GemmJob


@dataclass(slots=True)
class DeviceReady:
    """A device became available for tasks."""

    rates: DeviceRates
    careful: bool = False  # whether to send one run at a time until a correct result arrives


@dataclass(slots=True)
class DeviceAside:
    """A device gets no new tasks until `DeviceBack`, and retains only arrays that its runs use."""

    device: int


@dataclass(slots=True)
class DeviceBack:
    """A device gets tasks again after `DeviceAside`.

    If `careful`, the device gets one run at a time until a correct result arrives.
    """

    rates: DeviceRates
    careful: bool = False


@dataclass(slots=True)
class DeviceRated:
    """A device's rates changed. Future plans use the new rates."""

    rates: DeviceRates


@dataclass(slots=True)
class DeviceDraining:
    """A device will leave after it finishes its runs in flight. The device gets no new tasks."""

    device: int


@dataclass(slots=True)
class DeviceLost:
    """A device left. All arrays on the device are lost."""

    device: int


@dataclass(slots=True)
class Submitted:
    """A job was submitted to the scheduler."""

    job: GemmJob


@dataclass(slots=True)
class ResultArrived:
    """The PS accepted the result of a run. The scheduler never reads the payload."""

    device: int
    run: int
    payload: Any


@dataclass(slots=True)
class RunFailed:
    """A run failed, or its result was wrong."""

    device: int
    run: int
    reason: str
    # whether the run's inputs must be sent again, because the device's copies may be corrupt
    invalidated: bool = False


@dataclass(slots=True)
class LateAnswer:
    """A device answered a run that was already cancelled or answered."""

    device: int


@dataclass(slots=True)
class OperandReleased:
    """No later job uses this operand, so devices may drop the operand's arrays."""

    operand: int


@dataclass(slots=True)
class Alive:
    """A heartbeat arrived from an overdue device."""

    device: int


@dataclass(slots=True)
class Paused:
    """No jobs will be submitted for now. The scheduler sends all pending drop messages."""


@dataclass(slots=True)
class Tick:
    """A periodic event. The scheduler detects late devices and retries postponed tasks."""


@dataclass(slots=True)
class Withdrawn:
    """The caller no longer needs a job. If the job is unfinished, it fails."""

    job: int


FleetChange: TypeAlias = (
    DeviceReady | DeviceAside | DeviceBack | DeviceRated | DeviceDraining | DeviceLost
)  # Each of these events increments `SessionManager.epoch`.

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
