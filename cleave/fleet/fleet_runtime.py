"""What a fleet asks of the runtime that moves its time and bytes.

`cleave.fleet.runtime.Runtime` does it in this process. `cleave.cluster.door_runtime.DoorRuntime`
has another process do it, which devices stay connected to when this one ends.
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
    """Does the GEMMs and steps of one fleet."""

    clock: ClassVar[str]
    """`virtual` or `wall`: the clock that `FleetCounters.fleet_s` counts on."""

    @abstractmethod
    def start(self, future: GemmFuture) -> None:
        """Start a GEMM, without waiting."""

    @abstractmethod
    def wait(self, future: GemmFuture, timeout_s: float | None = None) -> bool:
        """Return when the future is done, or after `timeout_s` seconds on the runtime's clock.

        Returns:
            Whether it is done.
        """

    @abstractmethod
    def wait_until(self, condition: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Return when a condition holds, or after `timeout_s` seconds on the runtime's clock.

        Returns:
            Whether it holds; False also where nothing is left that could happen.
        """

    @abstractmethod
    def withdraw(self, future: GemmFuture) -> None:
        """Withdraw a GEMM. Its future is then done: as withdrawn, or as it ended just before."""

    @abstractmethod
    def advance_for_local_work(self, flops: float) -> None:
        """Advance a virtual clock by the time that the caller's own work of `flops` takes."""

    @abstractmethod
    def begin_step(self, work: StepWork) -> None:
        """Start a training step by stages, without waiting."""

    @abstractmethod
    def give(self, batch: int, made: StageArray, after: int | None = None) -> None:
        """Go on with a micro-batch of that step with what the caller made of it.

        See `cleave.scheduler.stages.step.StageStep.give`.
        """

    @abstractmethod
    def resolve(self, right: bool, reason: str) -> None:
        """Say whether the numbers of the last `Suspect` are right.

        See `cleave.scheduler.stages.step.StageStep.resolve`.
        """

    @abstractmethod
    def next_outcome(self, timeout_s: float | None = None) -> StageOutcome | None:
        """Return what comes next of the step by stages; None if nothing does in time."""

    @abstractmethod
    def quarantine(self, device: int, reason: str) -> None:
        """End the sessions of a device whose work was found wrong, and keep it out."""

    @abstractmethod
    def withdraw_step(self) -> None:
        """End the step by stages, if any; devices keep what the next one can use."""

    @abstractmethod
    def end_steps(self) -> None:
        """End the step by stages, if any, and let devices forget what they hold for it."""

    @abstractmethod
    def release(self, operand: int) -> None:
        """Forget an operand. May be called from any thread, in any state."""

    @abstractmethod
    def unbind(self, operand: int) -> None:
        """Let go of an operand's memory; devices keep what they have. No product needs it now."""

    @abstractmethod
    def close(self) -> None:
        """End all sessions."""

    @abstractmethod
    def counters(self) -> FleetCounters:
        """Return a snapshot of the counters."""

    @abstractmethod
    def counting_tasks(self) -> AbstractContextManager[None]:
        """Count the tasks of a training step for `progress`; the next one has as many."""

    @abstractmethod
    def progress(self) -> StepProgress | None:
        """Return how far the step is that is under way, if any. Any thread may call this."""

    @abstractmethod
    def device_count(self) -> int:
        """Return how many devices may be given work now."""

    @abstractmethod
    def stuck(self, future: GemmFuture) -> str:
        """Say why no connected device can finish a GEMM; empty if one can, or none is connected."""

    @abstractmethod
    def stage_devices(self) -> dict[int, DeviceRates]:
        """Return the devices that can run stages and may be given work now, with their rates."""

    @abstractmethod
    def why_no_stages(self) -> str:
        """Say in a sentence why no device can train whole layers now; empty if one can."""

    @abstractmethod
    def fleet_rates(self) -> tuple[int, list[DeviceRates]]:
        """Return the fleet's epoch, and the rates of the devices that may be given work now."""
