"""The interface for a fleet's runtime, which provides the clock and the connections to devices.

`cleave.fleet.runtime.Runtime` serves the devices in this process.
`cleave.cluster.endpoints.EndpointRuntime` delegates to another process, to which the devices
are connected. The devices then stay connected when this process exits.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from typing import ClassVar, Final

from cleave.fleet.own_device import OwnDevice
from cleave.fleet.product import GemmFuture
from cleave.planner.plan import DeviceRates
from cleave.scheduler.counters import FleetCounters, StepProgress
from cleave.scheduler.rounds.work import RoundResult, RoundWork
from cleave.scheduler.stages.arrays import StageArray
from cleave.scheduler.stages.outcomes import StageOutcome
from cleave.scheduler.stages.work import StepWork

_LOOK_S: Final = 0.05  # seconds between polls in `wait_until`


class FleetRuntime(ABC):
    """Interface for running the GEMMs and the steps by stages of one fleet.

    Timeouts are in seconds on the runtime's clock; None means no timeout.
    """

    clock: ClassVar[str]  # kind of the runtime's clock: `virtual` or `wall`
    keeps_state: ClassVar[bool] = True  # whether devices may keep weights and optimizer state
    own_device: OwnDevice | None = None  # None if the PS's computer cannot become a device

    def now(self) -> float:
        """Return the time on the runtime's clock, in seconds."""
        return time.monotonic()

    @abstractmethod
    def start(self, future: GemmFuture) -> None:
        """Start a GEMM without waiting for the result."""

    @abstractmethod
    def wait(self, future: GemmFuture, timeout_s: float | None = None) -> bool:
        """Wait until a GEMM is done. Return False on timeout."""

    def wait_until(self, condition: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Poll a condition until it is true. Return False on timeout.

        In virtual time, also return False once no future event can make the condition true.
        """
        until_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() >= until_s:
                return False
            time.sleep(_LOOK_S)
        return True

    @abstractmethod
    def withdraw(self, future: GemmFuture) -> None:
        """Withdraw a GEMM that is still running, and mark its future as done."""

    def advance_for_local_work(self, flops: float) -> None:  # noqa: B027 - wall clocks advance
        """Advance a virtual clock by the time that the PS takes to compute `flops` FLOPs."""

    @abstractmethod
    def begin_step(self, work: StepWork) -> None:
        """Start a step by stages. `next_outcome` returns the outcomes of the step."""

    def begin_round(self, work: RoundWork) -> None:
        """Start a round of local updates. `next_outcome` returns its `RoundResult`.

        Call this method only if `keeps_state` is True.
        """
        raise NotImplementedError

    def renew(self, arrays: Mapping[StageArray, StageArray]) -> None:  # noqa: B027 - optional
        """Between two steps by stages, send new weights to the devices that store the old weights.

        `arrays` maps arrays of the last step to the arrays that replace them in the next step.
        """

    @abstractmethod
    def give(self, batch: int, made: StageArray, after: int | None = None) -> None:
        """Pass an array that the caller computed for a micro-batch to the current step by stages.

        `after` is the number of the stage before the PS's own layers, or None if these layers did
        not compute `made`. `StageStep.give` describes which array each call passes.
        """

    def begin_snapshot(self, work: StepWork, position: int) -> None:
        """Begin to fetch the trained state after the step `work`, while later steps run.

        `StepResult.snapshot` of a later step returns the snapshot with this `position`, the number
        of all updates so far. Call this method and `update` only if `keeps_state`.
        """
        raise NotImplementedError

    @property
    def state_leaves(self) -> bool:
        """Return whether a device that wants to leave waits for a fetch of its trained state."""
        return False

    def update(self, scalars: Sequence[StageArray]) -> None:
        """Tell devices to update their trained state. Call this after an `UpdateWanted` outcome.

        Args:
            scalars: coefficients of the optimizer step, by `ResidentParameter.group`.
        """
        raise NotImplementedError

    @abstractmethod
    def resolve(self, right: bool, reason: str) -> None:
        """Report whether the result in the first unresolved `Suspect` outcome is correct.

        If the result is wrong, `reason` describes the error, and another device recomputes it.
        """

    @abstractmethod
    def next_outcome(self, timeout_s: float | None = None) -> StageOutcome | RoundResult | None:
        """Wait for the next outcome of the current step or round. Return None on timeout."""

    @abstractmethod
    def quarantine(self, device: int, reason: str) -> None:
        """End the session of a device that returned a wrong result, and quarantine the device."""

    @abstractmethod
    def withdraw_step(self) -> None:
        """End the current step by stages, if any. Devices keep arrays for the next step."""

    @abstractmethod
    def end_steps(self) -> None:
        """End the current step by stages, if any. Devices delete the model's arrays."""

    @abstractmethod
    def release(self, operand: int) -> None:
        """Allow devices to delete their copies of an operand. Any thread may call this method."""

    @abstractmethod
    def unbind(self, operand: int) -> None:
        """Drop all references to an operand's buffer. No running GEMM may use the operand.

        Devices keep the parts of the operand that they have received.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the runtime's resources. The runtime cannot be used afterwards."""

    @abstractmethod
    def counters(self) -> FleetCounters:
        """Return a snapshot of the fleet's counters."""

    @abstractmethod
    def counting_tasks(self) -> AbstractContextManager[None]:
        """Return a context manager that counts the tasks of one training step for `progress`.

        In the next step without stages, `progress` uses this count as the expected total.
        """

    @abstractmethod
    def progress(self) -> StepProgress | None:
        """Return the current step's progress; None if unknown or between steps. Thread-safe."""

    @abstractmethod
    def device_count(self) -> int:
        """Return the number of connected devices that may receive tasks now."""

    @abstractmethod
    def stuck(self, future: GemmFuture) -> str:
        """Return why no connected device can finish a GEMM; empty if no reason is known."""

    @abstractmethod
    def stage_devices(self) -> dict[int, DeviceRates]:
        """Return the devices that can run stages now, with their rates for layer graphs."""

    def own_devices(self) -> Set[int]:
        """Return the session numbers of devices that `own_device` started."""
        return frozenset()

    @abstractmethod
    def why_no_stages(self) -> str:
        """Return why no device can train whole layers now; empty if a device can."""

    @abstractmethod
    def fleet_rates(self) -> tuple[int, list[DeviceRates]]:
        """Return the fleet's epoch, and the rates of the devices that may receive tasks now.

        The epoch is a number that changes whenever the devices or their rates change.
        """
