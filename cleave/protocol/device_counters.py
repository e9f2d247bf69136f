"""What a device did, in figures that both ends can count from the messages between them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final


@dataclass(slots=True)
class DeviceCounters:
    """What a device did, or several together; subtract two snapshots for what was done between.

    Attributes:
        blocks: results that were asked for and came.
        flops: floating-point operations of these results.
        downlink_bytes, uplink_bytes: encoded messages, to the device and from it.
        compute_s: seconds of computing, as the device states them.
        energy_j: joules, as its telemetry states them (`energy_j`); 0 where it does not.
        failures: runs that it could not do, or answered in another form than was asked for.
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
"""The counters' names, which the store uses as well."""
