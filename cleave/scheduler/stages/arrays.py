"""Arrays that the PS and devices exchange in a stage-wise step, and their division into parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Final, Protocol, TypeAlias, runtime_checkable

from cleave.protocol.codec import Buffer, Packable, payload_bytes
from cleave.scheduler.traffic import TrafficKind


@dataclass(frozen=True, slots=True, eq=False)
class StageArray:
    """An array that the PS sends to devices. The payload must not change while the array is in use.

    Attributes:
        rows, columns, dtype: shape and dtype, as in the `put` message.
        payload: the array's elements.
        kind: the array's traffic category.
        parts: the array's rows, split into several arrays, if the array is too large for one
            message; empty otherwise.
    """

    rows: int
    columns: int
    dtype: str
    payload: Buffer | Packable
    kind: TrafficKind = TrafficKind.ACTIVATIONS
    parts: Sequence[StageArray] = ()

    @property
    def nbytes(self) -> int:
        """Return the size of the array in a device's memory, in bytes."""
        return payload_bytes(self.payload)

    def pieces(self, count: int) -> list[StageArray]:
        """Split the array into `count` arrays with equal numbers of consecutive rows."""
        if count == 1:
            return [self]
        each = self.nbytes // count
        return [
            replace(self, rows=self.rows // count, payload=_part(self.payload, first, first + each))
            for first in range(0, self.nbytes, each)
        ]


@runtime_checkable
class Divisible(Protocol):
    """A payload that can be split and concatenated without packing."""

    def part(self, first: int, stop: int) -> Packable:
        """Return the payload's bytes from `first` to `stop`, excluding `stop`."""
        ...

    def followed_by(self, others: Sequence[Any]) -> Packable:
        """Return the concatenation of this payload and the other payloads."""
        ...


def _part(payload: Any, first: int, stop: int) -> Buffer | Packable:
    """Return the bytes of a payload from `first` to `stop`, excluding `stop`."""
    if isinstance(payload, Divisible):
        return payload.part(first, stop)
    return _packed(payload)[first:stop]


def joined(payloads: Sequence[Any]) -> Any:
    """Return the concatenation of payloads, in order."""
    if isinstance(payloads[0], Divisible):
        return payloads[0].followed_by(payloads[1:])
    return b"".join(_packed(payload) for payload in payloads)


def _packed(payload: Any) -> memoryview:
    held = payload if isinstance(payload, bytes | bytearray | memoryview) else payload.pack()
    return memoryview(held).cast("B")


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
