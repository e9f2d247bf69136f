"""A device's work in figures that both ends can count from their messages."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final


@dataclass(slots=True)
class DeviceCounters:
    """The work of one or more devices; subtract two snapshots to get the work between them.

    Attributes:
        blocks: number of requested results that arrived.
        flops: floating-point operations of these results.
        downlink_bytes, uplink_bytes: bytes of encoded messages, to and from the device.
        compute_s: seconds of computing, as reported by the device.
        energy_j: joules, as reported in its telemetry (`energy_j`); 0 without reports.
        failures: runs that failed, or were answered in another form than requested.
    """

    blocks: int = 0
    flops: float = 0.0
    downlink_bytes: int = 0
    uplink_bytes: int = 0
    compute_s: float = 0.0
    energy_j: float = 0.0
    failures: int = 0

    def __add__(self, more: DeviceCounters) -> DeviceCounters:
        return DeviceCounters(*(getattr(self, n) + getattr(more, n) for n in COUNTER_FIELDS))

    def __sub__(self, earlier: DeviceCounters) -> DeviceCounters:
        return DeviceCounters(*(getattr(self, n) - getattr(earlier, n) for n in COUNTER_FIELDS))


COUNTER_FIELDS: Final = tuple(field.name for field in fields(DeviceCounters))
"""Names of the counters, which the store also uses."""
