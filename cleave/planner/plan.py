"""The planner's interface: what it is given and what it returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cleave.gemm import Gemm, Tile, TileCut


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """What the planner knows of one device.

    Attributes:
        device: the dispatcher's id of it.
        downlink_bytes_per_s, uplink_bytes_per_s: PS to device, device to PS.
        flops_per_s: throughput in matrix multiplication.
        latency_s: one way, taken equal in both directions.
        memory_bytes: what strips and blocks may occupy.
        dtypes: what it can multiply, as the protocol names it.
    """

    device: int
    downlink_bytes_per_s: float
    uplink_bytes_per_s: float
    flops_per_s: float
    latency_s: float = 0.0
    memory_bytes: int = 2**30
    dtypes: tuple[str, ...] = ("fp32", "bf16", "fp16")


@dataclass(frozen=True, slots=True)
class ElementBytes:
    """Bytes per element: of what is sent, of a finished block, of a partial sum."""

    sent: int
    finished: int
    partial: int = 4


@dataclass(frozen=True, slots=True)
class PlannedTile:
    """A tile, the device that gets it, and what it is predicted to cost."""

    device: int
    cut: TileCut
    download_bytes: int
    upload_bytes: int
    time_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """Tiles that cover M x N x K exactly once; a device's tiles are in the order it gets them."""

    gemm: Gemm
    tiles: tuple[PlannedTile, ...]
    makespan_s: float


@dataclass(frozen=True, slots=True)
class Residency:
    """Which part of the GEMM's operands devices hold already, as the tiles that would reuse it.

    Attributes:
        tiles: by device, the box of the index space whose resident operand it holds, with cuts
            equal to the strips as they are held. Together they cover the GEMM exactly once.
        held_bytes: by device, bytes of the tile's operands that need no download.
    """

    tiles: Mapping[int, TileCut] = field(default_factory=dict)
    held_bytes: Mapping[int, int] = field(default_factory=dict)


class Planner(Protocol):
    """Chooses the tiles of a GEMM for a fleet."""

    def plan(
        self,
        gemm: Gemm,
        element: ElementBytes,
        devices: Sequence[DeviceRates],
        residencies: Sequence[Residency] = (),
    ) -> Plan:
        """Plan one GEMM.

        Args:
            gemm: the work, of positive sides.
            element: bytes per element.
            devices: the fleet, at least one device; the plan may leave some idle.
            residencies: covers that reuse what devices hold; taken where predicted faster.

        Raises:
            PlanError: when no tile fits any device.
        """
        ...


def tile_download_bytes(tile: Tile, element: ElementBytes) -> int:
    return (tile.m.size + tile.n.size) * tile.k.size * element.sent


def tile_upload_bytes(tile: Tile, gemm: Gemm, element: ElementBytes) -> int:
    each = element.partial if tile.is_partial(gemm) else element.finished
    return tile.m.size * tile.n.size * each
