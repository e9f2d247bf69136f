"""The schema of device profiles: measured or published figures for one type of device.

Figures are in SI units unless a field name specifies another unit. Unknown figures are left out. A
table's `source` is the publication or measurement from which its figures come.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import Annotated, Literal

import msgspec

from profiles.availability import Availability
from profiles.performance import ComputeModel, FitReport, Layout, PerformanceModel
from profiles.thermal import ThermalModel

SCHEMA = 1

FlopsPerS = Annotated[float, msgspec.Meta(ge=1e6, le=1e17)]
Watts = Annotated[float, msgspec.Meta(ge=0, le=1e5)]
Text = Annotated[str, msgspec.Meta(min_length=1)]


class DeviceKind(Enum):
    """Kinds of devices."""

    PHONE = "phone"
    TABLET = "tablet"
    LAPTOP = "laptop"
    DESKTOP = "desktop"
    SBC = "sbc"
    SERVER = "server"
    CLOUD_GPU = "cloud-gpu"

    @classmethod
    def named(cls, word: str) -> DeviceKind | None:
        """Return the kind whose value is `word`, such as "phone", or None if no kind has it."""
        return next((kind for kind in cls if kind.value == word), None)


class Origin(Enum):
    """How the figures of a profile were obtained."""

    MEASURED = "measured"
    PUBLISHED = "published"


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base class of the tables in a profile file. Unknown fields are errors."""


class Provenance(_Table, frozen=True):
    """The origin of a profile's figures.

    Attributes:
        date: date of the measurement or of the look-up, such as 2026-11-21.
        notes: measurement conditions and caveats for users of the profile.
        assumed: one line for each unknown figure, with the assumed value and its justification.
    """

    origin: Origin
    source: Text
    date: Annotated[str, msgspec.Meta(pattern=r"^\d{4}-\d{2}-\d{2}$")]
    licence: str = ""
    notes: str = ""
    assumed: tuple[Text, ...] = ()


class Quantiles(_Table, frozen=True):
    """The 10 %, 50 % and 90 % quantiles of a distribution."""

    p10: Annotated[float, msgspec.Meta(ge=0)]
    p50: Annotated[float, msgspec.Meta(ge=0)]
    p90: Annotated[float, msgspec.Meta(ge=0)]

    def __post_init__(self) -> None:
        if not self.p10 <= self.p50 <= self.p90:
            raise ValueError(
                f"quantiles must rise; p10, p50, p90 are {self.p10:g}, {self.p50:g}, {self.p90:g}"
            )

    def at(self, z: float) -> float:
        """Return the value `z` standard deviations above p50. Each side of p50 is log-normal."""
        if self.p10 <= 0:  # log(p10) does not exist, so use a normal distribution instead
            return max(0.0, self.p50 + z / _Z90 * (self.p90 - self.p50))
        side = self.p90 / self.p50 if z > 0 else self.p50 / self.p10
        return float(self.p50 * math.exp(z / _Z90 * math.log(side)))


_Z90 = 1.2815515655446004  # 90 % quantile of the standard normal distribution


class LinkProfile(_Table, frozen=True):
    """A device's network link: goodput (not signalling rate) and round-trip time of small messages.

    Raises:
        ValueError: if a rate is outside 100 to 1e12 bytes/s, or a round trip exceeds 60 s.
    """

    downlink_bytes_per_s: Quantiles
    uplink_bytes_per_s: Quantiles
    round_trip_s: Quantiles
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("downlink_bytes_per_s", "uplink_bytes_per_s"):
            spread: Quantiles = getattr(self, name)
            if not (spread.p10 >= 100 and spread.p90 <= 1e12):
                raise ValueError(
                    f"{name} must be within 100 and 1e12 bytes per second, not {spread.p10:g} to "
                    f"{spread.p90:g}"
                )
        if self.round_trip_s.p90 > 60:
            raise ValueError(
                f"round_trip_s.p90 must be at most 60 seconds, not {self.round_trip_s.p90:g}"
            )


_Sample = tuple[
    Annotated[int, msgspec.Meta(ge=1)],
    Annotated[int, msgspec.Meta(ge=1)],
    Annotated[int, msgspec.Meta(ge=1)],
    Layout,
    Annotated[float, msgspec.Meta(gt=0, le=1e5)],
    Annotated[int, msgspec.Meta(ge=1, le=1000)],
]


class ComputeProfile(_Table, frozen=True):
    """A device's matrix multiplication performance in one dtype.

    Attributes:
        flops_per_s: throughput for large matrices, before the device slows down from heat.
        models: maps a layout to its fitted performance model. If empty, the throughput is
            `flops_per_s` for every shape.
        samples: timed tiles, each as (rows, columns and depth of a block, layout, seconds per
            block, strips per side of the tile).
        fits: maps a layout to the prediction error of its model on held-out samples.
    """

    flops_per_s: FlopsPerS
    source: str = ""
    models: dict[Layout, PerformanceModel] = {}
    samples: tuple[_Sample, ...] = ()
    fits: dict[Layout, FitReport] = {}


class GraphProfile(_Table, frozen=True):
    """A device's throughput when it runs layers as graphs.

    `flops_per_s` counts only the FLOPs of matrix multiplications. ONNX Runtime may be twice as fast
    as the kernels that `ComputeProfile` describes. `bf16_flops_per_s` is the throughput with matrix
    multiplications in bf16; 0 means `flops_per_s`.
    """

    flops_per_s: FlopsPerS
    source: str = ""
    bf16_flops_per_s: Annotated[float, msgspec.Meta(ge=0, le=1e17)] = 0.0

    def in_dtype(self, dtype: str) -> float:
        """Return the throughput in a training run of this dtype."""
        return (self.bf16_flops_per_s if dtype == "bf16" else 0.0) or self.flops_per_s


class MemoryProfile(_Table, frozen=True):
    """The memory that a device offers, and its installed memory (0 if unknown), in bytes."""

    bytes: Annotated[int, msgspec.Meta(ge=2**24, le=10**14)]
    installed_bytes: Annotated[int, msgspec.Meta(ge=0, le=10**14)] = 0
    source: str = ""


class Sustained(_Table, frozen=True):
    """A device's throughput under a load of several minutes.

    Each series is a sequence of pairs (seconds since the start, value), and is empty if the system
    does not report the value.

    Attributes:
        thermal: fitted thermal model; None if the device did not slow down, or the measurement was
            too short to tell.
        speeds: measured speeds, as shares of full speed, to which `thermal` was fitted.
        temperatures: temperatures in degrees Celsius.
    """

    thermal: ThermalModel | None = None
    speeds: tuple[tuple[float, float], ...] = ()
    temperatures: tuple[tuple[float, float], ...] = ()
    source: str = ""


class Power(_Table, frozen=True):
    """A device's power draw in watts. None means unknown.

    Attributes:
        idle_w, compute_w: power of the whole device while idle, and while multiplying matrices.
        radio_w: additional power while sending or receiving data.
        at_wall: True if `idle_w` and `compute_w` include the losses of the charger or power supply.
    """

    idle_w: Watts | None = None
    compute_w: Watts | None = None
    radio_w: Watts | None = None
    source: str = ""
    at_wall: bool = False

    @property
    def active_w(self) -> float | None:
        """Return `compute_w` minus `idle_w` (0 W if unknown); None if `compute_w` is unknown."""
        return None if self.compute_w is None else max(0.0, self.compute_w - (self.idle_w or 0.0))


class Embodied(_Table, frozen=True):
    """A device's embodied carbon in grams of CO2 equivalent, and its lifetime in years."""

    gco2e: Annotated[float, msgspec.Meta(ge=0, le=1e9)]
    lifetime_years: Annotated[float, msgspec.Meta(gt=0, le=50)]
    source: str = ""


class Host(_Table, frozen=True):
    """The machine and the backend (`executor`, on `threads` threads) that measured a profile."""

    cpu: str = ""
    cores: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 1
    threads: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 1
    executor: str = ""
    system: str = ""


class DeviceProfile(_Table, frozen=True):
    """A profile of one type of device.

    Attributes:
        schema: version of the profile schema.
        name: identifier by which fleet files refer to the profile.
        compute: maps a dtype in `DTYPES` to matrix multiplication figures. `bf16>fp32` stands for
            bf16 inputs with an fp32 result.
        year: year of release; 0 if unknown.
        graphs: throughput of layers that run as graphs; None means the same as in `compute`.
        link: network link of the device; None if the fleet file defines the network.
        host: machine on which the profile was measured; None for published profiles.
    """

    schema: Literal[1]
    name: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9.-]*$", max_length=64)]
    title: Text
    kind: DeviceKind
    provenance: Provenance
    compute: Annotated[dict[str, ComputeProfile], msgspec.Meta(min_length=1)]
    memory: MemoryProfile
    year: Annotated[int, msgspec.Meta(ge=0, le=2100)] = 0
    graphs: GraphProfile | None = None
    link: LinkProfile | None = None
    sustained: Sustained | None = None
    power: Power | None = None
    embodied: Embodied | None = None
    availability: Availability | None = None
    host: Host | None = None

    def __post_init__(self) -> None:
        for dtype in self.compute:
            if dtype not in DTYPES:
                raise ValueError(f"compute has the dtype {dtype!r}; use {', '.join(DTYPES)}")

    @property
    def flops_per_s(self) -> float:
        """Return the highest throughput of any dtype, in FLOP/s."""
        return max(entry.flops_per_s for entry in self.compute.values())

    def compute_model(self) -> ComputeModel:
        """Return a model of tile times. Dtypes without fitted models have a constant throughput."""
        return ComputeModel(
            {
                (dtype, layout): model
                for dtype, entry in self.compute.items()
                for layout, model in (
                    entry.models or {Layout.NN: PerformanceModel.saturated(entry.flops_per_s)}
                ).items()
            }
        )


DTYPES = ("fp32", "bf16", "fp16", "bf16>fp32", "fp16>fp32")  # keys of `DeviceProfile.compute`
