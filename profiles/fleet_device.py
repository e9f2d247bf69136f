"""A device of a fleet: its compute and link rates, and how these rates vary over time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from profiles.availability import Availability
    from profiles.performance import ComputeModel
    from profiles.thermal import ThermalModel

_LINKS = ("downlink_bytes_per_s", "uplink_bytes_per_s")
_POSITIVE = ("flops_per_s", *_LINKS, "memory_bytes", "drift_interval_s")
_NOT_NEGATIVE = ("latency_s", "active_power_w", "jitter_s", "drift_sigma")


@dataclass(frozen=True, slots=True)
class SharedBottleneck:
    """A network line that `devices` devices share. The rates are totals for all these devices."""

    name: str
    downlink_bytes_per_s: float
    uplink_bytes_per_s: float
    devices: int = 1

    def __post_init__(self) -> None:
        for field in _LINKS:
            value = getattr(self, field)
            if not value > 0:
                raise ValueError(f"{field} of {self.name!r} must be more than 0, not {value}")


@dataclass(frozen=True, slots=True)
class FleetDevice:
    """A device of a fleet: its compute and link rates, and how these rates vary over time.

    Attributes:
        flops_per_s: matrix multiplication throughput, including the share that the owner uses.
        downlink_bytes_per_s, uplink_bytes_per_s: rates from PS to device and from device to PS.
        latency_s: one-way latency of the link.
        active_power_w: power in watts that multiplication adds to idle power; None if unknown.
        profile: name of the underlying device profile; empty if the device has none.
        compute: model that predicts tile times. None means that every tile runs at `flops_per_s`.
        thermal: model of the slowdown under load; None means no slowdown.
        graph_flops_per_s: throughput for layers that run as graphs; None means `flops_per_s`.
        load: share of the throughput that the device's owner uses; less than 1.
        jitter_s: mean of the exponentially distributed delay that is added to `latency_s`.
        drift_sigma: standard deviation of the logarithm of the drifting link rates.
        drift_hurst: Hurst exponent of the drift. 0.5 is white noise; values near 1 are very
            persistent.
        drift_interval_s: time in seconds for which a drawn link rate stays constant.
        loss: share of lost packets, which `emulator.device_model` emulates as a lower link rate.
        bottleneck: line that the device shares with other devices; None means no shared line.
        availability: times at which the device is available; None means always.

    Raises:
        ValueError: if a number is out of range.
    """

    name: str
    flops_per_s: float
    downlink_bytes_per_s: float
    uplink_bytes_per_s: float
    latency_s: float
    memory_bytes: int
    active_power_w: float | None = None
    profile: str = ""
    compute: ComputeModel | None = None
    thermal: ThermalModel | None = None
    graph_flops_per_s: float | None = None
    load: float = 0.0
    jitter_s: float = 0.0
    drift_sigma: float = 0.0
    drift_hurst: float = 0.8
    drift_interval_s: float = 10.0
    loss: float = 0.0
    bottleneck: SharedBottleneck | None = None
    availability: Availability | None = None

    def __post_init__(self) -> None:
        for field in _POSITIVE:
            value = getattr(self, field)
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(
                    f"{field} of device {self.name!r} must be more than 0, not {value}"
                )
        for field in _NOT_NEGATIVE:
            value = getattr(self, field)
            if value is not None and not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{field} of device {self.name!r} must be 0 or more, not {value}")
        for field, limit in (("load", 1.0), ("loss", 0.5)):
            value = getattr(self, field)
            if not 0 <= value < limit:
                raise ValueError(
                    f"{field} of device {self.name!r} must be at least 0 and less than {limit:g}, "
                    f"not {value}"
                )
        if not 0.5 <= self.drift_hurst < 1:
            raise ValueError(
                f"drift_hurst of device {self.name!r} must be at least 0.5 and less than 1, not "
                f"{self.drift_hurst}"
            )

    @property
    def stated_downlink_bytes_per_s(self) -> float:
        """Return the downlink rate (bytes/s) if all devices on the shared line download at once."""
        line = self.bottleneck
        share = line.downlink_bytes_per_s / line.devices if line else math.inf
        return min(self.downlink_bytes_per_s, share)

    @property
    def stated_uplink_bytes_per_s(self) -> float:
        """Return the uplink rate (bytes/s) if all devices on the shared line upload at once."""
        line = self.bottleneck
        share = line.uplink_bytes_per_s / line.devices if line else math.inf
        return min(self.uplink_bytes_per_s, share)

    @property
    def stated_flops_per_s(self) -> float:
        """Return the matrix multiplication throughput that the device's owner leaves unused."""
        return self.flops_per_s * (1 - self.load)

    @property
    def stated_graph_flops_per_s(self) -> float:
        """Return the graph throughput that the device's owner leaves unused."""
        return (self.graph_flops_per_s or self.flops_per_s) * (1 - self.load)

    @property
    def steady(self) -> bool:
        """Return True if the device is always available and has no jitter, drift or throttling."""
        random = self.jitter_s or self.drift_sigma or self.availability is not None
        return not random and self.thermal is None
