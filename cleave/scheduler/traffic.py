"""Counters of network traffic in bytes, by direction and kind of data."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Self


@dataclass(slots=True)
class Sums:
    """Base class of dataclasses of counters. The operators `+` and `-` work field by field."""

    def __add__(self, more: Self) -> Self:
        return type(self)(*(getattr(self, f.name) + getattr(more, f.name) for f in fields(self)))

    def __sub__(self, earlier: Self) -> Self:
        return type(self)(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))


class TrafficKind(StrEnum):
    """The kind of data in a message. The enum values are the field names of `BytesByKind`."""

    WEIGHTS = "weights"  # parameters of layers that train on devices
    ACTIVATIONS = "activations"  # a micro-batch's layer inputs and outputs, and their gradients
    GRADIENTS = "gradients"  # accumulated weight gradients
    GRAPHS = "graphs"  # layers and losses, exported as ONNX graphs
    TILES = "tiles"  # parts of GEMM operands, and computed output blocks
    OTHER = "other"  # requests and answers without an array, measurements, and session control


@dataclass(slots=True)
class BytesByKind(Sums):
    """Total encoded size of the messages in one direction, in bytes, for each `TrafficKind`."""

    weights: int = 0
    activations: int = 0
    gradients: int = 0
    graphs: int = 0
    tiles: int = 0
    other: int = 0

    @property
    def total(self) -> int:
        """Return the total number of bytes of all kinds of data."""
        return sum(getattr(self, f.name) for f in fields(self))

    def count(self, kind: TrafficKind, nbytes: int) -> None:
        """Add `nbytes` to the counter for `kind`."""
        setattr(self, kind, getattr(self, kind) + nbytes)


@dataclass(slots=True)
class Traffic(Sums):
    """Total encoded size of the messages from (`down`) and to (`up`) the PS, in bytes.

    To get a step's traffic, subtract a snapshot taken before the step from one taken after it.
    """

    down: BytesByKind = field(default_factory=BytesByKind)
    up: BytesByKind = field(default_factory=BytesByKind)

    def snapshot(self) -> Traffic:
        """Return a copy of the current counters."""
        return Traffic(replace(self.down), replace(self.up))
