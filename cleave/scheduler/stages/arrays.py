"""Arrays that devices exchange with the PS in a step by stages, whole and in parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from cleave.protocol.codec import Buffer, Packable, payload_bytes
from cleave.scheduler.traffic import TrafficKind


@dataclass(frozen=True, slots=True, eq=False)
class StageArray:
    """An array to send to devices. It must not change while in use.

    Attributes:
        rows, columns, dtype: shape and dtype, as in `put`.
        payload: the array's elements.
        kind: traffic category.
        parts: consecutive rows as separate arrays, if it is too large for one message.
    """

    rows: int
    columns: int
    dtype: str
    payload: Buffer | Packable
    kind: TrafficKind = TrafficKind.ACTIVATIONS
    parts: Sequence[StageArray] = ()

    @property
    def nbytes(self) -> int:
        """Return the array's bytes on a device."""
        return payload_bytes(self.payload)

    def pieces(self, count: int) -> list[StageArray]:
        """Split the array into `count` arrays of equally many consecutive rows."""
        if count == 1:
            return [self]
        each = self.nbytes // count
        return [
            replace(self, rows=self.rows // count, payload=_part(self.payload, first, first + each))
            for first in range(0, self.nbytes, each)
        ]


@runtime_checkable
class Divisible(Protocol):
    """A payload that can be divided and joined without packing."""

    def part(self, first: int, stop: int) -> Packable:
        """Return bytes `first` to `stop`, exclusive."""
        ...

    def followed_by(self, others: Sequence[Any]) -> Packable:
        """Return this payload followed by others."""
        ...


def _part(payload: Any, first: int, stop: int) -> Buffer | Packable:
    """Return bytes `first` to `stop` of a payload, exclusive."""
    if isinstance(payload, Divisible):
        return payload.part(first, stop)
    return _packed(payload)[first:stop]


def joined(payloads: Sequence[Any]) -> Any:
    """Concatenate payloads."""
    if isinstance(payloads[0], Divisible):
        return payloads[0].followed_by(payloads[1:])
    return b"".join(_packed(payload) for payload in payloads)


def _packed(payload: Any) -> memoryview:
    held = payload if isinstance(payload, bytes | bytearray | memoryview) else payload.pack()
    return memoryview(held).cast("B")
