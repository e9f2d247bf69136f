"""The device profile: measured or published figures for one type of device.

A profile is a TOML file, read and written by `profiles.profile_file`. The classes here are its
schema. Figures are in SI units unless a name says otherwise. Unknown figures are left out;
`Provenance.assumed` lists those that had to be assumed to emulate the device.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import Annotated, Literal

import msgspec

from profiles.availability import Availability
from profiles.performance import ComputeModel, FitReport, Layout, PerformanceModel, TimedTile
from profiles.thermal import ThermalModel

SCHEMA = 1

FlopsPerS = Annotated[float, msgspec.Meta(ge=1e6, le=1e17)]
BytesPerS = Annotated[float, msgspec.Meta(ge=100, le=1e12)]
Watts = Annotated[float, msgspec.Meta(ge=0, le=1e5)]
Text = Annotated[str, msgspec.Meta(min_length=1)]


class DeviceKind(Enum):
    """The kind of device."""

    PHONE = "phone"
    TABLET = "tablet"
    LAPTOP = "laptop"
    DESKTOP = "desktop"
    SBC = "sbc"
    SERVER = "server"
    CLOUD_GPU = "cloud-gpu"

    @classmethod
    def named(cls, word: str) -> DeviceKind | None:
        """Return the kind named `word`; None if there is no such kind."""
        return next((kind for kind in cls if kind.value == word), None)


class Origin(Enum):
    """How the figures of a profile were obtained."""

    MEASURED = "measured"
    PUBLISHED = "published"


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A table of a profile file; unknown fields are rejected and values are checked."""


class Provenance(_Table, frozen=True):
    """The origin of a profile.

    Attributes:
        origin: measured with `cleave profile device`, or published by others.
        source: who measured or published it; each table of figures may name its own source.
        date: date of measurement or look-up, such as 2026-11-21.
        licence: licence of the published figures.
        notes: conditions that users should know.
        assumed: one line for each unknown figure, with the assumption and its reason.
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

    @classmethod
    def exactly(cls, value: float) -> Quantiles:
        """Return quantiles that all equal `value`."""
        return cls(value, value, value)

    def at(self, z: float) -> float:
        """Return the value at `z` standard deviations: two half log-normals around p50."""
        if self.p10 <= 0:  # has no logarithm, so use a half normal
            return max(0.0, self.p50 + z / _Z90 * (self.p90 - self.p50))
        side = self.p90 / self.p50 if z > 0 else self.p50 / self.p10
        return float(self.p50 * math.exp(z / _Z90 * math.log(side)))


_Z90 = 1.2815515655446004  # 90 % quantile of the standard normal distribution


class LinkProfile(_Table, frozen=True):
    """A link as its device sees it: goodput, not signalling rate.

    Attributes:
        downlink_bytes_per_s, uplink_bytes_per_s: rates from PS to device and from device to PS.
        round_trip_s: round-trip time of a small message.
        source: source of these figures.

    Raises:
        ValueError: for rates below 100 bytes/s or above 1e12, or round trips above a minute.
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
                    f"{name} spans {spread.p10:g} to {spread.p90:g}; "
                    f"give bytes per second, from 100 to 1e12"
                )
        if self.round_trip_s.p90 > 60:
            raise ValueError(
                f"round_trip_s.p90 is {self.round_trip_s.p90:g}; give seconds, at most 60"
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
    """Matrix multiplication in one dtype.

    Attributes:
        flops_per_s: throughput at saturation and full speed.
        source: source of these figures.
        models: fitted models by layout; without any, the throughput is the same at every shape.
        samples: samples that the models were fitted to: rows, columns, depth, layout, seconds, and
            strips per side of the tile.
        fits: prediction error of each model on held-out samples.
    """

    flops_per_s: FlopsPerS
    source: str = ""
    models: dict[Layout, PerformanceModel] = {}
    samples: tuple[_Sample, ...] = ()
    fits: dict[Layout, FitReport] = {}

    def measured(self, layout: Layout) -> list[TimedTile]:
        """Return the samples of one layout."""
        return [TimedTile(*sample) for sample in self.samples if sample[3] is layout]


class GraphProfile(_Table, frozen=True):
    """Layers as graphs, run by ONNX Runtime in fp32 (`profiles.measuring.graphs`).

    Its kernels differ from those of the products in `ComputeProfile` and may be twice as fast.

    Attributes:
        flops_per_s: throughput, counting products only.
        source: source of this figure.
    """

    flops_per_s: FlopsPerS
    source: str = ""


class MemoryProfile(_Table, frozen=True):
    """The memory that a device may use for strips and blocks.

    Attributes:
        bytes: memory offered, not memory installed.
        installed_bytes: memory installed; 0 if unknown.
        source: source of these figures.
    """

    bytes: Annotated[int, msgspec.Meta(ge=2**24, le=10**14)]
    installed_bytes: Annotated[int, msgspec.Meta(ge=0, le=10**14)] = 0
    source: str = ""


class Sustained(_Table, frozen=True):
    """A device's throughput over minutes under load.

    Attributes:
        thermal: the fitted model; None for a device that never slowed down.
        speeds: measurements that the model was fitted to: seconds since the start, share of the
            full speed.
        temperatures: seconds since the start, degrees Celsius, if the system reports them.
        frequencies: seconds since the start, Hz, if the system reports them.
        source: source of these figures.
    """

    thermal: ThermalModel | None = None
    speeds: tuple[tuple[float, float], ...] = ()
    temperatures: tuple[tuple[float, float], ...] = ()
    frequencies: tuple[tuple[float, float], ...] = ()
    source: str = ""


class Power(_Table, frozen=True):
    """The power that a device draws; None where unknown.

    Attributes:
        idle_w, compute_w: power of the whole device while idle and while multiplying.
        radio_w: additional power while sending or receiving.
        source: source of these figures.
        at_wall: whether `idle_w` and `compute_w` were measured at the socket and so include losses
            of the charger or power supply.
    """

    idle_w: Watts | None = None
    compute_w: Watts | None = None
    radio_w: Watts | None = None
    source: str = ""
    at_wall: bool = False

    @property
    def active_w(self) -> float | None:
        """Return the power of multiplying above idle, in watts; None if unknown."""
        return None if self.compute_w is None else max(0.0, self.compute_w - (self.idle_w or 0.0))


class Embodied(_Table, frozen=True):
    """The carbon of making the device, and its lifetime."""

    gco2e: Annotated[float, msgspec.Meta(ge=0, le=1e9)]
    lifetime_years: Annotated[float, msgspec.Meta(gt=0, le=50)]
    source: str = ""


class Host(_Table, frozen=True):
    """The measured machine, as it describes itself."""

    cpu: str = ""
    cores: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 1
    threads: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 1
    executor: str = ""
    system: str = ""


class DeviceProfile(_Table, frozen=True):
    """A profile of one type of device.

    Attributes:
        schema: version of this schema.
        name: name in fleet files.
        title: name shown to people.
        kind: the kind of device.
        year: year of release; 0 if unknown.
        provenance: origin of the figures.
        compute: figures by dtype, with the protocol's names; `bf16>fp32` for results in fp32.
        memory: memory of the device.
        graphs: throughput in graphs; None means the throughput in products.
        link: the device's link; None if the fleet defines its network.
        sustained, power, embodied, availability: further figures; None if unknown.
        contention: slowdown of a tile with 1, 2, ... processes multiplying at once, each on one
            thread; empty if unknown.
        host: the machine of a measured profile.
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
    contention: tuple[Annotated[float, msgspec.Meta(ge=0.5, le=10_000)], ...] = ()
    host: Host | None = None

    def __post_init__(self) -> None:
        for dtype in self.compute:
            if dtype not in DTYPES:
                raise ValueError(f"compute has the dtype {dtype!r}; use {', '.join(DTYPES)}")

    @property
    def flops_per_s(self) -> float:
        """Return the stated throughput in FLOP/s: the maximum over all dtypes."""
        return max(entry.flops_per_s for entry in self.compute.values())

    def compute_model(self) -> ComputeModel:
        """Return the performance models by dtype and layout."""
        models = {}
        for dtype, entry in self.compute.items():
            fitted = entry.models or {Layout.NN: PerformanceModel.saturated(entry.flops_per_s)}
            models.update({(dtype, layout): model for layout, model in fitted.items()})
        return ComputeModel(models)


DTYPES = ("fp32", "bf16", "fp16", "bf16>fp32", "fp16>fp32")
"""Dtypes for which a profile may have figures."""
