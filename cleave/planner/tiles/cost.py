"""The cost model of wavefront streaming, which predicts the time of one tile on one device."""

from __future__ import annotations

from typing import Final

from cleave.planner.plan import DeviceRates

# Maximum number of strips per side of a tile. With this number, the strip fill is only 3 % of the
# tile's time, and each additional message costs more time than it saves.
MAX_STRIPS: Final = 16
FILL_SHARE: Final = 0.48  # strip fill times strips per side, divided by the tile's time (measured)
PS_BLOCK_S: Final = 3e-4  # seconds for which one block occupies the PS's event loop

# Seconds of the PS's event loop per byte (see `benchmarks.websocket_throughput`).
PS_BYTE_S: Final = 5e-10


def streamed_s(download_s: float, compute_s: float, upload_s: float) -> float:
    """Return the time of one tile in seconds, with infinitely many strips and without latency.

    Once a share f of the download has arrived, a share f^2 of the blocks can be computed. Let
    ``X = max(compute, upload)``. The tile takes ``download`` if ``X <= download / 2``, and
    ``X + download^2 / (4 X)`` otherwise.
    """
    slower = max(compute_s, upload_s)
    if slower <= download_s / 2:
        return download_s
    return slower + download_s**2 / (4 * slower)


def tile_s(device: DeviceRates, download_bytes: float, flops: float, upload_bytes: float) -> float:
    """Return the predicted time of one tile in seconds, with infinitely many strips.

    The time runs from the first byte that the PS sends to the last byte that it receives.
    """
    return 2 * device.latency_s + streamed_s(
        download_bytes / device.downlink_bytes_per_s,
        flops / device.flops_per_s,
        upload_bytes / device.uplink_bytes_per_s,
    )
