"""The profile of a device: the plain rates an emulated device is driven by."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """Plain rates of one device.

    Attributes:
        name: which device this is.
        flops_per_s: throughput in matrix multiplication.
        downlink_bytes_per_s, uplink_bytes_per_s: PS to device, device to PS.
        latency_s: one way.
        memory_bytes: what the device offers.
    """

    name: str
    flops_per_s: float
    downlink_bytes_per_s: float
    uplink_bytes_per_s: float
    latency_s: float
    memory_bytes: int

    def __post_init__(self) -> None:
        for field in ("flops_per_s", "downlink_bytes_per_s", "uplink_bytes_per_s", "memory_bytes"):
            if not getattr(self, field) > 0:
                raise ValueError(
                    f"{field} of device {self.name!r} is {getattr(self, field)}; "
                    f"it must be above zero"
                )
        if not self.latency_s >= 0:
            raise ValueError(f"latency_s of device {self.name!r} is {self.latency_s}, below zero")
