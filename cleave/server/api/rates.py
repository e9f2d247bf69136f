"""Rates over the last seconds, from counters that are read from time to time. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from cleave.protocol.device_counters import DeviceCounters

WINDOW_S: Final = 10.0
"""What rates are taken over, where somebody looks often enough."""

_APART_S: Final = 0.5  # looks that are closer together are not remembered


@dataclass(frozen=True, slots=True)
class Look:
    """A snapshot of all counters.

    Attributes:
        at_s: the time, in seconds on a clock that never goes back.
        fleet: of all sessions together, including those that have ended.
        devices: of each session, by its id.
    """

    at_s: float
    fleet: DeviceCounters = field(default_factory=DeviceCounters)
    devices: Mapping[int, DeviceCounters] = field(default_factory=dict)


class Rates:
    """Earlier looks, as far back as rates need.

    Args:
        began_s: the time at which all counters were 0.
        window_s: how far back looks are kept, in seconds.
    """

    def __init__(self, began_s: float, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._looks = deque([Look(began_s)])

    def since(self, now: Look) -> Look:
        """Return the look from which rates until `now` are to be computed, and remember `now`.

        This is the oldest look within the window. If there is none within the window, it is the
        last look before.
        """
        while len(self._looks) > 1 and now.at_s - self._looks[0].at_s > self._window_s:
            self._looks.popleft()
        earlier = self._looks[0]
        if now.at_s - self._looks[-1].at_s >= _APART_S:
            self._looks.append(now)
        return earlier
