"""Device availability: sessions and gaps (a renewal process), and hours of the day.

Published session lengths are not exponentially distributed. Their Weibull shape parameters of 0.34
to 0.82 (`profiles/library/availability`) mean many short sessions and a few very long ones.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from enum import Enum
from typing import Annotated, NamedTuple

import msgspec

DAY_S = 86_400.0
_FOREVER_S = math.inf


class AvailabilityFamily(Enum):
    """Families of probability distributions for durations."""

    EXPONENTIAL = "exponential"
    WEIBULL = "weibull"
    LOGNORMAL = "lognormal"


class PresencePeriod(NamedTuple):
    """Start and end times (s) of a period of availability. `to_s` is infinite if it never ends."""

    from_s: float
    to_s: float


class Durations(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A probability distribution of durations. `shape` is k (Weibull) or sigma (log-normal)."""

    mean_s: Annotated[float, msgspec.Meta(ge=0.1, le=1e9)]
    family: AvailabilityFamily = AvailabilityFamily.EXPONENTIAL
    shape: Annotated[float, msgspec.Meta(ge=0.1, le=10)] = 1.0

    def draw(self, rng: random.Random) -> float:
        """Draw a random duration in seconds."""
        match self.family:
            case AvailabilityFamily.EXPONENTIAL:
                return rng.expovariate(1 / self.mean_s)
            case AvailabilityFamily.WEIBULL:
                return rng.weibullvariate(self.mean_s / math.gamma(1 + 1 / self.shape), self.shape)
            case AvailabilityFamily.LOGNORMAL:
                return rng.lognormvariate(math.log(self.mean_s) - self.shape**2 / 2, self.shape)


class Availability(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The times at which a device is available. By default, a device is always available.

    Attributes:
        session: distribution of session lengths; None means that only `hours` end a session.
        gap: distribution of the gaps between sessions; None means no gap.
        hours: start and end of the daily window, in hours of local time, such as (22, 7) for
            overnight. None means all day. For a device that works only while charging, give its
            charging hours.
        drains: True if the device finishes its current tasks before leaving. False if the device
            disconnects without notice.
        source: publication or measurement from which the distributions come.

    Raises:
        ValueError: if `hours` is outside 0 to 24, or spans less than a minute.
    """

    session: Durations | None = None
    gap: Durations | None = None
    hours: tuple[float, float] | None = None
    drains: bool = False
    source: str = ""

    def __post_init__(self) -> None:
        if self.hours is not None:
            begin, end = self.hours
            # With a nearly empty window, a device might never become available.
            if not (0 <= begin <= 24 and 0 <= end <= 24) or (end - begin) % 24 < 1 / 60:
                raise ValueError(
                    f"hours are {begin:g} to {end:g}; use two different hours from 0 to 24, at "
                    "least a minute apart"
                )

    @property
    def always(self) -> bool:
        """Return True if the device never leaves."""
        return self.session is None and self.hours is None

    def presences(self, rng: random.Random, start_hour: float = 0.0) -> Iterator[PresencePeriod]:
        """Yield the device's periods of availability in order, starting at time zero.

        A period that never ends is the last. If every period ends, the iterator is infinite. Time
        zero falls into a session or a gap with probabilities proportional to their mean lengths.
        The first session or gap has a full random length, as if it began at time zero.

        Args:
            rng: random generator for the lengths of sessions and gaps.
            start_hour: local time of the device at time zero, in hours.
        """
        for begin_s, end_s in self._sessions(rng):
            for window in self._windows(begin_s, end_s, start_hour):
                yield PresencePeriod(*window)
                if window[1] == _FOREVER_S:
                    return

    def _sessions(self, rng: random.Random) -> Iterator[tuple[float, float]]:
        if self.session is None:
            yield 0.0, _FOREVER_S
            return
        now_s = 0.0
        gap_s = self.gap.mean_s if self.gap else 0.0
        if self.gap is not None and rng.random() < gap_s / (gap_s + self.session.mean_s):
            now_s = self.gap.draw(rng)
        while True:
            end_s = now_s + self.session.draw(rng)
            yield now_s, end_s
            now_s = end_s + (self.gap.draw(rng) if self.gap else 0.0)

    def _windows(
        self, begin_s: float, end_s: float, start_hour: float
    ) -> Iterator[tuple[float, float]]:
        if self.hours is None:
            yield begin_s, end_s
            return
        first, last = self.hours
        length_s = ((last - first) % 24) * 3600
        opens_s = ((first - start_hour) % 24) * 3600 - DAY_S  # start of a window before time zero
        opens_s += DAY_S * math.floor((begin_s - opens_s) / DAY_S)
        while opens_s < end_s:
            low, high = max(begin_s, opens_s, 0.0), min(end_s, opens_s + length_s)
            if high > low:
                yield low, high
            opens_s += DAY_S
