"""The energy of the server's own machine: measured, or from the power that its owner states."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from cleave.energy.account import Ps
from cleave.energy.meter import Basis
from cleave.machine.sensors import PowerMeter

SAMPLE_S = 60.0
"""How often the counters are looked at, so that none is full twice in between."""


class OwnPower:
    """The energy that this machine has used since this was made. Any thread may call its methods.

    Args:
        meter: measures processor and memory of this machine.
        stated_w: power at the socket in watts, as the owner states it; None if it was not stated.
            It is used in place of the measured power, which is that of processor and memory only.
        clock: returns seconds.
    """

    def __init__(
        self,
        meter: PowerMeter,
        stated_w: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._meter, self._stated_w, self._clock = meter, stated_w, clock
        self._began_s = clock()
        self._lock = threading.Lock()
        meter.sample()

    @property
    def source(self) -> str:
        """Return what is counted, as text for people."""
        if self._stated_w is not None:
            return f"{self._stated_w:g} W at the socket, as stated"
        return self._meter.source

    def used(self) -> Ps:
        """Return the energy used until now."""
        if self._stated_w is not None:
            return Ps(self._stated_w * (self._clock() - self._began_s), Basis.MODELLED)
        with self._lock:
            self._meter.sample()
            joules = self._meter.joules
        return Ps() if joules is None else Ps(joules, Basis.MEASURED)
