"""Arrays of a stage-wise step: their division into parts, and their usual magnitudes."""

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
        parts: the array's rows as several arrays, if it is too large for one message.
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
