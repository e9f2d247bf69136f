"""Measuring this machine as a device: what `cleave profile device` does.

Multiplications are timed with the very code that tiles run through: an order of the device's core,
its arrays as bytes that came over a socket, an executor, and the block packed for sending.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

import msgspec
import numpy as np

from cleave import arrays
from cleave.arrays import DType
from cleave.device import contention, machine
from cleave.device.core import Array, Compute
from cleave.device.executors import Executor, execute
from cleave.device.machine import PowerMeter, Sensors
from profiles import device_profile as schema
from profiles.performance import Layout, Sample, fit_and_judge
from profiles.thermal import fit_thermal

Clock = Callable[[], float]
Shape = tuple[int, int, int]
Progress = Callable[[str, float], None]
"""Called with what is being done, and how many of the estimated seconds are over."""

_ALIGNMENTS: Final = (4, 8, 16, 32, 48)  # of regular sides: what planners cut at, and kernels like
_LEAST_SAMPLES: Final = 15  # of a model, however short the time
_ENOUGH_S: Final = 0.02
_REPEATS: Final = 3
_FITTED_FROM_S: Final = 60.0  # a shorter sustained run shows no heating
_RESTS_AT_MOST_S: Final = 90.0
_IDLE_S: Final = 3.0
_ASSUMED_MEMORY_BYTES: Final = 10**9
_LARGEST_CUBE: Final = 1024  # side of the tile of a sustained run


class TileTimer(Protocol):
    """Times tiles as a device computes them."""

    @property
    def strips(self) -> Sequence[int]:
        """How many strips a side its tiles may have."""
        ...

    def block_s(self, shape: Shape, strips: int, layout: Layout, dtype: DType, out: DType) -> float:
        """Mean seconds of a block of a tile, see `Sample`.

        Args:
            shape: rows, columns, depth of a block.
            strips: how many the tile has, a side; one of `strips`.
            layout, dtype, out: of the product.
        """
        ...


class Bench:
    """Times tiles on an executor in this process (a `TileTimer`).

    A device process has other things in its caches when a tile comes, and its tiles take longer,
    small ones twice as long; `cleave.transport.tile_timer` times those.

    Args:
        executor: what multiplies.
        elements: the most that both inputs of a tile have together.
        clock: in seconds.
        rng: of the numbers that are multiplied.
    """

    def __init__(
        self,
        executor: Executor,
        elements: int,
        clock: Clock = time.perf_counter,
        rng: np.random.Generator | None = None,
    ) -> None:
        self.strips = (1,)
        self.executor, self.clock = executor, clock
        rng = rng or np.random.default_rng(0)
        self._numbers = rng.standard_normal(elements, np.float32)
        self._bytes: dict[DType, memoryview] = {}

    def order(self, a: int, b: int, c: int, layout: Layout, dtype: DType, out: DType) -> Compute:
        """The order for an a x c by c x b product, its operands stored as `layout` says."""
        transpose_a, transpose_b = (letter == "t" for letter in layout.value)
        left = self._array(0, (c, a) if transpose_a else (a, c), dtype)
        right = self._array(a * c, (b, c) if transpose_b else (c, b), dtype)
        return Compute(1, [(left, right)], transpose_a, transpose_b, a, b, out, 2 * a * b * c)

    def _array(self, first: int, shape: tuple[int, int], dtype: DType) -> Array:
        if dtype not in self._bytes:
            self._bytes[dtype] = arrays.narrow(self._numbers, dtype).view(np.uint8).data
        begin, nbytes = first * dtype.itemsize, shape[0] * shape[1] * dtype.itemsize
        return Array(*shape, dtype, self._bytes[dtype][begin : begin + nbytes], nbytes)

    def once(self, order: Compute) -> float:
        """Seconds of one multiplication, the block ready to be sent at the end.

        Its operands are new in memory, as those of a tile are that came over a socket: products of
        operands that were multiplied a moment ago are up to a third faster.
        """
        pairs = [(_as_received(left), _as_received(right)) for left, right in order.pairs]
        arrived = replace(order, pairs=pairs)
        began_s = self.clock()
        execute(self.executor, arrived).pack()
        return self.clock() - began_s

    def block_s(self, shape: Shape, strips: int, layout: Layout, dtype: DType, out: DType) -> float:
        """See `TileTimer.block_s`; its tiles are one block each."""
        return self.once(self.order(*shape, layout, dtype, out))

    def seconds(self, order: Compute, enough_s: float = _ENOUGH_S) -> float:
        """The median of several: three at least, and `enough_s` together. After one for warming."""
        took = [self.once(order)]
        if took[0] < enough_s:  # what a long one loses by starting cold is nothing
            took.clear()
        while len(took) < _REPEATS or sum(took) < enough_s:
            took.append(self.once(order))
        return statistics.median(took)


def _as_received(array: Array) -> Array:
    return replace(array, payload=bytes(array.payload))


# --- multiplication over a grid of shapes ---


@dataclass(frozen=True, slots=True)
class Grid:
    """Which shapes are measured.

    Attributes:
        regular: how many with sides that are multiples of 4 to 48.
        irregular: how many with any sides.
        sides, depths: smallest and largest.
    """

    regular: int = 100
    irregular: int = 40
    sides: tuple[int, int] = (8, 1536)
    depths: tuple[int, int] = (16, 4096)

    @property
    def elements(self) -> int:
        """The most that the inputs of one shape have."""
        return 2 * self.sides[1] * self.depths[1]

    def shapes(self, rng: np.random.Generator, volume: float) -> list[Shape]:
        """Shapes spread evenly on a log scale, in random order.

        Args:
            rng: draws them.
            volume: larger products than this are left out; 64^3 are always allowed.
        """
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
    """Dtypes of inputs and result."""

    dtype: DType
    out: DType

    @property
    def name(self) -> str:
        """As profiles call it."""
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
    grid: Grid,
    seconds: float,
    rng: np.random.Generator,
    clock: Clock = time.perf_counter,
) -> list[Sample]:
    """Time the shapes of a grid, one after the other and all again, until the time is up.

    A shape's median so is over tiles that came minutes apart, between other shapes, as in training.

    Args:
        timer: times them.
        variant, layout: of what.
        grid: the shapes; what would take more than half a percent of the time is left out.
        seconds: how long; at least 15 shapes are measured in any case.
        rng: draws the shapes.
        clock: tells how long it has been.
    """

    def block_s(shape: Shape, strips: int) -> float:
        return timer.block_s(shape, strips, layout, variant.dtype, variant.out)

    began_s = clock()
    pace_s = min(block_s((128, 128, 128), 1) for _ in range(_REPEATS)) / 128**3
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
        # The first makes kernels for a new shape; a clock may not move during so small a tile.
        typical_s = max(statistics.median(times[1:] or times), 1e-8)
        samples.append(Sample(*shape, layout, float(f"{typical_s:.4g}"), strips))
    return samples


def fitted(samples: Sequence[Sample], source: str = "") -> schema.Compute:
    """Fit a model to the samples of every layout, and judge it on those it was not fitted on.

    Args:
        samples: of one dtype; those of a layout together.
        source: of the samples.

    Raises:
        ValueError: when there are too few samples, or scipy is missing.
    """
    models, fits = {}, {}
    for layout in dict.fromkeys(s.layout for s in samples):
        of_layout = [s for s in samples if s.layout is layout]
        models[layout], fits[layout] = fit_and_judge(of_layout)
    return schema.Compute(
        flops_per_s=max(2 * s.a * s.b * s.c / s.seconds for s in samples),
        source=source,
        models=models,
        samples=tuple((s.a, s.b, s.c, s.layout, s.seconds, s.strips) for s in samples),
        fits=fits,
    )


def refit(profile: schema.DeviceProfile) -> schema.DeviceProfile:
    """Fit all models anew from the samples in a profile.

    Raises:
        ValueError: when it has none, or too few; or scipy is missing.
    """
    if not any(entry.samples for entry in profile.compute.values()):
        raise ValueError(
            f"profile {profile.name!r} has no samples to fit a model to; "
            f"measure some with: cleave profile device"
        )
    compute = {}
    for dtype, entry in profile.compute.items():
        samples = [Sample(*sample) for sample in entry.samples]
        compute[dtype] = fitted(samples, entry.source) if samples else entry
    sustained = profile.sustained
    if sustained is not None and sustained.speeds:
        sustained = _with_thermal(sustained)
    return msgspec.structs.replace(profile, compute=compute, sustained=sustained)


# --- minutes under load ---


def measure_sustained(
    bench: Bench,
    seconds: float,
    sensors: Sensors,
    meter: PowerMeter | None = None,
    progress: Callable[[float], None] | None = None,
) -> schema.Sustained:
    """Multiply a large fp32 tile again and again, and watch its speed.

    Args:
        bench: multiplies.
        seconds: how long.
        sensors: read in each of some sixty windows.
        meter: sampled in each window.
        progress: called with the seconds that are over.
    """
    side = _side_for(bench, 0.02)
    order = bench.order(side, side, side, Layout.NN, DType.FP32, DType.FP32)
    window_s = max(0.25, seconds / 60)
    began_s = bench.clock()
    rates: list[tuple[float, float]] = []
    temperatures: list[tuple[float, float]] = []
    frequencies: list[tuple[float, float]] = []
    while bench.clock() - began_s < seconds or len(rates) < 3:
        if meter is not None:
            meter.sample()
        busy_s, count = 0.0, 0
        while busy_s < window_s:
            busy_s += bench.once(order)
            count += 1
        at_s = round(bench.clock() - began_s, 3)
        rates.append((at_s, count / busy_s))
        for read, series in (
            (sensors.temperature_c, temperatures),
            (sensors.frequency_hz, frequencies),
        ):
            value = read()
            if value is not None:
                series.append((at_s, value))
        if progress is not None:
            progress(min(at_s, seconds))
    if meter is not None:
        meter.sample()
    full = _full_speed([rate for _, rate in rates])
    return _with_thermal(
        schema.Sustained(
            speeds=tuple((at_s, round(rate / full, 4)) for at_s, rate in rates),
            temperatures=tuple(temperatures),
            frequencies=tuple(frequencies),
            source=f"{side} x {side} x {side} in fp32, again and again",
        )
    )


def _full_speed(rates: Sequence[float]) -> float:
    """That of a cool device, at the start; unless something else slowed it down just then."""
    return max(statistics.median(rates[:3]), float(np.quantile(rates, 0.9)))


def _with_thermal(sustained: schema.Sustained) -> schema.Sustained:
    long = sustained.speeds[-1][0] >= _FITTED_FROM_S
    thermal = fit_thermal(sustained.speeds) if long else None
    return msgspec.structs.replace(sustained, thermal=thermal)


def _side_for(bench: Bench, seconds: float) -> int:
    """The side of a cube that takes about so long."""
    once_s = bench.seconds(bench.order(256, 256, 256, Layout.NN, DType.FP32, DType.FP32))
    side = float(256 * (seconds / max(once_s, 1e-9)) ** (1 / 3))
    return min(_LARGEST_CUBE, max(128, round(side / 16) * 16))


def _rest(
    bench: Bench,
    sensors: Sensors,
    before_c: float | None,
    sustained: schema.Sustained,
    sleep: Callable[[float], None],
) -> None:
    """Let what the sustained run heated cool down: the grid is to show the full speed."""
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


# --- everything ---


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured, and for how long.

    Attributes:
        name, title: of the profile.
        date: of measuring, as 2026-11-21.
        quick: fewer dtypes and layouts.
        grid_s: for the grid of shapes, of all dtypes and layouts together.
        sustained_s: of the sustained run; 0 for none.
        contention_s: for each count of processes at once; 0 for no measurement.
        kind: None: a laptop where the machine has a battery, else a desktop.
        memory_bytes: to offer; 0 for half of what is installed.
        threads: that the executor has; 0 for all.
        seed: of shapes and numbers.
        grid: the shapes.
    """

    name: str
    title: str
    date: str
    quick: bool = False
    grid_s: float = 240.0
    sustained_s: float = 180.0
    contention_s: float = 2.0
    kind: schema.DeviceKind | None = None
    memory_bytes: int = 0
    threads: int = 0
    seed: int = 0
    grid: Grid = field(default_factory=Grid)

    @property
    def variants(self) -> Sequence[Variant]:
        """Dtypes of inputs and results."""
        return QUICK_VARIANTS if self.quick else ALL_VARIANTS

    @property
    def layouts(self) -> Sequence[Layout]:
        """How operands lie; both transposed, which training never needs, only when not quick."""
        return QUICK_LAYOUTS if self.quick else tuple(Layout)

    @property
    def contention_total_s(self) -> float:
        """With the start of the processes."""
        counts = contention.process_counts(len(machine.usable_cores()))
        return self.contention_s * len(counts) + 3 if self.contention_s else 0.0

    @property
    def total_s(self) -> float:
        """About how long it takes."""
        return self.grid_s + self.sustained_s + self.contention_total_s


def measure_device(
    settings: Settings,
    executor: Executor,
    progress: Progress = lambda _what, _seconds: None,
    *,
    clock: Clock = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
    sensors: Sensors | None = None,
    timer: TileTimer | None = None,
) -> schema.DeviceProfile:
    """Measure this machine; takes about `settings.total_s`.

    Args:
        settings: what, and how long.
        executor: what multiplies, with the threads that it has.
        progress: told how far it is.
        clock, sleep: time.
        sensors: of this machine.
        timer: times the grid of shapes; the executor in this process unless given.

    Raises:
        ValueError: when a model cannot be fitted (scipy is missing), or a process ends early.
        OSError: when the processes that measure contention cannot be started.
    """
    here, sensors = machine.this_machine(), sensors or Sensors()
    rng = np.random.default_rng(settings.seed)
    elements = max(settings.grid.elements, 2 * _LARGEST_CUBE**2)
    bench = Bench(executor, elements, clock, rng)
    assumed: list[str] = []
    over_s = 0.0

    idle, busy = PowerMeter(sensors, clock), PowerMeter(sensors, clock)
    if idle.available:
        progress("power when idle", over_s)
        for _ in range(4):
            idle.sample()
            sleep(_IDLE_S / 3)
    sustained = None
    if settings.sustained_s:  # first, as long as the machine is cool
        before_c = sensors.temperature_c()
        sustained = measure_sustained(
            bench, settings.sustained_s, sensors, busy, lambda s: progress("sustained run", s)
        )
        over_s += settings.sustained_s
        _rest(bench, sensors, before_c, sustained, sleep)
        if sustained.speeds[-1][0] < _FITTED_FROM_S:
            assumed.append(
                f"sustained.thermal: a run of {settings.sustained_s:g} s shows no heating; taken "
                f"as a device that never slows down"
            )
    slowdowns: tuple[float, ...] = ()
    if settings.contention_s:
        progress("processes at once", over_s)
        began_s = clock()
        slowdowns = contention.measure_contention(
            executor.name,
            settings.contention_s,
            lambda _: progress(
                "processes at once", over_s + min(settings.contention_total_s, clock() - began_s)
            ),
        )
        over_s += settings.contention_total_s
    compute = _measure_grid(
        timer or bench,
        clock,
        settings,
        rng,
        lambda what, s: progress(what, over_s + s),
        f"measured, {executor.name}",
    )
    kind = settings.kind
    if kind is None:
        kind = schema.DeviceKind.LAPTOP if here.has_battery else schema.DeviceKind.DESKTOP
        why = {True: "it has a battery", False: "it has no battery", None: "nothing says otherwise"}
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
        sustained=sustained,
        power=power,
        contention=tuple(max(0.5, round(s, 3)) for s in slowdowns),
        host=schema.Host(
            cpu=here.cpu,
            cores=here.cores,
            threads=settings.threads or here.cores,
            executor=executor.name,
            system=here.system,
        ),
    )


def _measure_grid(
    timer: TileTimer,
    clock: Clock,
    settings: Settings,
    rng: np.random.Generator,
    progress: Progress,
    source: str,
) -> dict[str, schema.Compute]:
    pairs = [(v, layout) for v in settings.variants for layout in settings.layouts]
    samples: dict[str, list[Sample]] = {}
    began_s = clock()
    for done, (variant, layout) in enumerate(pairs):
        progress(f"{variant.name} {layout.value}", settings.grid_s * done / len(pairs))
        left_s = settings.grid_s - (clock() - began_s)
        share_s = max(0.1 * settings.grid_s, left_s) / (len(pairs) - done)
        found = measure_samples(timer, variant, layout, settings.grid, share_s, rng, clock)
        samples.setdefault(variant.name, []).extend(found)
    return {name: fitted(found, source) for name, found in samples.items()}


def _memory(settings: Settings, here: machine.Machine) -> schema.Memory:
    installed = here.memory_bytes or 0
    offered = settings.memory_bytes or installed // 2 or _ASSUMED_MEMORY_BYTES
    return schema.Memory(bytes=offered, installed_bytes=installed, source="the system")


def _memory_assumption(settings: Settings, here: machine.Machine) -> list[str]:
    if settings.memory_bytes:
        return []
    known = "half of what is installed" if here.memory_bytes else "1 GB, what it has is not known"
    return [f"memory.bytes: {known}; what its owner would offer is not known"]


def valid_name(text: str) -> str:
    """A name for a profile from whatever a machine is called."""
    kept = "".join(c if c.isascii() and (c.isalnum() or c in ".-") else "-" for c in text.lower())
    return kept.strip(".-")[:64] or "device"
