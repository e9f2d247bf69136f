"""The interface for tile planners: devices, GEMMs, plans, and a tile's cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final, Literal, NamedTuple, Protocol, runtime_checkable

from cleave.gemm import Gemm, Span, Tile, TileCut, cut_tile


class Method(Enum):
    """How a training step uses devices."""

    AUTO = "auto"
    """The method with the shortest predicted step time, chosen again when the fleet changes."""

    TILES = "tiles"
    """Devices compute tiles of each matrix multiplication."""

    STAGES = "stages"
    """Each device runs the forward and backward passes of consecutive layers."""

    LOCAL = "local"
    """The parameter server (PS) trains alone."""

    DILOCO = "diloco"
    """Each device trains the whole model alone for many steps, and then the PS averages their
    weight changes (local updates). This algorithm is not exact, and AUTO never chooses it."""


class StateMode(Enum):
    """Where the layers' weights and optimizer state are stored between steps by stages."""

    SERVER = "server"
    DEVICES = "devices"
    AUTO = "auto"
    """On devices if steps are predicted to be faster; otherwise on the server."""


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """The rates, memory and capabilities of one device, as input to a planner.

    Attributes:
        device: the scheduler's ID of the device.
        flops_per_s: throughput in matrix multiplication.
        latency_s: one-way latency in seconds, the same in both directions.
        dtypes: protocol names of the matrix dtypes that the device can multiply.
        codes_downlink, codes_uplink: whether floating-point payloads are compressed in that
            direction (see `cleave.planner.coding`).
        graph_flops_per_s: throughput in layer graphs; 0 means `flops_per_s`.
        graph_bf16_flops_per_s: throughput in layer graphs whose matrix products may be in bf16; 0
            means `graph_flops_per_s`.
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
    graph_bf16_flops_per_s: float = 0.0

    def for_graphs(self, dtype: str = "fp32") -> DeviceRates:
        """Return a copy of these rates with `flops_per_s` set to the throughput in layer graphs.

        Args:
            dtype: dtype of the training run.
        """
        found = self.graph_flops_per_s
        if dtype == "bf16":
            found = self.graph_bf16_flops_per_s or found
        return replace(
            self,
            flops_per_s=found or self.flops_per_s,
            graph_flops_per_s=0.0,
            graph_bf16_flops_per_s=0.0,
        )

    def down_bytes(self, plain_bytes: float, coded_ratio: float) -> float:
        """Return the size of a payload on the downlink in bytes, after any compression."""
        return plain_bytes * coded_ratio if self.codes_downlink else plain_bytes

    def up_bytes(self, plain_bytes: float, coded_ratio: float) -> float:
        """Return the size of a payload on the uplink in bytes, after any compression."""
        return plain_bytes * coded_ratio if self.codes_uplink else plain_bytes

    def request_s(self, activation_bytes: float, flops: float) -> float:
        """Return the time in seconds between sending a pass's input and receiving its output.

        The input and the output of the pass are `activation_bytes` bytes each.
        """
        moved_s = activation_bytes / self.downlink_bytes_per_s
        moved_s += activation_bytes / self.uplink_bytes_per_s
        return moved_s + flops / self.flops_per_s + 2 * self.latency_s


@dataclass(frozen=True, slots=True)
class PsRates:
    """The rates and memory of the parameter server (PS), as input to a planner.

    Attributes:
        egress_bytes_per_s, ingress_bytes_per_s: rates at which the network card sends and receives.
        memory_bytes: memory for partial sums that cannot be added yet, because the partial sums of
            a lower depth are missing.
        block_s: time in seconds that the PS's event loop spends on one received block.
        byte_s: time in seconds that the event loop spends on each byte sent or received.
    """

    egress_bytes_per_s: float = math.inf
    ingress_bytes_per_s: float = math.inf
    memory_bytes: float = math.inf
    block_s: float = 0.0
    byte_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ElementBytes:
    """Bytes per element of operands (`sent`), finished blocks and partial sums."""

    sent: int
    finished: int
    partial: int = 4


HeldSide = Literal["", "a", "b"]
"""The operand whose strips devices already hold; empty if devices hold neither operand."""


class GemmKind(Enum):
    """What a GEMM in a training step computes."""

    FORWARD = "forward"
    INPUT_GRADIENT = "input-gradient"
    WEIGHT_GRADIENT = "weight-gradient"


@dataclass(frozen=True, slots=True)
class StepGemm:
    """A GEMM that each of ``count`` Linear modules of the same shape needs in a training step.

    Attributes:
        count: number of layers that contain the Linear; 1 for a Linear outside the layers.
        name: name of the Linear, such as "fc1".
        after_sibling: whether a Linear of the same shape and with the same input is computed
            earlier in the same pass.
    """

    kind: GemmKind
    gemm: Gemm
    count: int
    name: str
    after_sibling: bool = False

    @property
    def held(self) -> HeldSide:
        """Return the operand that devices still hold from an earlier sibling; empty if neither."""
        if not self.after_sibling or self.kind is GemmKind.INPUT_GRADIENT:
            return ""
        return "a" if self.kind is GemmKind.FORWARD else "b"

    @property
    def submission(self) -> tuple[str, bool, int]:
        """Return a key that is equal for GEMMs that training submits to the fleet together.

        The two gradients of a Linear are submitted together, because neither depends on the other.
        """
        return self.name, self.kind is GemmKind.FORWARD, self.count

    @property
    def flops(self) -> int:
        """Return the FLOPs of all ``count`` occurrences together."""
        return self.gemm.flops * self.count


ALIGN: Final = 4  # alignment of strip boundaries inside a large tile, from the tile's start
ALIGNED_FROM: Final = 64  # smallest number of rows, and of columns, of a large tile


class EvenCut(NamedTuple):
    """A tile, and the numbers of row strips and column strips into which `cut` divides it.

    Strips of one side have nearly equal sizes. They are created only on demand, because a plan for
    ten thousand devices has millions of strips, and most plans are never executed.
    """

    tile: Tile
    rows: int
    columns: int

    @property
    def align(self) -> int:
        """Return the alignment of strip boundaries: `ALIGN` for a large tile, otherwise 1."""
        return ALIGN if min(self.tile.m.size, self.tile.n.size) >= ALIGNED_FROM else 1

    def cut(self) -> TileCut:
        return cut_tile(self.tile, self.rows, self.columns, align=self.align)


class PlannedTile(NamedTuple):
    """A tile, its device and its predicted cost.

    Attributes:
        device: the scheduler's ID of the device.
        download_bytes, upload_bytes: payload sizes without message headers.
        time_s: predicted time in seconds from the first byte that the PS sends to the last byte
            that the PS receives, with infinitely many strips.
        fill_s: time in seconds that the actual, finite number of strips adds.
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
        """Return the memory for all strips and blocks of the tile on the device, in bytes."""
        return self.download_bytes + self.upload_bytes


@dataclass(frozen=True, slots=True)
class Region:
    """A rectangle of C in which all elements are sums over the same number of depth slabs.

    With 1 slab, devices return finished blocks, not partial sums. See docs/planner.md.
    """

    m: Span
    n: Span
    slabs: int
    devices: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of one GEMM.

    Attributes:
        tiles: tiles that cover the index space M x N x K exactly once. The tiles of one device are
            in sending order.
        makespan_s: predicted time of the GEMM in seconds, with infinitely many strips.
        fill_s: predicted time in seconds that the actual, finite number of strips adds.
        bound_s: lower bound on the time of any plan with one tile per device; 0 if unknown.
        regions: the regions that C is divided into; empty for a plan that reuses operands.
        columns_cut_n: True if the columns of the layout divide n, and the rows of a slab divide m;
            False for the reverse.
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
    """Tiles that cover a GEMM exactly once, some of whose operands devices already hold.

    Attributes:
        tiles: maps a device ID to the device's tile, with the cuts of the strips.
        held_bytes: maps a device ID to the size in bytes of the operands that it already holds.
    """

    tiles: Mapping[int, TileCut] = field(default_factory=dict)
    held_bytes: Mapping[int, int] = field(default_factory=dict)


class Planner(Protocol):
    """Interface for planners that divide a GEMM into tiles for a fleet."""

    def plan(
        self,
        gemm: Gemm,
        element: ElementBytes,
        devices: Sequence[DeviceRates],
        residencies: Sequence[Residency] = (),
    ) -> Plan:
        """Return a plan that divides one GEMM into tiles for devices.

        Args:
            gemm: the GEMM. Each dimension is at least 1.
            devices: devices of the fleet, at least one. The plan may leave some devices idle.
            residencies: sets of tiles whose operands devices already hold. The plan reuses one
                of these sets if that shortens the predicted time.

        Raises:
            PlanError: if no device has enough memory for a tile.
        """
        ...


@runtime_checkable
class PartPlanner(Protocol):
    """A planner that can also plan part of a GEMM quickly."""

    def plan_part(self, gemm: Gemm, element: ElementBytes, devices: Sequence[DeviceRates]) -> Plan:
        """Return a plan for a lost device's unfinished work, given as a separate GEMM.

        Implementations must be fast, because the whole GEMM waits for this part.

        Raises:
            PlanError: if no device has enough memory for a tile.
        """
        ...


def tile_download_bytes(tile: Tile, element: ElementBytes) -> int:
    return (tile.m.size + tile.n.size) * tile.k.size * element.sent


def tile_upload_bytes(tile: Tile, gemm: Gemm, element: ElementBytes) -> int:
    each = element.partial if tile.is_partial(gemm) else element.finished
    return tile.m.size * tile.n.size * each


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
