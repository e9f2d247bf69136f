"""The largest magnitudes that results of a step by stages usually have."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final, TypeAlias

# a value that exceeds its usual magnitude by this factor is recomputed before use
FAR: Final = 100.0


_FADES: Final = 0.99  # a smaller value lowers the usual magnitude by at most this factor


_GROWS: Final = 2.0  # a value that was not recomputed raises it by at most this factor


class Returned(Enum):
    """The kind of array that a device returned. The enum values are descriptions for people."""

    OUTPUT = "the output"
    GRADIENT = "the gradient"
    LOSS = "the loss"
    SUM = "the sum of gradients"


# A group of similar values: kind of array, parameter or loss slice (may be empty), layer number.
Place: TypeAlias = tuple[Returned, str, int]


@dataclass(slots=True)
class UsualSizes:
    """The usual largest magnitude of returned arrays for each place.

    A much larger value does not prove a fault, because training may have a spike. The PS recomputes
    such a value before it uses it (`cleave.training.stages.suspicion`).
    """

    _usual: dict[tuple[Returned, str], dict[int, float]] = field(default_factory=dict)

    def of(self, place: Place) -> float | None:
        """Return a place's usual magnitude, or the largest one of the same array in other layers.

        None if neither is known.
        """
        what, of, layer = place
        others = self._usual.get((what, of), {})
        return others.get(layer, max(others.values(), default=None))

    def explains(self, place: Place, size: float) -> bool:
        """Return whether a magnitude is at most `FAR` times the usual one; False if unknown."""
        usual = self.of(place)
        return usual is not None and size <= FAR * usual

    def saw(self, place: Place, size: float, *, repeated: bool = False) -> None:
        """Record the finite largest magnitude of a value that the PS uses.

        A value that the PS did not recompute (`repeated`) can at most double the usual magnitude.
        """
        what, of, layer = place
        usual = self.of(place)
        if usual is not None:
            size = max(size if repeated else min(size, _GROWS * usual), _FADES * usual)
        self._usual.setdefault((what, of), {})[layer] = size
