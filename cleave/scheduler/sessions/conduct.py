"""A device's behavior, remembered from one session to the next."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Conduct:
    """A device's behavior in its last session.

    Attributes:
        setbacks: number of times it was set aside since it last completed a run
            (`cleave.scheduler.sessions.setbacks`).
        failure: the device's own reason for its last failure; empty if it never failed.
        slowness: factor by which its work took longer than its rates predict
            (`cleave.scheduler.sessions.pace`).
        late_s: delay of each of its answers, in seconds.
    """

    setbacks: int = 0
    failure: str = ""
    slowness: float = 1.0
    late_s: float = 0.0
