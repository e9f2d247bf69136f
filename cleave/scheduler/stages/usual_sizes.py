"""Track the usual magnitudes of arrays that devices return in steps by stages, to find outliers."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final, TypeAlias

# an array that exceeds its usual magnitude by this factor is recomputed before use
FAR: Final = 100.0


_FADES: Final = 0.99  # smaller values lower the usual magnitude of an array by at most this factor


_GROWS: Final = 2.0  # arrays that were not recomputed raise the magnitude by at most this factor


class Returned(Enum):
    """The kind of array that a device returned. The enum values are descriptions for users."""

    OUTPUT = "the output"
    GRADIENT = "the gradient"
    LOSS = "the loss"
    SUM = "the sum of gradients"


# A group of similar arrays: kind of array, parameter or loss slice (may be empty), layer number.
Place: TypeAlias = tuple[Returned, str, int]


@dataclass(slots=True)
class UsualSizes:
    """The usual magnitude (largest absolute value) of returned arrays, for each `Place`.

    The PS recomputes an array with a much larger magnitude before using it (see
    `cleave.training.stages.suspicion`). Such a magnitude does not prove a fault, because gradients
    may spike during training.
    """

    _usual: dict[tuple[Returned, str], dict[int, float]] = field(default_factory=dict)

    def of(self, place: Place) -> float | None:
        """Return the usual magnitude of arrays at `place`; None if unknown.

        If none is known for the place's layer, return the largest one of the other layers.
        """
        what, of, layer = place
        others = self._usual.get((what, of), {})
        return others.get(layer, max(others.values(), default=None))

    def explains(self, place: Place, size: float) -> bool:
        """Return whether a usual magnitude is known and `size` is at most `FAR` times as large."""
        usual = self.of(place)
        return usual is not None and size <= FAR * usual

    def saw(self, place: Place, size: float, *, repeated: bool = False) -> None:
        """Update a place's usual magnitude from the magnitude `size` of an accepted array.

        If the PS did not recompute the array (`repeated` is False), the usual magnitude at most
        doubles.
        """
        what, of, layer = place
        usual = self.of(place)
        if usual is not None:
            size = max(size if repeated else min(size, _GROWS * usual), _FADES * usual)
        self._usual.setdefault((what, of), {})[layer] = size
