"""A fleet wrapper that handles periods without available devices, and stop requests.

Without available devices, training waits, or the PS computes GEMMs. After a stop request, the
wrapper limits how long training waits for the current step. All functions run in the training
thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final

from cleave.arrays import Buffer
from cleave.errors import CleaveError
from cleave.fleet.fleet import Fleet
from cleave.fleet.product import Finished, GemmFuture, Pending, Side, product_of
from cleave.machine.backends import MatmulBackend
from cleave.scheduler.counters import FleetCounters
from cleave.scheduler.tiles.scheduler import WITHDRAWN

LOOK_S: Final = 0.5  # seconds between checks for available devices while training waits for a GEMM
_MOST_SAID: Final = 100  # maximum number of different reasons that are reported

STEP_END_S: Final = 30.0
"""Maximum time that training waits for devices after a stop request, if devices are available."""


class AbandonedError(CleaveError):
    """Raised when training must stop and the current step has not yet changed the model."""


class FleetPresence(Enum):
    """Whether and where GEMMs currently run. Users see the enum values."""

    PRESENT = "present"  # GEMMs run on devices

    ABSENT = "absent"
    """Training waits, because no device is connected or all connected devices are set aside."""

    LOCAL = "local"  # GEMMs run on the PS until a device is available


@dataclass(frozen=True, slots=True)
class Fallback:
    """Settings for computing GEMMs on the PS while no device is available."""

    backend: MatmulBackend
    after_s: float  # delay before the PS computes GEMMs, in seconds on the fleet's clock


@dataclass(eq=False)
class Leaving:
    """Limit on how long training waits for the current step after a stop request.

    Without available devices, the wait ends immediately. With available devices, it ends after
    `STEP_END_S` seconds.

    Args:
        applied: returns whether the optimizer has already changed part of the model. If so, the
            step must be finished.
        backend: computes the remaining GEMMs of a step that must be finished.
        clock: returns the wall time in seconds.
    """

    asked: Callable[[], bool]
    applied: Callable[[], bool]
    backend: MatmulBackend
    clock: Callable[[], float]
    _since_s: float | None = field(init=False, default=None)

    def now(self, devices: int) -> bool:
        """Return whether to stop waiting for a fleet that has `devices` available devices."""
        if not self.asked():
            self._since_s = None
            return False
        if self._since_s is None:
            self._since_s = self.clock()
        return not devices or self.clock() - self._since_s >= STEP_END_S

    def give_up(self) -> None:
        """Raise AbandonedError, unless part of the current step has been applied to the model."""
        if not self.applied():
            raise AbandonedError("the current step was abandoned, because training is stopping")


class FallbackFleet:
    """A fleet wrapper that can compute GEMMs on the PS while no device is available.

    Args:
        fleet: runs the GEMMs while devices are available.
        tell: called in the training thread with each new value of `presence`.
        fallback: computes GEMMs while no device is available; None to wait for devices.
        leaving: decides how long training waits after a stop request; None to wait without limit.
        say: called in the training thread with each new reason why no device can run a GEMM.
    """

    def __init__(
        self,
        fleet: Fleet,
        tell: Callable[[FleetPresence], None],
        fallback: Fallback | None = None,
        leaving: Leaving | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.presence = FleetPresence.PRESENT
        self.operand = fleet.operand
        self._fleet = fleet
        self._runtime = fleet.runtime
        self._tell = tell
        self._fallback = fallback
        self._leaving = leaving
        self._say = say or (lambda text: None)
        self._said: set[str] = set()
        self._absent_s = 0.0
        self._local_gemms = 0

    def submit(self, a: Side, b: Side, out: Buffer) -> Pending:
        """Start a GEMM on the fleet, or compute it on the PS while the fallback is in use."""
        gemm, _, _ = product_of(a, b, out)
        if gemm.volume and (fallback := self._takes()):
            self._multiply(a, b, out, fallback)
            return Finished(out)
        future = self._fleet.submit(a, b, out)
        future.wait = self.wait
        return future

    def counters(self) -> FleetCounters:
        """Return the fleet's counters, including the number of GEMMs that the PS computed."""
        return replace(self._fleet.counters(), local_gemms=self._local_gemms)

    def wait(self, future: GemmFuture) -> None:
        """Wait for a GEMM or compute it on the PS. Raise AbandonedError to abandon the step."""
        runtime = self._runtime
        while True:
            timeout_s: float | None = LOOK_S
            if self._leaving is not None and self._leaving.now(runtime.device_count()):
                if runtime.wait(future, 0.0):
                    return
                self._leaving.give_up()
                self._take_back(future, Fallback(self._leaving.backend, 0.0))
                return
            if runtime.device_count() and (reason := runtime.stuck(future)):
                self._say_once(reason)
                if self._fallback is not None:  # the connected devices cannot finish this GEMM
                    self._take_back(future, self._fallback)
                    return
                if runtime.clock == "virtual":
                    timeout_s = None
            elif runtime.device_count():
                self._become(FleetPresence.PRESENT)
            elif runtime.wait(future, 0.0):  # the last device sent the result before it left
                return
            elif self._fallback is None:
                self._become(FleetPresence.ABSENT)
                if reason := runtime.stuck(future):  # all connected devices are set aside
                    self._say_once(reason)
                if runtime.clock == "virtual":  # the runtime knows if no device will join
                    timeout_s = None
            else:
                if self.presence is FleetPresence.PRESENT:
                    self._become(FleetPresence.ABSENT)
                left_s = self._fallback.after_s - self._absent_s
                if left_s <= 0:
                    self._become(FleetPresence.LOCAL)
                    self._take_back(future, self._fallback)
                    return
                timeout_s = min(LOOK_S, left_s)
                self._absent_s += timeout_s
            if runtime.wait(future, timeout_s):
                return

    def _takes(self) -> Fallback | None:
        """Return the fallback that computes a new GEMM; None if the fleet computes it."""
        if self._leaving is not None and self._leaving.now(self._runtime.device_count()):
            self._leaving.give_up()
            return Fallback(self._leaving.backend, 0.0)
        if self.presence is not FleetPresence.LOCAL:
            return None
        if self._runtime.device_count():
            self._become(FleetPresence.PRESENT)
            return None
        return self._fallback

    def _multiply(self, a: Side, b: Side, out: Buffer, fallback: Fallback) -> None:
        fallback.backend.matmul(a.matrix, b.matrix, out)
        self._local_gemms += 1
        self._runtime.advance_for_local_work(product_of(a, b, out)[0].flops)

    def _take_back(self, future: GemmFuture, fallback: Fallback) -> None:
        self._runtime.withdraw(future)
        if future.error == WITHDRAWN:  # not if the GEMM finished or failed before
            future.error = ""
            self._multiply(future.a, future.b, future.out, fallback)

    def _say_once(self, reason: str) -> None:
        if reason not in self._said and len(self._said) < _MOST_SAID:
            self._said.add(reason)
            self._say(reason)

    def _become(self, presence: FleetPresence) -> None:
        if presence is not self.presence:
            self.presence = presence
            self._absent_s = 0.0
            self._tell(presence)
