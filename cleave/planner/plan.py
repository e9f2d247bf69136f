"""The planner's interface: what it is given and what it returns."""

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
    """What the planner knows about one device.

    Attributes:
        device: the scheduler's id of the device.
        downlink_bytes_per_s, uplink_bytes_per_s: PS to device, device to PS.
        flops_per_s: throughput in matrix multiplication.
        graph_flops_per_s: throughput in layers that are graphs; 0 means `flops_per_s`.
        latency_s: one way, taken equal in both directions.
        memory_bytes: what strips and blocks may occupy.
        dtypes: what it can multiply, as the protocol names them.
        codes_downlink, codes_uplink: whether floating-point payloads travel coded that way; see
            `cleave.planner.coding`.
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
        """Return the same rates with the throughput that it has in graphs."""
        if not self.graph_flops_per_s:
            return self
        return replace(self, flops_per_s=self.graph_flops_per_s, graph_flops_per_s=0.0)

    def down_bytes(self, plain_bytes: float, coded_ratio: float) -> float:
        """Return what of a payload passes its downlink.

        Args:
            plain_bytes: the payload's size.
            coded_ratio: its coded size over that.
        """
        return plain_bytes * coded_ratio if self.codes_downlink else plain_bytes

    def up_bytes(self, plain_bytes: float, coded_ratio: float) -> float:
        """Return what of a payload passes its uplink; see `down_bytes`."""
        return plain_bytes * coded_ratio if self.codes_uplink else plain_bytes

    def unit_s(self, activation_bytes: float, flops: float) -> float:
        """Return how long a unit of a stage takes by itself: an activation comes, and one goes."""
        moved_s = activation_bytes / self.downlink_bytes_per_s
        moved_s += activation_bytes / self.uplink_bytes_per_s
        return moved_s + flops / self.flops_per_s + 2 * self.latency_s


@dataclass(frozen=True, slots=True)
class PsRates:
    """What the planner knows about the parameter server.

    Attributes:
        egress_bytes_per_s, ingress_bytes_per_s: its network card, each direction.
        memory_bytes: for partial sums that wait for lower ones of their elements.
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
    """Bytes per element of the operands as sent, of a finished block, and of a partial sum."""

    sent: int
    finished: int
    partial: int = 4


ALIGN: Final = 4
"""Inner boundaries of strips lie on multiples of it,"""

ALIGNED_FROM: Final = 64
"""where both sides of the tile are so long."""


class EvenCut(NamedTuple):
    """A tile and the number of strips on each side; it is cut only when `cut` is called.

    A plan for ten thousand devices has millions of strips, and most plans are only compared.
    """

    tile: Tile
    rows: int
    columns: int

    @property
    def align(self) -> int:
        """Return the number of which inner boundaries of strips are multiples."""
        return ALIGN if min(self.tile.m.size, self.tile.n.size) >= ALIGNED_FROM else 1

    def cut(self) -> TileCut:
        """Cut the tile into strips."""
        return cut_tile(self.tile, self.rows, self.columns, align=self.align)


class PlannedTile(NamedTuple):
    """A tile, the device that gets it, and what it is predicted to cost.

    Attributes:
        device: the scheduler's id.
        strips: the tile and how it is cut.
        download_bytes, upload_bytes: without message headers.
        time_s: from the first byte sent to the last byte back, in the limit of many strips.
        fill_s: what the finite number of strips adds.
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
        """Return the most memory that the tile occupies: all its strips and all its blocks."""
        return self.download_bytes + self.upload_bytes


@dataclass(frozen=True, slots=True)
class Region:
    """Neighbouring columns of C that are cut in depth into equally many slabs (docs/planner.md).

    Attributes:
        m, n: the part of C.
        slabs: how many; 1 where devices return finished blocks.
        devices: how many share it.
    """

    m: Span
    n: Span
    slabs: int
    devices: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Tiles that cover M x N x K exactly once; a device's tiles are in the order it gets them.

    Attributes:
        makespan_s: predicted, strip fill left out.
        fill_s: what strip fill adds to it.
        bound_s: the isolated bound of the whole fleet; 0 if it was not computed.
        regions: how C is divided; empty for a plan that follows the arrays that devices hold.
        columns_cut_n: the columns divide n and the rows of a slab m; if False, the reverse.
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
    """The part of a GEMM's operands that devices hold already, as the tiles that would reuse it.

    Attributes:
        tiles: by device, the box of the index space whose operand it holds, cut into strips as
            they are held. Together the tiles cover the GEMM exactly once.
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
            element: bytes per element.
            devices: the fleet, at least one device; the plan may leave some idle.
            residencies: covers that reuse what devices hold; used if predicted faster.

        Raises:
            PlanError: when no tile fits any device.
        """
        ...


@runtime_checkable
class PartPlanner(Protocol):
    """A planner that can also plan a part of a GEMM quickly."""

    def plan_part(self, gemm: Gemm, element: ElementBytes, devices: Sequence[DeviceRates]) -> Plan:
        """Plan what a lost device left undone, quickly, because the other devices wait for it.

        Args:
            gemm: the part, of positive sides.
            element: bytes per element.
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
