"""Arrays that devices are sent and return in a step by stages, whole and in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from cleave.protocol.codec import Buffer, Packable, payload_bytes
from cleave.scheduler.traffic import TrafficKind


@dataclass(frozen=True, slots=True, eq=False)
class StageArray:
    """Holds an array that devices are sent. It must not change while it is in use.

    Attributes:
        rows, columns, dtype: as `put` says them.
        payload: its elements.
        kind: what it counts as on its way.
        parts: arrays of its rows, one after another, where it is too large for one message.
    """

    rows: int
    columns: int
    dtype: str
    payload: Buffer | Packable
    kind: TrafficKind = TrafficKind.ACTIVATIONS
    parts: Sequence[StageArray] = ()

    @property
    def nbytes(self) -> int:
        """Return its size on a device."""
        return payload_bytes(self.payload)

    def pieces(self, count: int) -> list[StageArray]:
        """Return so many arrays of consecutive rows, equally many each."""
        if count == 1:
            return [self]
        each = self.nbytes // count
        return [
            replace(self, rows=self.rows // count, payload=_part(self.payload, first, first + each))
            for first in range(0, self.nbytes, each)
        ]


@runtime_checkable
class Divisible(Protocol):
    """A payload that is not packed to be divided, nor its parts to be put together."""

    def part(self, first: int, stop: int) -> Packable:
        """Return its bytes from the first to before the last."""
        ...

    def followed_by(self, others: Sequence[Any]) -> Packable:
        """Return it and others one after another."""
        ...


def _part(payload: Any, first: int, stop: int) -> Buffer | Packable:
    """Return some bytes of a payload."""
    if isinstance(payload, Divisible):
        return payload.part(first, stop)
    return _packed(payload)[first:stop]


def joined(payloads: Sequence[Any]) -> Any:
    """Return payloads one after another, as one."""
    if isinstance(payloads[0], Divisible):
        return payloads[0].followed_by(payloads[1:])
    return b"".join(_packed(payload) for payload in payloads)


def _packed(payload: Any) -> memoryview:
    held = payload if isinstance(payload, bytes | bytearray | memoryview) else payload.pack()
    return memoryview(held).cast("B")
