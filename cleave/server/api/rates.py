"""Rates over the last seconds, from counters that are read at intervals. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from cleave.protocol.device_counters import DeviceCounters

WINDOW_S: Final = 10.0
"""Window of the rates in seconds, if counters are read often enough."""

_APART_S: Final = 0.5  # closer snapshots are not kept


@dataclass(frozen=True, slots=True)
class Look:
    """A snapshot of all counters.

    Attributes:
        at_s: time in seconds, on a monotonic clock.
        fleet: counters of all sessions together, including ended ones.
        devices: counters of each session, by session id.
    """

    at_s: float
    fleet: DeviceCounters = field(default_factory=DeviceCounters)
    devices: Mapping[int, DeviceCounters] = field(default_factory=dict)


class Rates:
    """Earlier snapshots, as far back as rates need them.

    Args:
        began_s: time at which all counters were 0.
        window_s: how far back snapshots are kept, in seconds.
    """

    def __init__(self, began_s: float, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._looks = deque([Look(began_s)])

    def since(self, now: Look) -> Look:
        """Return the snapshot from which to compute rates up to `now`, and remember `now`.

        This is the oldest snapshot within the window, or else the latest one before the window.
        """
        while len(self._looks) > 1 and now.at_s - self._looks[0].at_s > self._window_s:
            self._looks.popleft()
        earlier = self._looks[0]
        if now.at_s - self._looks[-1].at_s >= _APART_S:
            self._looks.append(now)
        return earlier
