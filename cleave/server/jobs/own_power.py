"""Measure the energy of the server's machine, or compute it from a stated power."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from cleave.energy.account import Ps
from cleave.energy.meter import Basis
from cleave.machine.sensors import PowerMeter

SAMPLE_S = 60.0
"""Seconds between samples of the energy counters. No counter overflows twice in this time."""


class OwnPower:
    """Meters the energy that this machine has used since this object was created. Thread-safe.

    Args:
        meter: measures the energy of this machine's processor and memory.
        stated_w: power in watts that the machine draws from the wall socket, as the owner states;
            None to use `meter`. `meter` covers only the processor and the memory.
        clock: returns the time on a monotonic clock, in seconds.
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
        """Return a description of where the energy figures come from, for users."""
        if self._stated_w is not None:
            return f"{self._stated_w:g} W at the socket, as stated"
        return self._meter.source

    def used(self) -> Ps:
        """Return the energy that the machine has used since this object was created."""
        if self._stated_w is not None:
            return Ps(self._stated_w * (self._clock() - self._began_s), Basis.MODELLED)
        with self._lock:
            self._meter.sample()
            joules = self._meter.joules
        return Ps() if joules is None else Ps(joules, Basis.MEASURED)
