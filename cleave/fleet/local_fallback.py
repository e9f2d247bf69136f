"""What training does while no device can work: it waits, or multiplies on the PS itself.

And how it comes away from waiting when it is to stop. All of it happens in the training thread, in
`submit` and `result`; it knows the fleet by its runtime: how many devices there are, and time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from cleave.arrays import Buffer
from cleave.errors import CleaveError
from cleave.fleet.fleet import Fleet
from cleave.fleet.product import Finished, GemmFuture, Operand, Pending, Side, product_of
from cleave.fleet.runtime import FleetCounters
from cleave.machine.backends import MatmulBackend
from cleave.scheduler.scheduler import WITHDRAWN

LOOK_S: Final = 0.5
"""How often the fleet is looked at while a GEMM is waited for."""

_MOST_SAID: Final = 100  # reasons that are remembered, so that each is said once


STEP_END_S: Final = 30.0
"""How long a step may go on after training was asked to stop, while devices are there."""


class AbandonedError(CleaveError):
    """Training is to stop, and the step under way is given up: nothing of it was applied."""


class FleetPresence(Enum):
    """Who multiplies now; the values are what users read."""

    PRESENT = "present"
    """Devices, as it should be."""

    ABSENT = "absent"
    """Nobody: no device is connected, or each that is was set aside, and training waits."""

    LOCAL = "local"
    """The PS, until a device is connected."""


@dataclass(frozen=True, slots=True)
class Fallback:
    """The PS in place of a fleet.

    Attributes:
        backend: multiplies.
        after_s: seconds without any device, on the fleet's clock, before it does.
    """

    backend: MatmulBackend
    after_s: float


class Leaving:
    """When training is to stop and does not wait any longer for the step under way.

    A step that no device works on ends at once. While devices are there it gets some time to end
    by itself.

    Args:
        asked: whether training is to stop.
        applied: whether something of the step under way was applied to the model already, so that
            it can only be finished, and not be given up.
        backend: multiplies what is then left of it.
        clock: seconds, of this machine.
        patience_s: that a step gets while devices are there.
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
        """Whether to wait no longer, with so many devices there."""
        if not self._asked():
            return False
        if self._since_s is None:
            self._since_s = self._clock()
        return not devices or self._clock() - self._since_s >= self._patience_s

    def give_up(self) -> None:
        """Leave the step, if it can be left.

        Raises:
            AbandonedError: if so.
        """
        if not self._applied():
            raise AbandonedError("the step under way was given up, for training is to stop")


class FallbackFleet:
    """A fleet that notices that no device is there, or none can do a GEMM, and says so once.

    Args:
        fleet: it does what it can.
        tell: told of every change, in the training thread.
        fallback: multiplies meanwhile; None for waiting.
        leaving: when not to wait any longer; None to wait for ever.
        say: told why no device can do a GEMM, likewise.

    Attributes:
        presence: as told last.
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
        """See `Fleet.operand`."""
        return self._fleet.operand(buffer)

    def submit(self, a: Side, b: Side, out: Buffer) -> Pending:
        """See `Fleet.submit`.

        Raises:
            AbandonedError: when training is to stop and the step can be given up.
        """
        gemm, _, _ = product_of(a, b, out)
        if gemm.volume and (fallback := self._takes()):
            self._multiply(a, b, out, fallback)
            return Finished(out)
        return _Awaited(self, self._fleet.submit(a, b, out))

    def counters(self) -> FleetCounters:
        """See `Fleet.counters`; with what was multiplied here."""
        return replace(self._fleet.counters(), local_gemms=self._local_gemms)

    def wait(self, future: GemmFuture) -> None:
        """Return when the future is done, by the fleet or without it.

        Raises:
            AbandonedError: when training is to stop and the step can be given up. The future is
                still under way then.
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
                if self._fallback is not None:  # there is nothing to wait for
                    self._take_back(future, self._fallback)
                    return
                if runtime.clock == "virtual":
                    timeout_s = None
            elif runtime.device_count():
                self._become(FleetPresence.PRESENT)
            elif runtime.wait(future, 0.0):  # the last device answered before it went
                return
            elif self._fallback is None:
                self._become(FleetPresence.ABSENT)
                if runtime.clock == "virtual":  # which knows when nobody is due any more
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
        """Who multiplies a new GEMM instead of the fleet; None when the fleet is to."""
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
        """Do a GEMM here and now."""
        fallback.backend.matmul(a.matrix, b.matrix, out)
        self._local_gemms += 1
        self._runtime.advance_for_local_work(product_of(a, b, out)[0].flops)

    def _take_back(self, future: GemmFuture, fallback: Fallback) -> None:
        self._runtime.withdraw(future)
        if future.error == WITHDRAWN:  # else it was finished, or failed, at the last moment
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
class _Awaited:
    """A GEMM under way that is waited for by its `FallbackFleet`."""

    fleet: FallbackFleet
    future: GemmFuture

    @property
    def done(self) -> bool:
        """See `Pending.done`."""
        return self.future.done

    def result(self) -> Buffer:
        """See `GemmFuture.result`."""
        if not self.future.done:
            self.fleet.wait(self.future)
        return self.future.result()
