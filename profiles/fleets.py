"""Built-in fleets."""

from __future__ import annotations

import numpy as np

from profiles.device_profile import DeviceProfile


def paper_fleet(devices: int) -> list[DeviceProfile]:
    """The published fleet, `paper-N` (design, section 4): laptop class, no latency.

    One vector of N uniform draws each, in this order: compute 5-7 TFLOP/s, uplink 5-10 and downlink
    10-100 (1e6 bytes/s), memory 1-3 GB; `numpy.random.default_rng(42)`.

    Raises:
        ValueError: when `devices` is below 1.
    """
    if devices < 1:
        raise ValueError(f"a fleet of {devices} devices is empty; ask for 1 or more")
    rng = np.random.default_rng(42)
    compute = rng.uniform(5e12, 7e12, devices)
    uplink = rng.uniform(5e6, 10e6, devices)
    downlink = rng.uniform(10e6, 100e6, devices)
    memory = rng.uniform(1e9, 3e9, devices)
    return [
        DeviceProfile(
            name=f"paper-{i}",
            flops_per_s=float(compute[i]),
            downlink_bytes_per_s=float(downlink[i]),
            uplink_bytes_per_s=float(uplink[i]),
            latency_s=0.0,
            memory_bytes=int(memory[i]),
        )
        for i in range(devices)
    ]
