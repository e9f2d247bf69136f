"""The profile of a device: the plain rates an emulated device is driven by."""

from __future__ import annotations

import math
from dataclasses import dataclass

_POSITIVE = ("flops_per_s", "downlink_bytes_per_s", "uplink_bytes_per_s", "memory_bytes")


@dataclass(frozen=True, slots=True)
class FleetDevice:
    """Plain rates of one device.

    Attributes:
        name: which device this is.
        flops_per_s: throughput in matrix multiplication.
        downlink_bytes_per_s, uplink_bytes_per_s: PS to device, device to PS.
        latency_s: one way.
        memory_bytes: what the device offers.
        active_power_w: what it draws while it works, above what it draws anyway; None if unknown.
        gco2e_per_kwh: of the grid it draws from; None if unknown.

    Raises:
        ValueError: for a rate that is not above zero; names the field and the value.
    """

    name: str
    flops_per_s: float
    downlink_bytes_per_s: float
    uplink_bytes_per_s: float
    latency_s: float
    memory_bytes: int
    active_power_w: float | None = None
    gco2e_per_kwh: float | None = None

    def __post_init__(self) -> None:
        for field in _POSITIVE:
            value = getattr(self, field)
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(
                    f"{field} of device {self.name!r} is {value}; it must be above zero"
                )
        for field in ("latency_s", "active_power_w", "gco2e_per_kwh"):
            value = getattr(self, field)
            if value is not None and not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{field} of device {self.name!r} is {value}; give 0 or more")
