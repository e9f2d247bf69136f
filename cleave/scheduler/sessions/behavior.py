"""A device's behavior, stored between its sessions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Behavior:
    """A device's behavior in its last session.

    Attributes:
        setbacks: number of times the device was set aside since it last completed a run
            (`cleave.scheduler.sessions.setbacks`).
        failure: the error text that the device sent with its last failed run; empty if no run
            failed.
        slowness: factor by which the device's tasks take longer than its rates predict
            (`cleave.scheduler.sessions.pace`).
        late_s: delay of each answer beyond the predicted time, in seconds.
    """

    setbacks: int = 0
    failure: str = ""
    slowness: float = 1.0
    late_s: float = 0.0
