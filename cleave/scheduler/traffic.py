"""Network traffic, counted by what it carries."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from enum import StrEnum


class TrafficKind(StrEnum):
    """What a message carries. The values are the field names of `BytesByKind`."""

    WEIGHTS = "weights"
    """Parameters of layers that train on devices."""

    ACTIVATIONS = "activations"
    """A micro-batch's inputs and outputs of layers, and their gradients."""

    GRADIENTS = "gradients"
    """Accumulated weight gradients."""

    GRAPHS = "graphs"
    """Layers and losses, as graphs."""

    TILES = "tiles"
    """Parts of operands, and blocks of their products."""

    OTHER = "other"
    """Orders and answers without an array, measurements, and session control."""


@dataclass(slots=True)
class BytesByKind:
    """Bytes of encoded messages in one direction, one field per `TrafficKind`."""

    weights: int = 0
    activations: int = 0
    gradients: int = 0
    graphs: int = 0
    tiles: int = 0
    other: int = 0

    @property
    def total(self) -> int:
        """Return the total bytes of all kinds."""
        return sum(getattr(self, f.name) for f in fields(self))

    def count(self, kind: TrafficKind, nbytes: int) -> None:
        """Add a message of `nbytes` bytes."""
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
        """Return a copy of the current counters."""
        return Traffic(replace(self.down), replace(self.up))

    def __add__(self, more: Traffic) -> Traffic:
        return Traffic(self.down + more.down, self.up + more.up)

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(self.down - earlier.down, self.up - earlier.up)
