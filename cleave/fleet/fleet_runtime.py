"""The interface between a fleet and the runtime that supplies time and transport.

`cleave.fleet.runtime.Runtime` runs in this process. `cleave.cluster.door_runtime.DoorRuntime`
delegates to another process, to which devices stay connected when this process ends.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import ClassVar

from cleave.fleet.counters import FleetCounters, StepProgress
from cleave.fleet.product import GemmFuture
from cleave.planner.plan import DeviceRates
from cleave.scheduler.stages.arrays import StageArray
from cleave.scheduler.stages.outcomes import StageOutcome
from cleave.scheduler.stages.work import StepWork


class FleetRuntime(ABC):
    """Runs the GEMMs and steps of one fleet."""

    clock: ClassVar[str]
    """`virtual` or `wall`: the clock of `FleetCounters.fleet_s`."""

    @abstractmethod
    def start(self, future: GemmFuture) -> None:
        """Start a GEMM without waiting."""

    @abstractmethod
    def wait(self, future: GemmFuture, timeout_s: float | None = None) -> bool:
        """Wait up to `timeout_s` seconds (runtime's clock); return whether the future is done."""

    @abstractmethod
    def wait_until(self, condition: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until a condition holds, up to `timeout_s` seconds on the runtime's clock.

        Returns:
            Whether the condition holds; False also if no event is left that could change it.
        """

    @abstractmethod
    def withdraw(self, future: GemmFuture) -> None:
        """Withdraw a GEMM. Its future is then done: withdrawn, or as it ended before."""

    @abstractmethod
    def advance_for_local_work(self, flops: float) -> None:
        """Advance a virtual clock by the time of `flops` of local work."""

    @abstractmethod
    def begin_step(self, work: StepWork) -> None:
        """Start a training step by stages without waiting."""

    @abstractmethod
    def give(self, batch: int, made: StageArray, after: int | None = None) -> None:
        """Continue a micro-batch with an array that the caller computed; see `StageStep.give`."""

    @abstractmethod
    def resolve(self, right: bool, reason: str) -> None:
        """Report whether the last `Suspect`'s numbers are correct; see `StageStep.resolve`."""

    @abstractmethod
    def next_outcome(self, timeout_s: float | None = None) -> StageOutcome | None:
        """Return the next outcome of the step by stages; None on timeout."""

    @abstractmethod
    def quarantine(self, device: int, reason: str) -> None:
        """End all sessions of a device with wrong results, and keep it out."""

    @abstractmethod
    def withdraw_step(self) -> None:
        """End the step by stages, if any. Devices keep arrays that the next step can use."""

    @abstractmethod
    def end_steps(self) -> None:
        """End the step by stages, if any, and let devices drop its arrays."""

    @abstractmethod
    def release(self, operand: int) -> None:
        """Release an operand. Any thread may call this, in any state."""

    @abstractmethod
    def unbind(self, operand: int) -> None:
        """Release an operand's memory while no product needs it. Devices keep its arrays."""

    @abstractmethod
    def close(self) -> None:
        """End all sessions."""

    @abstractmethod
    def counters(self) -> FleetCounters:
        """Return a snapshot of the counters."""

    @abstractmethod
    def counting_tasks(self) -> AbstractContextManager[None]:
        """Count a training step's tasks for `progress`, which expects as many in the next step."""

    @abstractmethod
    def progress(self) -> StepProgress | None:
        """Return the progress of the current step, if any. Any thread may call this."""

    @abstractmethod
    def device_count(self) -> int:
        """Return the number of devices that may be given work now."""

    @abstractmethod
    def stuck(self, future: GemmFuture) -> str:
        """Return why no device can finish a GEMM; empty if one can, or none is connected."""

    @abstractmethod
    def stage_devices(self) -> dict[int, DeviceRates]:
        """Return the rates, by device, of the devices that can run stages now."""

    @abstractmethod
    def why_no_stages(self) -> str:
        """Return a sentence on why no device can train whole layers now; empty if one can."""

    @abstractmethod
    def fleet_rates(self) -> tuple[int, list[DeviceRates]]:
        """Return the fleet's epoch and the rates of the devices that may be given work now."""
