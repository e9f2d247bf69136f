"""Behavior without available devices: training waits, or multiplies on the PS.

The module also decides when a stopping run no longer waits. Everything runs in the training thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from cleave.arrays import Buffer
from cleave.errors import CleaveError
from cleave.fleet.counters import FleetCounters
from cleave.fleet.fleet import Fleet
from cleave.fleet.product import Finished, GemmFuture, Operand, Pending, Side, product_of
from cleave.machine.backends import MatmulBackend
from cleave.scheduler.tiles.scheduler import WITHDRAWN

LOOK_S: Final = 0.5
"""Seconds between two checks of the fleet while waiting for a GEMM."""

_MOST_SAID: Final = 100  # reasons remembered, to report each once


STEP_END_S: Final = 30.0
"""Seconds that a step may continue after a stop request, while devices are available."""


class AbandonedError(CleaveError):
    """Training must stop and the current step is abandoned: no part of it was applied."""


class FleetPresence(Enum):
    """Where GEMMs run now. Users see the values."""

    PRESENT = "present"
    """On devices."""

    ABSENT = "absent"
    """Nowhere: training waits because no device is connected or all are set aside."""

    LOCAL = "local"
    """On the PS, until a device is connected."""


@dataclass(frozen=True, slots=True)
class Fallback:
    """The PS as a substitute for the fleet.

    Attributes:
        backend: multiplies.
        after_s: seconds without any device, on the fleet's clock, before the PS multiplies.
    """

    backend: MatmulBackend
    after_s: float


class Leaving:
    """Decides when a stopping run no longer waits for the current step.

    Without devices, the step ends at once. With devices, it gets some time to finish.

    Args:
        asked: returns whether training must stop.
        applied: returns whether part of the step was applied to the model, so that it must be
            finished.
        backend: multiplies the rest of such a step.
        clock: returns wall seconds of this machine.
        patience_s: seconds that a step gets while devices are available.
    """

    def __init__(
        self,
        asked: Callable[[], bool],
        applied: Callable[[], bool],
        backend: MatmulBackend,
        clock: Callable[[], float],
        patience_s: float = STEP_END_S,
    ) -> None:
        self.backend = backend
        self._asked = asked
        self._applied = applied
        self._clock = clock
        self._patience_s = patience_s
        self._since_s: float | None = None

    def now(self, devices: int) -> bool:
        """Return whether to stop waiting, given the number of available devices."""
        if not self._asked():
            self._since_s = None
            return False
        if self._since_s is None:
            self._since_s = self._clock()
        return not devices or self._clock() - self._since_s >= self._patience_s

    def give_up(self) -> None:
        """Abandon the step, if still possible.

        Raises:
            AbandonedError: the step was abandoned.
        """
        if not self._applied():
            raise AbandonedError("the step under way was given up, for training is to stop")


class FallbackFleet:
    """A fleet that reports when no device can do a GEMM, and may multiply on the PS.

    Args:
        fleet: multiplies while it can.
        tell: called with every change of presence, in the training thread.
        fallback: multiplies meanwhile; None to wait.
        leaving: decides when to stop waiting; None to wait forever.
        say: called once with each reason why no device can do a GEMM, in the training thread.

    Attributes:
        presence: the last reported presence.
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
        self._fleet = fleet
        self._runtime = fleet.runtime
        self._tell = tell
        self._fallback = fallback
        self._leaving = leaving
        self._say = say or (lambda text: None)
        self._said: set[str] = set()
        self._absent_s = 0.0
        self._local_gemms = 0

    def operand(self, buffer: Buffer) -> Operand:
        """Register a matrix; see `Fleet.operand`."""
        return self._fleet.operand(buffer)

    def submit(self, a: Side, b: Side, out: Buffer) -> Pending:
        """Start a product on the fleet or do it here; see `Fleet.submit`.

        Raises:
            AbandonedError: training must stop and the step can be abandoned.
        """
        gemm, _, _ = product_of(a, b, out)
        if gemm.volume and (fallback := self._takes()):
            self._multiply(a, b, out, fallback)
            return Finished(out)
        return _WithFallback(self, self._fleet.submit(a, b, out))

    def counters(self) -> FleetCounters:
        """Return the fleet's counters, with the GEMMs multiplied here."""
        return replace(self._fleet.counters(), local_gemms=self._local_gemms)

    def wait(self, future: GemmFuture) -> None:
        """Wait until the future is done, by the fleet or on the PS.

        Raises:
            AbandonedError: the step was abandoned; the future is still running.
        """
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
                if self._fallback is not None:  # waiting would not help
                    self._take_back(future, self._fallback)
                    return
                if runtime.clock == "virtual":
                    timeout_s = None
            elif runtime.device_count():
                self._become(FleetPresence.PRESENT)
            elif runtime.wait(future, 0.0):  # the last device answered before it left
                return
            elif self._fallback is None:
                self._become(FleetPresence.ABSENT)
                if reason := runtime.stuck(future):  # connected devices are set aside
                    self._say_once(reason)
                if runtime.clock == "virtual":  # it knows when no device will join
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
        """Return the fallback for a new GEMM; None if the fleet multiplies it."""
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
        if future.error == WITHDRAWN:  # otherwise it finished or failed first
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


@dataclass(frozen=True, slots=True)
class _WithFallback:
    """A running GEMM that its `FallbackFleet` waits for."""

    fleet: FallbackFleet
    future: GemmFuture

    @property
    def done(self) -> bool:
        """Return whether the product is complete."""
        return self.future.done

    def result(self) -> Buffer:
        """Wait for the product and return it."""
        if not self.future.done:
            self.fleet.wait(self.future)
        return self.future.result()
