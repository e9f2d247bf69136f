"""What the server's own machine draws: measured where it tells, else as its owner says."""

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
    """Since it was made. Any thread may ask.

    Args:
        meter: of this machine.
        stated_w: at the socket, as its owner says; goes before what is measured, which is of
            processor and memory alone. None where nobody said.
        clock: in seconds.
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
        """What is counted, for people."""
        if self._stated_w is not None:
            return f"{self._stated_w:g} W at the socket, as stated"
        return self._meter.source

    def used(self) -> Ps:
        """Until now."""
        if self._stated_w is not None:
            return Ps(self._stated_w * (self._clock() - self._began_s), Basis.MODELLED)
        with self._lock:
            self._meter.sample()
            joules = self._meter.joules
        return Ps() if joules is None else Ps(joules, Basis.MEASURED)
