"""The planner's interface: its inputs (devices, GEMMs) and its plans."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final, NamedTuple, Protocol, runtime_checkable

from cleave.gemm import Gemm, Span, Tile, TileCut, cut_tile


class Method(Enum):
    """How devices take part in a training step."""

    AUTO = "auto"
    """The method with the shortest forecast; forecast again when the fleet changes."""

    TILES = "tiles"
    """Devices compute tiles of single matrix products."""

    STAGES = "stages"
    """Devices train whole layers for a step."""

    LOCAL = "local"
    """The parameter server (PS) trains alone."""


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """The planner's view of one device.

    Attributes:
        device: the scheduler's id of the device.
        downlink_bytes_per_s, uplink_bytes_per_s: PS to device, device to PS.
        flops_per_s: throughput in matrix multiplication.
        graph_flops_per_s: throughput in layer graphs; 0 means `flops_per_s`.
        latency_s: one-way latency, the same in both directions.
        memory_bytes: memory budget for strips and blocks.
        dtypes: dtypes that the device can multiply, as the protocol names them.
        codes_downlink, codes_uplink: whether floating-point payloads are compressed in that
            direction; see `cleave.planner.coding`.
    """

    device: int
    downlink_bytes_per_s: float
    uplink_bytes_per_s: float
    flops_per_s: float
    latency_s: float = 0.0
    memory_bytes: int = 2**30
    dtypes: tuple[str, ...] = ("fp32", "bf16", "fp16")
    codes_downlink: bool = False
    codes_uplink: bool = False
    graph_flops_per_s: float = 0.0

    @property
    def for_graphs(self) -> DeviceRates:
        """Return the same rates with the device's throughput in graphs as `flops_per_s`."""
        if not self.graph_flops_per_s:
            return self
        return replace(self, flops_per_s=self.graph_flops_per_s, graph_flops_per_s=0.0)

    def down_bytes(self, plain_bytes: float, coded_ratio: float) -> float:
        """Return the bytes of a payload on the downlink.

        Args:
            plain_bytes: size of the payload without compression.
            coded_ratio: compressed size over plain size.
        """
        return plain_bytes * coded_ratio if self.codes_downlink else plain_bytes

    def up_bytes(self, plain_bytes: float, coded_ratio: float) -> float:
        """Return the bytes of a payload on the uplink; see `down_bytes`."""
        return plain_bytes * coded_ratio if self.codes_uplink else plain_bytes

    def unit_s(self, activation_bytes: float, flops: float) -> float:
        """Return the seconds of one micro-batch pass: receive, compute and return an activation."""
        moved_s = activation_bytes / self.downlink_bytes_per_s
        moved_s += activation_bytes / self.uplink_bytes_per_s
        return moved_s + flops / self.flops_per_s + 2 * self.latency_s


@dataclass(frozen=True, slots=True)
class PsRates:
    """The planner's view of the parameter server.

    Attributes:
        egress_bytes_per_s, ingress_bytes_per_s: rates of the network card in each direction.
        memory_bytes: memory for partial sums that wait for the sums of lower depth.
        block_s: seconds of its event loop for one block (decode, assemble, account).
        byte_s: seconds of its event loop for one byte sent or received.
    """

    egress_bytes_per_s: float = math.inf
    ingress_bytes_per_s: float = math.inf
    memory_bytes: float = math.inf
    block_s: float = 0.0
    byte_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ElementBytes:
    """Bytes per element of sent operands, of finished blocks and of partial sums."""

    sent: int
    finished: int
    partial: int = 4


ALIGN: Final = 4
"""Inner boundaries of strips are multiples of `ALIGN`, on large tiles."""

ALIGNED_FROM: Final = 64
"""A tile is large if both of its sides are at least this long."""


class EvenCut(NamedTuple):
    """A tile and the number of strips on each side; the strips are made by `cut`.

    A plan for ten thousand devices has millions of strips, and most plans are only compared.
    """

    tile: Tile
    rows: int
    columns: int

    @property
    def align(self) -> int:
        """Return the alignment of inner strip boundaries, counted from the tile's start."""
        return ALIGN if min(self.tile.m.size, self.tile.n.size) >= ALIGNED_FROM else 1

    def cut(self) -> TileCut:
        return cut_tile(self.tile, self.rows, self.columns, align=self.align)


class PlannedTile(NamedTuple):
    """A tile, its device and its predicted cost.

    Attributes:
        device: the scheduler's id of the device.
        strips: the tile and its cuts.
        download_bytes, upload_bytes: traffic without message headers.
        time_s: from the first byte sent to the last byte back, in the limit of many strips.
        fill_s: extra time because the number of strips is finite.
    """

    device: int
    strips: TileCut | EvenCut
    download_bytes: int
    upload_bytes: int
    time_s: float
    fill_s: float = 0.0

    @property
    def tile(self) -> Tile:
        return self.strips.tile

    @property
    def cut(self) -> TileCut:
        return self.strips.cut() if isinstance(self.strips, EvenCut) else self.strips

    @property
    def memory_bytes(self) -> int:
        """Return the peak memory of the tile: all its strips and all its blocks."""
        return self.download_bytes + self.upload_bytes


@dataclass(frozen=True, slots=True)
class Region:
    """Neighbouring columns of C that are cut in depth into equally many slabs (docs/planner.md).

    Attributes:
        m, n: the part of C.
        slabs: number of slabs; 1 when devices return finished blocks.
        devices: number of devices that share the region.
    """

    m: Span
    n: Span
    slabs: int
    devices: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Tiles that cover M x N x K exactly once; the tiles of a device are in sending order.

    Attributes:
        makespan_s: predicted seconds without strip fill.
        fill_s: predicted seconds of strip fill.
        bound_s: the isolated bound of the whole fleet; 0 if it was not computed.
        regions: how C is divided; empty for a plan that reuses operands on devices.
        columns_cut_n: True if columns divide n and the rows of a slab divide m; False if reversed.
    """

    gemm: Gemm
    tiles: tuple[PlannedTile, ...]
    makespan_s: float
    fill_s: float = 0.0
    bound_s: float = 0.0
    regions: tuple[Region, ...] = ()
    columns_cut_n: bool = True

    @property
    def egress_bytes(self) -> int:
        return sum(t.download_bytes for t in self.tiles)

    @property
    def ingress_bytes(self) -> int:
        return sum(t.upload_bytes for t in self.tiles)

    @property
    def devices_used(self) -> int:
        return len({t.device for t in self.tiles})


@dataclass(frozen=True, slots=True)
class Residency:
    """The operands of a GEMM that devices hold already, as the tiles that would reuse them.

    Attributes:
        tiles: by device, the box of the index space whose operands it holds, with the cuts of the
            held strips. Together the tiles cover the GEMM exactly once.
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
            gemm: the GEMM, of positive sides.
            devices: the fleet, at least one device; the plan may leave some idle.
            residencies: covers that reuse what devices hold; used if predicted faster.

        Raises:
            PlanError: when no tile fits any device.
        """
        ...


@runtime_checkable
class PartPlanner(Protocol):
    """A planner that can also plan part of a GEMM quickly."""

    def plan_part(self, gemm: Gemm, element: ElementBytes, devices: Sequence[DeviceRates]) -> Plan:
        """Plan the work of a lost device quickly, because the other devices wait for it.

        Args:
            gemm: the part, of positive sides.
            devices: the devices that remain, at least one.

        Raises:
            PlanError: when no tile fits any device.
        """
        ...


def tile_download_bytes(tile: Tile, element: ElementBytes) -> int:
    return (tile.m.size + tile.n.size) * tile.k.size * element.sent


def tile_upload_bytes(tile: Tile, gemm: Gemm, element: ElementBytes) -> int:
    each = element.partial if tile.is_partial(gemm) else element.finished
    return tile.m.size * tile.n.size * each
