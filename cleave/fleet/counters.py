"""Counters of a fleet, and the progress of the current step."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from cleave.scheduler.traffic import Traffic


@dataclass(slots=True)
class FleetCounters:
    """A fleet's counters since its creation; subtract two snapshots for a step.

    Attributes:
        fleet_s: seconds on the fleet's clock (virtual or wall) during which the training thread
            waited for GEMMs or a step by stages.
        waited_s: the same wait in wall seconds.
        verify_s: CPU seconds spent on checking results.
        traffic: bytes of encoded messages, by category.
        saved: bytes saved by compression, by category.
        floor_down_bytes, floor_up_bytes: bytes if every operand and result of every GEMM were sent
            once, plus `StepWork.floor_bytes` of steps by stages.
        gemms, tiles, blocks: planned GEMMs, their tiles, and returned blocks.
        reissued: tasks and stage passes repeated because a device was lost, late or failed.
        late: answers that were no longer awaited.
        local_gemms: GEMMs multiplied on the PS because no device was available.
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

    @property
    def downlink_bytes(self) -> int:
        """Return the total bytes from the PS to devices."""
        return self.traffic.down.total

    @property
    def uplink_bytes(self) -> int:
        """Return the total bytes from devices to the PS."""
        return self.traffic.up.total

    def __add__(self, more: FleetCounters) -> FleetCounters:
        return FleetCounters(
            **{f.name: getattr(self, f.name) + getattr(more, f.name) for f in fields(self)}
        )

    def __sub__(self, earlier: FleetCounters) -> FleetCounters:
        return FleetCounters(
            **{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)}
        )


@dataclass(frozen=True, slots=True)
class StepProgress:
    """Progress of a training step.

    Attributes:
        done: tasks begun or done: multiplications begun; by stages, micro-batch passes and stages
            whose gradients are at the PS.
        of: number of all tasks; 0 if unknown.
    """

    done: int
    of: int
