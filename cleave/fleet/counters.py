"""Counters of a fleet's time and traffic, and the progress of the current training step."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from cleave.scheduler.traffic import Traffic


@dataclass(slots=True)
class FleetCounters:
    """Counters of a fleet since its creation, or between two snapshots if they are subtracted.

    Attributes:
        fleet_s: seconds on the fleet's clock for which training waited for GEMMs or steps by
            stages.
        waited_s: the same in wall seconds.
        verify_s: CPU seconds spent on verifying results.
        traffic: bytes of messages on the wire, by direction and category.
        saved: bytes saved by compression, by direction and category.
        floor_down_bytes, floor_up_bytes: minimum bytes from and to the PS. The minimum counts every
            operand and result of each GEMM once, and `StepWork.floor_bytes` of each step by stages.
        gemms: number of GEMMs started.
        tiles: number of tiles into which the GEMMs were divided.
        blocks: number of result blocks received.
        reissued: number of tasks and stage passes that were repeated or duplicated.
        late: number of results that arrived when they were no longer needed.
        local_gemms: number of GEMMs that the PS computed because no device was available.
        predicted_s: predicted duration of the finished steps by stages, in seconds on the fleet's
            clock.
        planning_s: wall seconds in which training waited for plans of stages.
        audit_s: wall seconds in which training waited for audits of finished steps by stages.
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

    @property
    def downlink_bytes(self) -> int:
        """Return the total bytes of messages from the PS to devices."""
        return self.traffic.down.total

    @property
    def uplink_bytes(self) -> int:
        """Return the total bytes of messages from devices to the PS."""
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

    By tiles, `done` counts started GEMMs. By stages, `done` counts completed tasks: a task is a
    pass of a micro-batch through a stage, or the transfer of a stage's gradients to the PS. `of` is
    0 if unknown.
    """

    done: int
    of: int
