"""The wavefront-streaming cost model: how long one tile takes on one device."""

from __future__ import annotations

from typing import Final

from cleave.planner.plan import DeviceRates

MAX_STRIPS: Final = 16
"""Most strips a side; beyond it the fill is below 3 % and messages cost more than they save."""

FILL_SHARE: Final = 0.48
"""Of a tile's time divided by its strips a side: what finitely many strips add (measured)."""

PS_BLOCK_S: Final = 3e-4
"""What one block costs the PS (decode, assemble, account), in seconds of its one event loop."""

PS_BYTE_S: Final = 5e-10
"""What one byte sent or received costs it: 2 GB/s, as `benchmarks.websocket_throughput` finds."""


def streamed_s(download_s: float, compute_s: float, upload_s: float) -> float:
    """Return the seconds of a tile in the limit of many strips, without latency.

    Design, section 4: after a share f of the download, f^2 of the products are ready, so with
    ``X = max(compute, upload)`` the tile takes ``download`` when ``X <= download / 2``, else
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
