"""Provide earlier snapshots of counters, from which rates over the last seconds are computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from cleave.protocol.device_counters import DeviceCounters

WINDOW_S: Final = 10.0
"""Length of the window over which rates are computed, in seconds.

The window is longer if the counters are read less often.
"""

_APART_S: Final = 0.5  # minimum seconds between two retained snapshots


@dataclass(frozen=True, slots=True)
class Look:
    """A snapshot of all counters.

    Attributes:
        at_s: time in seconds, on a monotonic clock.
        fleet: summed counters of all sessions, including ended sessions.
        devices: maps the number of each session to the counters of the session.
    """

    at_s: float
    fleet: DeviceCounters = field(default_factory=DeviceCounters)
    devices: Mapping[int, DeviceCounters] = field(default_factory=dict)


class Rates:
    """Retains the snapshots of the last `window_s` seconds.

    Args:
        began_s: time at which all counters were 0.
        window_s: age in seconds after which a snapshot is discarded.
    """

    def __init__(self, began_s: float, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._looks = deque([Look(began_s)])

    def since(self, now: Look) -> Look:
        """Return the snapshot from which to compute rates up to `now`, and retain `now`.

        The method returns the oldest snapshot within the window or, if the window contains no
        snapshot, the latest snapshot before the window.
        """
        while len(self._looks) > 1 and now.at_s - self._looks[0].at_s > self._window_s:
            self._looks.popleft()
        earlier = self._looks[0]
        if now.at_s - self._looks[-1].at_s >= _APART_S:
            self._looks.append(now)
        return earlier
