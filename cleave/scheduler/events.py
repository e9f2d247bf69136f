"""Events that the scheduler handles. Its answers are in `cleave.scheduler.instructions`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from cleave.planner.plan import DeviceRates
from cleave.scheduler.tiles.gemm_job import GemmJob


@dataclass(slots=True)
class DeviceReady:
    """A device may be given work; if `careful`, one run at a time until it does one right."""

    rates: DeviceRates
    careful: bool = False


@dataclass(slots=True)
class DeviceAside:
    """A device gets no new work for now. It keeps only the arrays that its runs need."""

    device: int


@dataclass(slots=True)
class DeviceBack:
    """A device that was set aside may be given work again. `careful` is as in `DeviceReady`."""

    rates: DeviceRates
    careful: bool = False


@dataclass(slots=True)
class DeviceRated:
    """A device's rates changed. Future plans use the new rates."""

    rates: DeviceRates


@dataclass(slots=True)
class DeviceDraining:
    """A device finishes the runs it was sent and gets no new work."""

    device: int


@dataclass(slots=True)
class DeviceLost:
    """A device left, and every array it held is lost."""

    device: int


@dataclass(slots=True)
class Submitted:
    """A new job was submitted."""

    job: GemmJob


@dataclass(slots=True)
class ResultArrived:
    """A device returned the result of a run. The scheduler never reads the payload."""

    device: int
    run: int
    payload: Any


@dataclass(slots=True)
class RunFailed:
    """A run failed or its result was invalid. If `invalidated`, the inputs must be sent again."""

    device: int
    run: int
    reason: str
    invalidated: bool = False


@dataclass(slots=True)
class LateAnswer:
    """A device answered a run whose answer is no longer awaited."""

    device: int


@dataclass(slots=True)
class OperandReleased:
    """An operand will not be used again, so devices may drop its arrays."""

    operand: int


@dataclass(slots=True)
class Alive:
    """An overdue device reported that it is still connected."""

    device: int


@dataclass(slots=True)
class Paused:
    """No more jobs are coming for now. Devices are told at once which arrays to drop."""


@dataclass(slots=True)
class Tick:
    """Time passed."""


@dataclass(slots=True)
class Withdrawn:
    """A job is no longer wanted. It fails unless it has already finished."""

    job: int


FleetChange: TypeAlias = (
    DeviceReady | DeviceAside | DeviceBack | DeviceRated | DeviceDraining | DeviceLost
)
"""Events that change the available devices or their rates, and so begin a new epoch."""

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
