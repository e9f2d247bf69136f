"""Counters of a fleet's time and traffic, and the progress of the current training step."""

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


@dataclass(slots=True)
class FleetCounters(Sums):
    """Cumulative counters of a fleet. Subtract two snapshots to get the counts between them.

    Attributes:
        fleet_s: total time that training spent waiting for GEMMs or steps by stages, in seconds on
            the fleet's clock.
        waited_s: total time of these waits on the wall clock, in seconds.
        verify_s: CPU time spent on verifying results, in seconds.
        traffic: size of the messages on the wire in bytes, by direction and category.
        saved: number of bytes saved by compression, by direction and category.
        floor_down_bytes, floor_up_bytes: minimum number of bytes that the PS must send and receive:
            each GEMM's operands and result, and `StepWork.floor_bytes` of each step by stages.
        tiles: number of tiles into which the GEMMs were divided.
        blocks: number of completed runs of devices, as in `DeviceCounters`.
        reissued: number of tasks and stage passes that were reassigned or duplicated.
        late: number of results that arrived too late to be used.
        local_gemms: number of GEMMs that the PS computed because no device was available, or to
            finish a step.
        predicted_s: total predicted duration of the completed steps by stages, in seconds on the
            fleet's clock.
        planning_s: wall-clock time, in seconds, that training spent waiting for stage plans.
        audit_s: wall-clock time, in seconds, that training spent waiting for audits of steps by
            stages.
        loss_s: wall-clock time, in seconds, that the PS spent on the loss and on its own layers in
            steps by stages. Devices may work at the same time.
        sums_s: wall-clock time, in seconds, that the PS spent on reading and adding the gradients
            that steps by stages returned.
    """

    fleet_s: float = 0.0
    waited_s: float = 0.0
    verify_s: float = 0.0
    traffic: Traffic = field(default_factory=Traffic)
    saved: Traffic = field(default_factory=Traffic)
    floor_down_bytes: int = 0
    floor_up_bytes: int = 0
    gemms: int = 0
    tiles: int = 0
    blocks: int = 0
    reissued: int = 0
    late: int = 0
    local_gemms: int = 0
    predicted_s: float = 0.0
    planning_s: float = 0.0
    audit_s: float = 0.0
    loss_s: float = 0.0
    sums_s: float = 0.0

    @property
    def downlink_bytes(self) -> int:
        """Return the total size of all messages from the PS to devices, in bytes."""
        return self.traffic.down.total

    @property
    def uplink_bytes(self) -> int:
        """Return the total size of all messages from devices to the PS, in bytes."""
        return self.traffic.up.total


@dataclass(frozen=True, slots=True)
class StepProgress:
    """The number of completed tasks and of all tasks (0 if unknown) in a training step.

    Without stages, a started GEMM counts as a completed task. In a step by stages, a task is
    a pass of a micro-batch through a stage, or the transfer of a stage's gradients to the PS.
    """

    done: int
    of: int
