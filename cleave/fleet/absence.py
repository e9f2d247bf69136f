"""What training does while no device can work: it waits, or multiplies on the PS itself.

And how it comes away from waiting when it is to stop. It lives in the training thread, beside
`Fleet.submit` and `GemmFuture.result`, and knows the fleet only by its shell: how many devices
there are, and time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

from cleave.dispatch.dispatcher import WITHDRAWN
from cleave.errors import CleaveError

if TYPE_CHECKING:
    from cleave.device.executors import Executor
    from cleave.fleet.fleet import GemmFuture, Shell

LOOK_S: Final = 0.5
"""How often the fleet is looked at while a GEMM is waited for."""

_MOST_SAID: Final = 100  # reasons that are remembered, so that each is said once


STEP_END_S: Final = 30.0
"""How long a step may go on after training was asked to stop, while devices are there."""


class AbandonedError(CleaveError):
    """Training is to stop, and the step under way is given up: nothing of it was applied."""


class Presence(Enum):
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
        executor: multiplies.
        after_s: seconds without any device, on the fleet's clock, before it does.
    """

    executor: Executor
    after_s: float


class Leaving:
    """When training is to stop and does not wait any longer for the step under way.

    A step that no device works on ends at once. While devices are there it gets some time to end
    by itself.

    Args:
        asked: whether training is to stop.
        applied: whether something of the step under way was applied to the model already, so that
            it can only be finished, and not be given up.
        executor: multiplies what is then left of it.
        clock: seconds, of this machine.
        patience_s: that a step gets while devices are there.
    """

    def __init__(
        self,
        asked: Callable[[], bool],
        applied: Callable[[], bool],
        executor: Executor,
        clock: Callable[[], float],
        patience_s: float = STEP_END_S,
    ) -> None:
        self.executor = executor
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


class Absence:
    """Notices that no device is there, or none can do a GEMM, and says so once.

    Args:
        tell: told of every change, in the training thread.
        fallback: multiplies meanwhile; None for waiting.
        leaving: when not to wait any longer; None to wait for ever.
        say: told why no device can do a GEMM, likewise.

    Attributes:
        presence: as told last.
        gemms: how many were multiplied on the PS.
    """

    def __init__(
        self,
        tell: Callable[[Presence], None],
        fallback: Fallback | None = None,
        leaving: Leaving | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.presence = Presence.PRESENT
        self.gemms = 0
        self._tell = tell
        self._fallback = fallback
        self._leaving = leaving
        self._say = say or (lambda text: None)
        self._said: set[str] = set()
        self._absent_s = 0.0

    def takes(self, shell: Shell) -> Fallback | None:
        """Who multiplies a new GEMM instead of the fleet; None when the fleet is to.

        Raises:
            AbandonedError: see `wait`.
        """
        if self._leaving is not None and self._leaving.now(shell.device_count()):
            self._leaving.give_up()
            return Fallback(self._leaving.executor, 0.0)
        if self.presence is not Presence.LOCAL:
            return None
        if shell.device_count():
            self._become(Presence.PRESENT)
            return None
        return self._fallback

    def wait(self, shell: Shell, future: GemmFuture) -> None:
        """Return when the future is done, by the fleet or without it.

        Raises:
            AbandonedError: when training is to stop and the step can be given up. The future is
                still under way then.
        """
        while True:
            timeout_s: float | None = LOOK_S
            if self._leaving is not None and self._leaving.now(shell.device_count()):
                if shell.wait(future, 0.0):
                    return
                self._leaving.give_up()
                self._take_back(shell, future, Fallback(self._leaving.executor, 0.0))
                return
            if shell.device_count() and (reason := shell.stuck(future)):
                self._say_once(reason)
                if self._fallback is not None:  # there is nothing to wait for
                    self._take_back(shell, future, self._fallback)
                    return
                if shell.clock == "virtual":
                    timeout_s = None
            elif shell.device_count():
                self._become(Presence.PRESENT)
            elif shell.wait(future, 0.0):  # the last device answered before it went
                return
            elif self._fallback is None:
                self._become(Presence.ABSENT)
                if shell.clock == "virtual":  # which knows when nobody is due any more
                    timeout_s = None
            else:
                if self.presence is Presence.PRESENT:
                    self._become(Presence.ABSENT)
                left_s = self._fallback.after_s - self._absent_s
                if left_s <= 0:
                    self._become(Presence.LOCAL)
                    self._take_back(shell, future, self._fallback)
                    return
                timeout_s = min(LOOK_S, left_s)
                self._absent_s += timeout_s
            if shell.wait(future, timeout_s):
                return

    def multiply(self, shell: Shell, future: GemmFuture, fallback: Fallback) -> None:
        """Do a GEMM here and now."""
        a, b = (
            side.operand.buffer.T if side.transposed else side.operand.buffer
            for side in (future.a, future.b)
        )
        fallback.executor.matmul(a, b, future.out)
        self.gemms += 1
        future.done = True
        shell.elsewhere(future.work.gemm.flops)

    def _take_back(self, shell: Shell, future: GemmFuture, fallback: Fallback) -> None:
        shell.withdraw(future)
        if future.error == WITHDRAWN:  # else it was finished, or failed, at the last moment
            future.error = ""
            self.multiply(shell, future, fallback)

    def _say_once(self, reason: str) -> None:
        if reason not in self._said and len(self._said) < _MOST_SAID:
            self._said.add(reason)
            self._say(reason)

    def _become(self, presence: Presence) -> None:
        if presence is not self.presence:
            self.presence = presence
            self._absent_s = 0.0
            self._tell(presence)
