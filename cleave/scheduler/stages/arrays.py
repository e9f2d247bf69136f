"""Arrays in a step by stages, and functions that split and concatenate payloads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from cleave.protocol.codec import Buffer, Packable, payload_bytes
from cleave.scheduler.counters import TrafficKind


@dataclass(frozen=True, slots=True, eq=False)
class StageArray:
    """An array that the PS sends to devices. The payload must not change while the array is in use.

    Attributes:
        rows, columns, dtype: shape and dtype, as in the `put` message.
        parts: the array split by rows, if it is too large for one message; empty otherwise.
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
    """A payload that can be split and concatenated without being packed into bytes."""

    def part(self, first: int, stop: int) -> Packable:
        """Return the payload's bytes from `first` to `stop`, excluding `stop`."""
        ...

    def followed_by(self, others: Sequence[Any]) -> Packable:
        """Return the concatenation of this payload and the other payloads."""
        ...


def _part(payload: Any, first: int, stop: int) -> Buffer | Packable:
    if isinstance(payload, Divisible):
        return payload.part(first, stop)
    return packed(payload)[first:stop]


def joined(payloads: Sequence[Any]) -> Any:
    """Return the concatenation of payloads, in order."""
    if isinstance(payloads[0], Divisible):
        return payloads[0].followed_by(payloads[1:])
    return b"".join(packed(payload) for payload in payloads)


def packed(payload: Any) -> memoryview:
    """Return a payload's bytes."""
    held = payload if isinstance(payload, bytes | bytearray | memoryview) else payload.pack()
    return memoryview(held).cast("B")
