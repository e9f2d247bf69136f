"""Counters of a device's work, which the PS and the device derive from exchanged messages."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final


@dataclass(slots=True)
class DeviceCounters:
    """Cumulative counters of the work of one or more devices.

    Subtracting an earlier snapshot gives the work since the snapshot.

    Attributes:
        blocks: number of completed runs: blocks of products, runs of graphs, and fetched arrays.
        flops: number of floating-point operations that produced the counted results.
        downlink_bytes, uplink_bytes: total size of the messages to and from the device, in bytes.
        compute_s: computation time that the device reported, in seconds.
        energy_j: energy in joules from the device's telemetry (`energy_j`); 0 without reports.
        failures: number of runs that failed or returned a malformed result.
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


# The store's columns have the same names.
COUNTER_FIELDS: Final = tuple(field.name for field in fields(DeviceCounters))
