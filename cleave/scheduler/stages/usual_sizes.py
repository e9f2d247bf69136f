"""Usual magnitudes of the values that devices return for stages, to detect unusual values.

A much larger value does not prove a fault, because training may have a spike. The PS therefore
recomputes such a value before it uses the value (`cleave.training.stages.suspicion`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final, TypeAlias

FAR: Final = 100.0
"""A value that exceeds its usual magnitude by more than this factor is recomputed before use."""

_FADES: Final = 0.99  # a smaller value lowers the usual magnitude by at most this factor
_GROWS: Final = 2.0  # a value that was not recomputed raises it by at most this factor


class Returned(Enum):
    """The kind of array that a device returned. The enum values are descriptions for people."""

    OUTPUT = "the output"
    GRADIENT = "the gradient"
    LOSS = "the loss"
    SUM = "the sum of gradients"


Place: TypeAlias = tuple[Returned, str, int]
"""Identifies a group of similar values: the kind of array, the parameter or loss slice (may be
empty), and the layer number."""


@dataclass(slots=True)
class UsualSizes:
    """Stores the usual largest magnitude of returned arrays for each place."""

    _usual: dict[tuple[Returned, str], dict[int, float]] = field(default_factory=dict)

    def of(self, place: Place) -> float | None:
        """Return a place's usual magnitude; None if unknown.

        A place without a magnitude uses the largest magnitude of the same array in other layers.
        """
        what, of, layer = place
        others = self._usual.get((what, of), {})
        return others.get(layer, max(others.values(), default=None))

    def explains(self, place: Place, size: float) -> bool:
        """Return whether a magnitude is at most `FAR` times the usual magnitude.

        Returns:
            False if the usual magnitude is unknown.
        """
        usual = self.of(place)
        return usual is not None and size <= FAR * usual

    def saw(self, place: Place, size: float, *, repeated: bool = False) -> None:
        """Record the magnitude of a value that the PS uses.

        Args:
            size: the value's largest magnitude, a finite number.
            repeated: whether the PS recomputed the value and got the same result. A value that was
                not recomputed can at most double the usual magnitude.
        """
        what, of, layer = place
        usual = self.of(place)
        if usual is not None:
            size = max(size if repeated else min(size, _GROWS * usual), _FADES * usual)
        self._usual.setdefault((what, of), {})[layer] = size
