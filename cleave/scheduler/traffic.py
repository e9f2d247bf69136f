"""Counters of network traffic, one for each kind of message content."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from enum import StrEnum


class TrafficKind(StrEnum):
    """The kind of data in a message. The enum values are the field names of `BytesByKind`."""

    WEIGHTS = "weights"  # parameters of layers that train on devices
    ACTIVATIONS = "activations"  # a micro-batch's layer inputs and outputs, and their gradients
    GRADIENTS = "gradients"  # accumulated weight gradients
    GRAPHS = "graphs"  # layers and losses, exported as ONNX graphs
    TILES = "tiles"  # parts of GEMM operands, and computed output blocks
    OTHER = "other"  # requests and answers without an array, measurements, and session control


@dataclass(slots=True)
class BytesByKind:
    """Encoded message bytes in one direction, with one field per `TrafficKind`."""

    weights: int = 0
    activations: int = 0
    gradients: int = 0
    graphs: int = 0
    tiles: int = 0
    other: int = 0

    @property
    def total(self) -> int:
        """Return the number of bytes of all kinds together."""
        return sum(getattr(self, f.name) for f in fields(self))

    def count(self, kind: TrafficKind, nbytes: int) -> None:
        """Add `nbytes` bytes to the counter of this kind."""
        setattr(self, kind, getattr(self, kind) + nbytes)

    def __add__(self, more: BytesByKind) -> BytesByKind:
        return BytesByKind(*(getattr(self, f.name) + getattr(more, f.name) for f in fields(self)))

    def __sub__(self, earlier: BytesByKind) -> BytesByKind:
        return BytesByKind(
            *(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self))
        )


@dataclass(slots=True)
class Traffic:
    """Encoded message bytes from (`down`) and to (`up`) the PS.

    Subtract two snapshots to get the traffic of a step.
    """

    down: BytesByKind = field(default_factory=BytesByKind)
    up: BytesByKind = field(default_factory=BytesByKind)

    def snapshot(self) -> Traffic:
        """Return a copy of the current counters."""
        return Traffic(replace(self.down), replace(self.up))

    def __add__(self, more: Traffic) -> Traffic:
        return Traffic(self.down + more.down, self.up + more.up)

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(self.down - earlier.down, self.up - earlier.up)
