"""Counters of a device's work that PS and device can both derive from the exchanged messages."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final


@dataclass(slots=True)
class DeviceCounters:
    """Cumulative counters of the work of one or more devices; PS and device can both derive them.

    Subtracting an earlier snapshot gives the work since then.

    Attributes:
        blocks: number of requested results that the PS received.
        flops: floating-point operations that computing these results took.
        downlink_bytes, uplink_bytes: bytes of encoded messages to and from the device.
        energy_j: energy in joules from the device's telemetry (`energy_j`); 0 without reports.
        failures: number of runs that failed, or whose result had another form than requested.
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


# The store uses the same names.
COUNTER_FIELDS: Final = tuple(field.name for field in fields(DeviceCounters))
