"""Usual magnitudes of values that devices return for stages, to detect unusual ones.

A much larger value proves nothing, because training may have a spike. It is a reason to recompute
the value before using it (`cleave.training.stages.suspicion`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final, TypeAlias

FAR: Final = 100.0
"""Values this many times their usual magnitude are recomputed before use."""

_FADES: Final = 0.99  # factor of the usual magnitude per smaller value
_GROWS: Final = 2.0  # maximum factor per value that was not recomputed


class Returned(Enum):
    """What a device returned. The values are for people."""

    OUTPUT = "the output"
    GRADIENT = "the gradient"
    LOSS = "the loss"
    SUM = "the sum of gradients"


Place: TypeAlias = tuple[Returned, str, int]
"""Identifies similar values: what was returned, its parameter or slice or empty, its layer."""


@dataclass(slots=True)
class UsualSizes:
    """Largest magnitudes of returned values, by place."""

    _usual: dict[tuple[Returned, str], dict[int, float]] = field(default_factory=dict)

    def of(self, place: Place) -> float | None:
        """Return a place's usual magnitude, else the largest of other layers; None if unknown."""
        what, of, layer = place
        others = self._usual.get((what, of), {})
        return others.get(layer, max(others.values(), default=None))

    def explains(self, place: Place, size: float) -> bool:
        """Return whether a magnitude is at most `FAR` times the usual one, if that is known."""
        usual = self.of(place)
        return usual is not None and size <= FAR * usual

    def saw(self, place: Place, size: float, *, repeated: bool = False) -> None:
        """Record the magnitude of a value that is used.

        Args:
            size: its largest magnitude, a finite number.
            repeated: whether the server computed the same value. Other values change the usual
                magnitude only gradually.
        """
        what, of, layer = place
        usual = self.of(place)
        if usual is not None:
            size = max(size if repeated else min(size, _GROWS * usual), _FADES * usual)
        self._usual.setdefault((what, of), {})[layer] = size
