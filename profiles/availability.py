"""When a device is available: sessions and gaps, hours of the day, charging.

Sessions and gaps alternate, each drawn from its own distribution (a renewal process); on top of
that a device may be there only during some hours of its day. Published session lengths are far
from exponential: Weibull shapes of 0.34 to 0.82 (`profiles/library/availability`), that is
many short sessions and a few very long ones.
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
    """Families of distributions of durations."""

    EXPONENTIAL = "exponential"
    WEIBULL = "weibull"
    LOGNORMAL = "lognormal"


class PresencePeriod(NamedTuple):
    """A period in which a device is available: start and end, seconds."""

    from_s: float
    to_s: float


class Durations(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A distribution of durations.

    Attributes:
        mean_s: its mean.
        family: the family of the distribution.
        shape: of a Weibull, k; of a log-normal, sigma; of an exponential not looked at.
    """

    mean_s: Annotated[float, msgspec.Meta(ge=0.1, le=1e9)]
    family: AvailabilityFamily = AvailabilityFamily.EXPONENTIAL
    shape: Annotated[float, msgspec.Meta(ge=0.1, le=10)] = 1.0

    def draw(self, rng: random.Random) -> float:
        """Draw one duration, in seconds."""
        match self.family:
            case AvailabilityFamily.EXPONENTIAL:
                return rng.expovariate(1 / self.mean_s)
            case AvailabilityFamily.WEIBULL:
                return rng.weibullvariate(self.mean_s / math.gamma(1 + 1 / self.shape), self.shape)
            case AvailabilityFamily.LOGNORMAL:
                return rng.lognormvariate(math.log(self.mean_s) - self.shape**2 / 2, self.shape)


class Availability(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """When a device is available; by default always.

    Attributes:
        session: how long it stays; None means as long as its hours allow.
        gap: how long it is away between sessions; None means no time.
        hours: from and to, hours of its own day; (22, 7) is over night; None means all day. A
            charging-only policy is set by these hours, in which its owner charges it.
        drains: whether it finishes its tasks before it leaves; else it vanishes.
        source: of these figures.

    Raises:
        ValueError: for hours that are not 0 to 24, or a window shorter than a minute.
    """

    session: Durations | None = None
    gap: Durations | None = None
    hours: tuple[float, float] | None = None
    drains: bool = False
    source: str = ""

    def __post_init__(self) -> None:
        if self.hours is not None:
            begin, end = self.hours
            # In a window that is all but empty one might wait for ever for a presence.
            if not (0 <= begin <= 24 and 0 <= end <= 24) or (end - begin) % 24 < 1 / 60:
                raise ValueError(
                    f"hours are {begin:g} to {end:g}; give two different hours from 0 to 24, "
                    f"at least a minute apart"
                )

    @property
    def always(self) -> bool:
        """Return whether the device never leaves."""
        return self.session is None and self.hours is None

    def presences(self, rng: random.Random, start_hour: float = 0.0) -> Iterator[PresencePeriod]:
        """Yield when the device is available, from time zero on, without end.

        Whether it is available at time zero is drawn in proportion to mean session and gap. What
        is left of that session or gap is drawn like a whole one.

        Args:
            rng: draws all durations.
            start_hour: the hour of the device's day at time zero.
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
        opens_s = ((first - start_hour) % 24) * 3600 - DAY_S  # the window before time zero
        opens_s += DAY_S * math.floor((begin_s - opens_s) / DAY_S)
        while opens_s < end_s:
            low, high = max(begin_s, opens_s, 0.0), min(end_s, opens_s + length_s)
            if high > low:
                yield low, high
            opens_s += DAY_S
