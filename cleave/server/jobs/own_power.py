"""Energy of the server's machine: measured, or modelled from the stated power."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from cleave.energy.account import Ps
from cleave.energy.meter import Basis
from cleave.machine.sensors import PowerMeter

SAMPLE_S = 60.0
"""Seconds between samples of the energy counters, so that none overflows twice in between."""


class OwnPower:
    """The energy that this machine has used since this object was created. Thread-safe.

    Args:
        meter: measures this machine's processor and memory.
        stated_w: power at the socket in watts, as the owner states it; None if not stated. It
            replaces the measured power, which covers only processor and memory.
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
        """Return the source of the figures, as text for people."""
        if self._stated_w is not None:
            return f"{self._stated_w:g} W at the socket, as stated"
        return self._meter.source

    def used(self) -> Ps:
        """Return the energy used so far."""
        if self._stated_w is not None:
            return Ps(self._stated_w * (self._clock() - self._began_s), Basis.MODELLED)
        with self._lock:
            self._meter.sample()
            joules = self._meter.joules
        return Ps() if joules is None else Ps(joules, Basis.MEASURED)
