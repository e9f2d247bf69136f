"""Rates over the last seconds, from sums that are looked at now and then. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

WINDOW_S: Final = 10.0
"""What rates are taken over, where somebody looks often enough."""

_APART_S: Final = 0.5  # looks that are closer together are not remembered


class Sums(NamedTuple):
    """What a device, or the fleet, did since it was there first."""

    blocks: int = 0
    flops: float = 0.0
    down_bytes: int = 0
    up_bytes: int = 0
    compute_s: float = 0.0


_NOTHING: Final = Sums()


@dataclass(frozen=True, slots=True)
class Look:
    """All sums at one moment.

    Attributes:
        at_s: on a clock that never goes back.
        fleet: of all that was ever there.
        devices: by session.
    """

    at_s: float
    fleet: Sums = _NOTHING
    devices: Mapping[int, Sums] = field(default_factory=dict)


class Rates:
    """Remembers looks, as far back as the window and one beyond.

    Args:
        began_s: when all sums were 0.
        window_s: how far back.
    """

    def __init__(self, began_s: float, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._looks = deque([Look(began_s)])

    def since(self, now: Look) -> Look:
        """The look that rates until `now` are to be taken from; `now` is remembered.

        It is the oldest one within the window, or the last one before, where nobody looked since.
        """
        while len(self._looks) > 1 and now.at_s - self._looks[0].at_s > self._window_s:
            self._looks.popleft()
        earlier = self._looks[0]
        if now.at_s - self._looks[-1].at_s >= _APART_S:
            self._looks.append(now)
        return earlier
