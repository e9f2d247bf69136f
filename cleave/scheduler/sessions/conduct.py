"""What is remembered of how a device works, from one session to the next."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Conduct:
    """How a device worked when it was here last.

    Attributes:
        setbacks: how often it was set aside for failing, since it did a run
            (`cleave.scheduler.sessions.setbacks`).
        failure: why it failed last, as it said; empty for one that never did.
        slowness: how many times longer its work took than its rates say
            (`cleave.scheduler.sessions.pace`).
        late_s: how much later each of its answers came, seconds.
    """

    setbacks: int = 0
    failure: str = ""
    slowness: float = 1.0
    late_s: float = 0.0
