"""What crosses the network, counted by what it is for."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from enum import StrEnum


class TrafficKind(StrEnum):
    """What a message carries; the values name the fields of `BytesByKind`."""

    WEIGHTS = "weights"
    """Parameters of layers that devices train."""

    ACTIVATIONS = "activations"
    """What layers are called with and return for a micro-batch, and the gradients of that."""

    GRADIENTS = "gradients"
    """Sums of weight gradients."""

    GRAPHS = "graphs"
    """Layers and losses as graphs."""

    TILES = "tiles"
    """Parts of operands, and blocks of their products."""

    OTHER = "other"
    """Orders and answers without an array, measurements, and all that keeps a session going."""


@dataclass(slots=True)
class BytesByKind:
    """Bytes of encoded messages one way; the fields are those of `TrafficKind`."""

    weights: int = 0
    activations: int = 0
    gradients: int = 0
    graphs: int = 0
    tiles: int = 0
    other: int = 0

    @property
    def total(self) -> int:
        """Return the bytes of all kinds together."""
        return sum(getattr(self, f.name) for f in fields(self))

    def count(self, kind: TrafficKind, nbytes: int) -> None:
        """Add a message of so many bytes."""
        setattr(self, kind, getattr(self, kind) + nbytes)

    def __add__(self, more: BytesByKind) -> BytesByKind:
        return BytesByKind(*(getattr(self, f.name) + getattr(more, f.name) for f in fields(self)))

    def __sub__(self, earlier: BytesByKind) -> BytesByKind:
        return BytesByKind(
            *(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self))
        )


@dataclass(slots=True)
class Traffic:
    """Bytes of encoded messages, PS to devices and back; subtract two snapshots for a step."""

    down: BytesByKind = field(default_factory=BytesByKind)
    up: BytesByKind = field(default_factory=BytesByKind)

    def snapshot(self) -> Traffic:
        """Return the counters as they are now."""
        return Traffic(replace(self.down), replace(self.up))

    def __add__(self, more: Traffic) -> Traffic:
        return Traffic(self.down + more.down, self.up + more.up)

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(self.down - earlier.down, self.up - earlier.up)
