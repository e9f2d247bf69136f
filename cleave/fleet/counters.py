"""What a fleet did since it was made, and how far the step under way is."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from cleave.scheduler.traffic import Traffic


@dataclass(slots=True)
class FleetCounters:
    """Counts what the fleet did since it was made; subtract two snapshots for a step.

    Attributes:
        fleet_s: seconds on the fleet's clock (virtual or wall) during which the training thread
            waited for GEMMs or a step by stages.
        waited_s: wall seconds during which it did.
        verify_s: processor seconds spent on checking results.
        traffic: bytes of encoded messages, by what they are for.
        saved: bytes that these would have been more without coding, likewise.
        floor_down_bytes, floor_up_bytes: bytes if every operand and every result of every GEMM were
            sent once, and of steps by stages what `StepWork.floor_bytes` says.
        gemms, tiles, blocks: planned GEMMs, their tiles, and blocks that came back.
        reissued: tasks given out again because a device was lost or failed, and passes of stages.
        late: answers that nobody waited for any more.
        local_gemms: GEMMs multiplied on the PS because no device was there.
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
        """Return the bytes of all messages from the PS to devices."""
        return self.traffic.down.total

    @property
    def uplink_bytes(self) -> int:
        """Return the bytes of all messages from devices to the PS."""
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
    """How far a training step is.

    Attributes:
        done: tasks: multiplications that were begun; by stages, passes of micro-batches through
            stages, and stages whose gradients are here.
        of: how many there are; 0 if that is not known yet.
    """

    done: int
    of: int
