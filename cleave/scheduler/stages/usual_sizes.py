"""How large the numbers are that devices usually return for stages, so that others stand out.

A number that is much larger than usual proves nothing: a run may have a spike. It is a reason to
compute it again before it is used (`cleave.training.stages.suspicion`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final, TypeAlias

FAR: Final = 100.0
"""What is so many times as large as usual is computed again before it is used."""

_FADES: Final = 0.99  # what is usual, with each value that is smaller
_GROWS: Final = 2.0  # at most so much with each value that was not computed again


class Returned(Enum):
    """Tells what a device returned; the values are for people."""

    OUTPUT = "the output"
    GRADIENT = "the gradient"
    LOSS = "the loss"
    SUM = "the sum of gradients"


Place: TypeAlias = tuple[Returned, str, int]
"""Names values that are about as large in every step.

They are what was returned, of which parameter or slice (or empty), and before or in which layer.
"""


@dataclass(slots=True)
class UsualSizes:
    """Remembers the largest magnitude of what devices returned, by place."""

    _usual: dict[tuple[Returned, str], dict[int, float]] = field(default_factory=dict)

    def of(self, place: Place) -> float | None:
        """Return what is usual at a place; None if nothing is known.

        A place without values of its own is held to the largest of the same in other layers.
        """
        what, of, layer = place
        others = self._usual.get((what, of), {})
        return others.get(layer, max(others.values(), default=None))

    def explains(self, place: Place, size: float) -> bool:
        """Say whether a value is as large as usual, or smaller; never for one not finite."""
        usual = self.of(place)
        return usual is not None and size <= FAR * usual

    def saw(self, place: Place, size: float, *, repeated: bool = False) -> None:
        """Note how large a value is that is used.

        Args:
            place: where.
            size: its largest magnitude, a finite number.
            repeated: whether the server found the same. What is not certain changes what is usual
                little by little.
        """
        what, of, layer = place
        usual = self.of(place)
        if usual is not None:
            size = max(size if repeated else min(size, _GROWS * usual), _FADES * usual)
        self._usual.setdefault((what, of), {})[layer] = size
