"""The wavefront-streaming cost model: the time of one tile on one device."""

from __future__ import annotations

from typing import Final

from cleave.planner.plan import DeviceRates

MAX_STRIPS: Final = 16
"""Maximum strips a side; above it fill is below 3 % and messages cost more than they save."""

FILL_SHARE: Final = 0.48
"""Strip fill as a share of a tile's time divided by its strips a side (measured)."""

PS_BLOCK_S: Final = 3e-4
"""Seconds of the PS's event loop for one block (decode, assemble, account)."""

PS_BYTE_S: Final = 5e-10
"""Seconds of it for one byte sent or received: 2 GB/s (`benchmarks.websocket_throughput`)."""


def streamed_s(download_s: float, compute_s: float, upload_s: float) -> float:
    """Return the seconds of a tile in the limit of many strips, without latency.

    After a share f of the download, f^2 of the products are ready (design, section 4). With
    ``X = max(compute, upload)``, the tile takes ``download`` if ``X <= download / 2``, else
    ``X + download^2 / (4 X)``.
    """
    slower = max(compute_s, upload_s)
    if slower <= download_s / 2:
        return download_s
    return slower + download_s**2 / (4 * slower)


def tile_s(device: DeviceRates, download_bytes: float, flops: float, upload_bytes: float) -> float:
    """Return the predicted seconds from the first byte sent to the last byte back, without fill."""
    return 2 * device.latency_s + streamed_s(
        download_bytes / device.downlink_bytes_per_s,
        flops / device.flops_per_s,
        upload_bytes / device.uplink_bytes_per_s,
    )
