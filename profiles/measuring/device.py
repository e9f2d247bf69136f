"""Measure a device profile of this machine, for `cleave profile device`."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np

from cleave.arrays import DType
from cleave.machine import sensors as machine
from cleave.machine.backends import MatmulBackend
from cleave.machine.graph_choice import GraphChoice
from cleave.machine.sensors import PowerMeter, Sensors
from profiles import device_profile as schema
from profiles.measuring.gemm_timer import REPEATS, Bench, Clock, Shape, TileTimer
from profiles.performance import Layout, TimedTile, fit_and_judge
from profiles.thermal import fit_thermal

# Regular sides are multiples of one of these numbers: planners prefer them, and kernels are fast.
_ALIGNMENTS: Final = (4, 8, 16, 32, 48)
_LEAST_SAMPLES: Final = 15  # minimum number of samples per model, however short the time limit


@dataclass(frozen=True, slots=True)
class SampleGrid:
    """Numbers and size ranges of the shapes to measure.

    Attributes:
        regular: number of shapes whose sides are multiples of 4, 8, 16, 32 or 48.
        sides, depths: minimum and maximum of the rows and columns, and of the depth.
    """

    regular: int = 100
    irregular: int = 40
    sides: tuple[int, int] = (8, 1536)
    depths: tuple[int, int] = (16, 4096)

    @property
    def elements(self) -> int:
        """Return the maximum total number of elements of a shape's two operands."""
        return 2 * self.sides[1] * self.depths[1]

    def shapes(self, rng: np.random.Generator, volume: float) -> list[Shape]:
        """Draw shapes log-uniformly, each of at most max(64^3, `volume`) multiply-adds."""
        found: list[Shape] = []
        while len(found) < self.regular + self.irregular:
            aligned = len(found) < self.regular
            a, b = (self._side(rng, *self.sides, aligned=aligned) for _ in range(2))
            c = self._side(rng, *self.depths, aligned=aligned)
            if a * b * c <= max(64**3, volume):
                found.append((a, b, c))
        return [found[i] for i in rng.permutation(len(found))]

    @staticmethod
    def _side(rng: np.random.Generator, low: int, high: int, *, aligned: bool) -> int:
        side = round(math.exp(rng.uniform(math.log(low), math.log(high))))
        if aligned:
            width = int(rng.choice(_ALIGNMENTS))
            side = max(1, round(side / width)) * width
        return min(high, max(low, side))


@dataclass(frozen=True, slots=True)
class Variant:
    """A pair of dtypes: the dtype of both operands, and the dtype of the result."""

    dtype: DType
    out: DType

    @property
    def name(self) -> str:
        """Return the key of `DeviceProfile.compute` for this variant, such as `bf16>fp32`."""
        return self.dtype.value if self.dtype is self.out else f"{self.dtype.value}>fp32"


QUICK_VARIANTS: Final = (
    Variant(DType.FP32, DType.FP32),
    Variant(DType.BF16, DType.BF16),
    Variant(DType.BF16, DType.FP32),
)
ALL_VARIANTS: Final = (
    *QUICK_VARIANTS,
    Variant(DType.FP16, DType.FP16),
    Variant(DType.FP16, DType.FP32),
)
QUICK_LAYOUTS: Final = (Layout.NN, Layout.NT, Layout.TN)


def measure_samples(
    timer: TileTimer,
    variant: Variant,
    layout: Layout,
    grid: SampleGrid,
    seconds: float,
    rng: np.random.Generator,
    clock: Clock = time.perf_counter,
) -> list[TimedTile]:
    """Time all shapes of a grid in turn, round after round, until `seconds` have passed.

    Other shapes run between two repetitions of a shape, as in training. Each sample is the median
    of a shape's tile times. Large shapes that would take over 0.5 % of `seconds` are not drawn. At
    least 15 shapes are measured, even if they take longer than `seconds`.
    """

    def block_s(shape: Shape, strips: int) -> float:
        return timer.block_s(shape, strips, layout, variant.dtype, variant.out)

    began_s = clock()
    pace_s = min(block_s((128, 128, 128), 1) for _ in range(REPEATS)) / 128**3
    volume = seconds / 200 / max(pace_s, 1e-15)
    shapes = grid.shapes(rng, volume)
    tiles = [
        (shape, strips if strips**2 * math.prod(shape) <= volume else 1)
        for shape, strips in zip(shapes, itertools.cycle(timer.strips), strict=False)
    ]
    took_s: list[list[float]] = []
    for number in itertools.count():
        place = number % len(tiles)
        if len(took_s) >= _LEAST_SAMPLES and clock() - began_s > seconds:
            break
        if number == place:
            took_s.append([])
        took_s[place].append(block_s(*tiles[place]))
    samples = []
    for (shape, strips), times in zip(tiles, took_s, strict=False):
        # The first run of a shape may build kernels, so leave it out. The clock may be too coarse
        # for a small tile, so the result is at least 1e-8 s.
        typical_s = max(statistics.median(times[1:] or times), 1e-8)
        samples.append(TimedTile(*shape, layout, float(f"{typical_s:.4g}"), strips))
    return samples


def fitted(samples: Sequence[TimedTile], source: str = "") -> schema.ComputeProfile:
    """Fit one performance model per layout and measure each model's error on held-out samples.

    Raises:
        ValueError: if a layout has too few samples, or scipy is missing.
    """
    models, fits = {}, {}
    for layout in dict.fromkeys(s.layout for s in samples):
        of_layout = [s for s in samples if s.layout is layout]
        models[layout], fits[layout] = fit_and_judge(of_layout)
    return schema.ComputeProfile(
        flops_per_s=max(2 * s.a * s.b * s.c / s.seconds for s in samples),
        source=source,
        models=models,
        samples=tuple((s.a, s.b, s.c, s.layout, s.seconds, s.strips) for s in samples),
        fits=fits,
    )


_FITTED_FROM_S: Final = 60.0  # minimum duration of a run for a thermal model to be fitted
_LARGEST_CUBE: Final = 1024  # maximum rows, columns and depth of the multiplied tile
_RESTS_AT_MOST_S: Final = 90.0


def measure_sustained(
    bench: Bench,
    seconds: float,
    sensors: Sensors,
    meter: PowerMeter | None = None,
    progress: Callable[[float], None] | None = None,
) -> schema.Sustained:
    """Multiply a large fp32 tile repeatedly, and record speed and temperature.

    The run is divided into about 60 windows, or fewer if it is shorter than 15 s. In each window,
    the sensors and the meter are read, and `progress` is called with the elapsed time in seconds.
    """
    side = _side_for(bench)
    order = bench.order(side, side, side, Layout.NN, DType.FP32, DType.FP32)
    window_s = max(0.25, seconds / 60)
    began_s = bench.clock()
    rates: list[tuple[float, float]] = []
    temperatures: list[tuple[float, float]] = []
    while bench.clock() - began_s < seconds or len(rates) < 3:
        if meter is not None:
            meter.sample()
        busy_s, count = 0.0, 0
        while busy_s < window_s:
            busy_s += bench.once(order)
            count += 1
        at_s = round(bench.clock() - began_s, 3)
        rates.append((at_s, count / busy_s))
        if (temperature_c := sensors.temperature_c()) is not None:
            temperatures.append((at_s, temperature_c))
        if progress is not None:
            progress(min(at_s, seconds))
    if meter is not None:
        meter.sample()
    found = [rate for _, rate in rates]
    full = max(statistics.median(found[:3]), float(np.quantile(found, 0.9)))  # while cool
    return _with_thermal(
        schema.Sustained(
            speeds=tuple((at_s, round(rate / full, 4)) for at_s, rate in rates),
            temperatures=tuple(temperatures),
            source=f"{side} x {side} x {side} in fp32, repeatedly",
        )
    )


def _with_thermal(sustained: schema.Sustained) -> schema.Sustained:
    """Return a copy with `thermal` set to a fitted model, or to None for short or steady runs."""
    long = sustained.speeds[-1][0] >= _FITTED_FROM_S
    thermal = fit_thermal(sustained.speeds) if long else None
    return msgspec.structs.replace(sustained, thermal=thermal)


def _side_for(bench: Bench) -> int:
    """Return n, from 128 to `_LARGEST_CUBE`, such that an n x n x n tile takes about 0.02 s."""
    once_s = bench.seconds(bench.order(256, 256, 256, Layout.NN, DType.FP32, DType.FP32))
    side = float(256 * (0.02 / max(once_s, 1e-9)) ** (1 / 3))
    return min(_LARGEST_CUBE, max(128, round(side / 16) * 16))


def _rest(
    bench: Bench,
    sensors: Sensors,
    before_c: float | None,
    sustained: schema.Sustained,
    sleep: Callable[[float], None],
) -> None:
    """Let the device cool to about `before_c`. Wait up to 90 s, but at most half the run's time."""
    ran_s = sustained.speeds[-1][0]
    slowed = sustained.speeds[-1][1] < 0.97
    until_s = bench.clock() + min(_RESTS_AT_MOST_S, ran_s / 2)
    while bench.clock() < until_s:
        now_c = sensors.temperature_c()
        if now_c is None or before_c is None:
            if not slowed:
                return
        elif now_c <= before_c + 3:
            return
        sleep(1.0)


Progress = Callable[[str, float], None]  # takes the current measurement and the elapsed seconds

_IDLE_S: Final = 3.0
_ASSUMED_MEMORY_BYTES: Final = 10**9


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of `measure_device`.

    Attributes:
        date: date of the measurement, such as 2026-11-21.
        quick: True to measure only the most common dtypes and layouts.
        grid_s: total duration of the tile time measurements for all shapes, dtypes and layouts.
        sustained_s: duration of the measurement under sustained load; 0 skips it.
        kind: kind of device. None means a laptop if the machine has a battery, else a desktop.
        memory_bytes: memory that the device offers; 0 means half of the installed memory.
        threads: number of threads of the backend; 0 means one thread per core.
        seed: seed for the shapes and the matrix elements.
    """

    name: str
    title: str
    date: str
    quick: bool = False
    grid_s: float = 240.0
    sustained_s: float = 180.0
    kind: schema.DeviceKind | None = None
    memory_bytes: int = 0
    threads: int = 0
    seed: int = 0
    grid: SampleGrid = field(default_factory=SampleGrid)

    @property
    def variants(self) -> Sequence[Variant]:
        return QUICK_VARIANTS if self.quick else ALL_VARIANTS

    @property
    def layouts(self) -> Sequence[Layout]:
        """Return the layouts to measure. A quick measurement leaves out `Layout.TT`."""
        return QUICK_LAYOUTS if self.quick else tuple(Layout)

    @property
    def total_s(self) -> float:
        """Return the approximate duration of `measure_device` in seconds."""
        return self.grid_s + self.sustained_s


def measure_device(
    settings: Settings,
    backend: MatmulBackend,
    progress: Progress = lambda _what, _seconds: None,
    *,
    clock: Clock = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
    sensors: Sensors | None = None,
    timer: TileTimer | None = None,
    graphs: Callable[[DType | None], float] | None = None,
) -> schema.DeviceProfile:
    """Measure this machine for about `settings.total_s` seconds and return its device profile.

    Args:
        backend: matrix multiplication backend, already set to `settings.threads` threads.
        timer: measures the tile times of all shapes. None means `backend` in this process.
        graphs: measures the FLOP/s of layers that run as graphs, with matrix products in fp32
            (None) or in a 16-bit dtype; returns 0 if graphs cannot run. `GraphChoice` by default.

    Raises:
        ValueError: if a performance model cannot be fitted (for example because scipy is
            missing).
    """
    here, sensors = machine.this_machine(), sensors or Sensors()
    rng = np.random.default_rng(settings.seed)
    elements = max(settings.grid.elements, 2 * _LARGEST_CUBE**2)
    bench = Bench(backend, elements, clock, rng)
    assumed: list[str] = []
    over_s = 0.0

    idle, busy = PowerMeter(sensors, clock), PowerMeter(sensors, clock)
    if idle.available:
        progress("power when idle", over_s)
        for _ in range(4):
            idle.sample()
            sleep(_IDLE_S / 3)
    sustained = None
    if settings.sustained_s:  # the first measurement, while the machine is cool
        before_c = sensors.temperature_c()
        sustained = measure_sustained(
            bench, settings.sustained_s, sensors, busy, lambda s: progress("sustained run", s)
        )
        over_s += settings.sustained_s
        _rest(bench, sensors, before_c, sustained, sleep)
        if sustained.speeds[-1][0] < _FITTED_FROM_S:
            assumed.append(
                f"sustained.thermal: a run of {settings.sustained_s:g} s is too short to show "
                f"throttling; the device is assumed never to slow down"
            )
    compute = _measure_grid(
        timer or bench,
        clock,
        settings,
        rng,
        lambda what, s: progress(what, over_s + s),
        f"measured, {backend.name}",
    )
    progress("a layer's graph", over_s + settings.grid_s)
    in_graphs, in_bf16 = map(graphs or GraphChoice().flops_per_s, (None, DType.BF16))
    kind = settings.kind
    if kind is None:
        kind = schema.DeviceKind.LAPTOP if here.has_battery else schema.DeviceKind.DESKTOP
        why = {
            True: "it has a battery",
            False: "it has no battery",
            None: "it is unknown whether it has a battery",
        }
        assumed.append(f"kind: {kind.value}, because {why[here.has_battery]}")
    power = None
    if busy.watts is not None:
        power = schema.Power(idle_w=idle.watts, compute_w=busy.watts, source=busy.source)
    return schema.DeviceProfile(
        schema=1,
        name=settings.name,
        title=settings.title,
        kind=kind,
        provenance=schema.Provenance(
            origin=schema.Origin.MEASURED,
            source="cleave profile device" + (" --quick" if settings.quick else ""),
            date=settings.date,
            assumed=tuple(assumed + _memory_assumption(settings, here)),
        ),
        compute=compute,
        memory=_memory(settings, here),
        graphs=schema.GraphProfile(
            float(f"{in_graphs:.4g}"), "measured, a layer's graph", float(f"{in_bf16:.4g}")
        )
        if in_graphs
        else None,
        sustained=sustained,
        power=power,
        host=schema.Host(
            cpu=here.cpu,
            cores=here.cores,
            threads=settings.threads or here.cores,
            executor=backend.name,
            system=here.system,
        ),
    )


def refit(profile: schema.DeviceProfile) -> schema.DeviceProfile:
    """Return a copy of the profile whose models are fitted again to the stored samples.

    Raises:
        ValueError: if the profile has too few samples, or SciPy is not installed.
    """
    if not any(entry.samples for entry in profile.compute.values()):
        raise ValueError(
            f"profile {profile.name!r} has no samples for a fit; "
            f"measure samples with: cleave profile device"
        )
    compute = {}
    for dtype, entry in profile.compute.items():
        samples = [TimedTile(*sample) for sample in entry.samples]
        compute[dtype] = fitted(samples, entry.source) if samples else entry
    sustained = profile.sustained
    if sustained is not None and sustained.speeds:
        sustained = _with_thermal(sustained)
    return msgspec.structs.replace(profile, compute=compute, sustained=sustained)


def _measure_grid(
    timer: TileTimer,
    clock: Clock,
    settings: Settings,
    rng: np.random.Generator,
    progress: Progress,
    source: str,
) -> dict[str, schema.ComputeProfile]:
    pairs = [(v, layout) for v in settings.variants for layout in settings.layouts]
    samples: dict[str, list[TimedTile]] = {}
    began_s = clock()
    for done, (variant, layout) in enumerate(pairs):
        progress(f"{variant.name} {layout.value}", settings.grid_s * done / len(pairs))
        left_s = settings.grid_s - (clock() - began_s)
        share_s = max(0.1 * settings.grid_s, left_s) / (len(pairs) - done)
        found = measure_samples(timer, variant, layout, settings.grid, share_s, rng, clock)
        samples.setdefault(variant.name, []).extend(found)
    return {name: fitted(found, source) for name, found in samples.items()}


def _memory(settings: Settings, here: machine.Machine) -> schema.MemoryProfile:
    installed = here.memory_bytes or 0
    offered = settings.memory_bytes or installed // 2 or _ASSUMED_MEMORY_BYTES
    return schema.MemoryProfile(bytes=offered, installed_bytes=installed, source="the system")


def _memory_assumption(settings: Settings, here: machine.Machine) -> list[str]:
    if settings.memory_bytes:
        return []
    known = (
        "half of the installed memory" if here.memory_bytes else "1 GB; installed memory unknown"
    )
    return [f"memory.bytes: {known}; what the owner would offer is unknown"]


def valid_name(text: str) -> str:
    """Convert a string, such as a host name, to a valid profile name."""
    kept = "".join(c if c.isascii() and (c.isalnum() or c in ".-") else "-" for c in text.lower())
    return kept.strip(".-")[:64] or "device"
