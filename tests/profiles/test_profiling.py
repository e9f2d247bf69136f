"""Measuring a device: with a backend and a clock that are made up, the result is known."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest

from cleave.arrays import Buffer, DType
from cleave.machine.backends import NumpyBackend, execute
from cleave.machine.sensors import Sensors
from profiles.device_profile import DeviceProfile, GraphProfile
from profiles.library import read_profile, write_profile
from profiles.measuring.device import (
    ALL_VARIANTS,
    QUICK_VARIANTS,
    SampleGrid,
    Settings,
    Variant,
    measure_device,
    measure_samples,
    measure_sustained,
    refit,
    valid_name,
)
from profiles.measuring.gemm_timer import Bench
from profiles.performance import Layout, PerformanceModel

pytestmark = pytest.mark.slow

FP32 = Variant(DType.FP32, DType.FP32)
SMALL = SampleGrid(regular=30, irregular=15, sides=(8, 256), depths=(16, 256))


class Clock:
    """Time that passes when told."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class ModelledBackend:
    """Takes as long as a model says, on a made-up clock, and multiplies nothing."""

    name = "modelled"

    def __init__(self, clock: Clock, slows_after_s: float = 1e9) -> None:
        self.clock = clock
        self.slows_after_s = slows_after_s
        self.disturbed_until_s = 0.0
        self.model = PerformanceModel(1e-5, 2e-11, 1e-10, 3e-10, 2e-10)
        self.multiplied: set[tuple[DType, DType, bool, bool]] = set()

    def matmul(self, a: Buffer, b: Buffer, out: Buffer, *, accumulate: bool = False) -> None:
        assert not accumulate
        rows, depth = a.shape
        assert b.shape[0] == depth
        stored_as_is = (a.array.flags.c_contiguous, b.array.flags.c_contiguous)
        self.multiplied.add((a.dtype, out.dtype, *stored_as_is))
        slower = 2.0 if self.clock.now_s > self.slows_after_s else 1.0
        if self.clock.now_s < self.disturbed_until_s:
            slower = 2.5
        self.clock.now_s += slower * self.model.seconds(rows, b.shape[1], depth)


def _bench(slows_after_s: float = 1e9) -> tuple[Bench, ModelledBackend]:
    clock = Clock()
    backend = ModelledBackend(clock, slows_after_s)
    return Bench(backend, max(SMALL.elements, 2 * 1024 * 1024), clock), backend


def _measured(tmp_path: Path, quick: bool = True, sustained_s: float = 5.0) -> DeviceProfile:
    clock = Clock()
    settings = Settings(
        "made-up", "Made up", "2026-11-21", quick=quick, grid_s=0.5, sustained_s=sustained_s,
        threads=1, grid=SMALL,
    )  # fmt: skip
    return measure_device(
        settings,
        ModelledBackend(clock),
        clock=clock,
        sleep=clock.sleep,
        sensors=Sensors(tmp_path),
        graphs=lambda products: 5e11 if products else 2e11,
    )


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> DeviceProfile:
    return _measured(tmp_path_factory.mktemp("no-sensors"))


# --- orders as tiles have them ---


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("variant", ALL_VARIANTS, ids=lambda v: v.name)
def test_an_order_is_a_product_of_its_shape(layout: Layout, variant: Variant) -> None:
    bench = Bench(NumpyBackend(), 1000)
    order = bench.order(3, 5, 7, layout, variant.dtype, variant.out)
    block = execute(bench.backend, order)
    assert block.shape == (3, 5)
    assert block.dtype is variant.out
    assert order.flops == 2 * 3 * 5 * 7
    assert np.isfinite(block.float32()).all()
    (pair,) = order.pairs
    assert [a.nbytes for a in pair] == [len(a.payload) for a in pair]


# --- the grid ---


def test_shapes_are_regular_and_odd_and_the_same_for_a_seed() -> None:
    grid = SampleGrid()
    shapes = grid.shapes(np.random.default_rng(3), 1e9)
    assert shapes == grid.shapes(np.random.default_rng(3), 1e9)
    assert shapes != grid.shapes(np.random.default_rng(4), 1e9)
    assert len(shapes) == 140
    assert all(8 <= side <= 1536 for a, b, _ in shapes for side in (a, b))
    assert all(16 <= c <= 4096 for _, _, c in shapes)
    assert sum(a % 16 == 0 for a, _, _ in shapes) > 30
    assert sum(a % 2 == 1 for a, _, _ in shapes) > 10


def test_shapes_too_large_for_the_time_are_left_out() -> None:
    shapes = SampleGrid().shapes(np.random.default_rng(0), 1e6)
    assert all(a * b * c <= 1e6 for a, b, c in shapes)
    assert len(SampleGrid().shapes(np.random.default_rng(0), 0.0)) == 140  # small ones always fit


def test_the_time_is_kept_but_a_model_has_samples_enough() -> None:
    bench, _ = _bench()
    rng = np.random.default_rng(0)
    samples = measure_samples(bench, FP32, Layout.NN, SMALL, 1e-6, rng, bench.clock)
    assert len(samples) == 15
    bench, backend = _bench()
    measure_samples(bench, FP32, Layout.NN, SMALL, 0.5, np.random.default_rng(0), bench.clock)
    assert backend.clock.now_s < 0.6


class SlowAtFirst:
    """Its first tile of every shape takes ten times as long (a `TileTimer`)."""

    strips = (1, 3)

    def __init__(self) -> None:
        self.clock = Clock()
        self.timed: list[tuple[tuple[int, int, int], int]] = []

    def block_s(
        self, shape: tuple[int, int, int], strips: int, layout: Layout, dtype: DType, out: DType
    ) -> float:
        block_s = 1e-9 * math.prod(shape) * (1 if (shape, strips) in self.timed else 10)
        self.timed.append((shape, strips))
        self.clock.now_s += block_s * strips**2
        return block_s


def test_shapes_take_turns_and_the_first_tile_of_each_is_left_out() -> None:
    timer = SlowAtFirst()
    rng = np.random.default_rng(0)
    samples = measure_samples(timer, FP32, Layout.NN, SMALL, 100.0, rng, timer.clock)
    for s in samples:
        assert s.seconds == pytest.approx(1e-9 * s.a * s.b * s.c, rel=1e-3)
    assert {s.strips for s in samples} == {1, 3}
    turns = [tile for tile in timer.timed if tile[0] != (128, 128, 128)]
    assert turns[: len(samples)] == turns[len(samples) : 2 * len(samples)]


# --- minutes under load ---


@pytest.mark.nightly
def test_a_device_that_keeps_its_speed(tmp_path: Path) -> None:
    bench, _ = _bench()
    seen: list[float] = []
    run = measure_sustained(bench, 90.0, Sensors(tmp_path), progress=seen.append)
    assert {share for _, share in run.speeds} == {1.0}
    assert 50 <= len(run.speeds) <= 60
    assert run.thermal is None
    assert run.temperatures == ()
    assert seen[-1] == 90.0


@pytest.mark.nightly
def test_a_device_that_throttles(tmp_path: Path) -> None:
    zone = tmp_path / "sys/class/thermal/thermal_zone0"
    zone.mkdir(parents=True)
    (zone / "type").write_text("cpu")
    (zone / "temp").write_text("61500")
    bench, _ = _bench(slows_after_s=60.0)
    run = measure_sustained(bench, 180.0, Sensors(tmp_path))
    assert run.speeds[-1][1] == pytest.approx(0.5, rel=0.02)
    assert run.thermal is not None
    assert run.thermal.sustained_speed == pytest.approx(0.5, rel=0.1)
    assert {c for _, c in run.temperatures} == {61.5}


@pytest.mark.nightly
def test_a_disturbed_start_is_not_the_full_speed(tmp_path: Path) -> None:
    bench, backend = _bench()
    backend.disturbed_until_s = 10.0
    run = measure_sustained(bench, 90.0, Sensors(tmp_path))
    assert run.speeds[0][1] == pytest.approx(0.4)
    assert run.speeds[-1][1] == 1.0
    assert run.thermal is None


def test_seconds_show_no_heating(tmp_path: Path) -> None:
    bench, _ = _bench(slows_after_s=2.0)
    run = measure_sustained(bench, 5.0, Sensors(tmp_path))
    assert run.speeds[-1][1] < 0.6
    assert run.thermal is None


# --- everything ---


def test_a_profile_of_a_known_device(measured: DeviceProfile) -> None:
    profile = measured
    assert set(profile.compute) == {variant.name for variant in QUICK_VARIANTS}
    model = ModelledBackend(Clock()).model
    for entry in profile.compute.values():
        assert list(entry.models) == [Layout.NN, Layout.NT, Layout.TN]
        for layout, report in entry.fits.items():
            assert report.median_error < 1e-3
            found = entry.models[layout].seconds(333, 222, 111)
            assert found == pytest.approx(model.seconds(333, 222, 111), rel=0.01)
        assert entry.flops_per_s < 1e11
    assert profile.graphs == GraphProfile(2e11, "measured, a layer's graph", 5e11)
    assert profile.power is None  # nothing measures it
    assert profile.host is not None
    assert profile.host.threads == 1
    assert profile.host.executor == "modelled"
    assert any(line.startswith("kind: desktop") for line in profile.provenance.assumed)
    assert any(line.startswith("sustained") for line in profile.provenance.assumed)


def test_not_quick_measures_everything(tmp_path: Path) -> None:
    profile = _measured(tmp_path, quick=False, sustained_s=0.0)
    assert set(profile.compute) == {variant.name for variant in ALL_VARIANTS}
    assert all(set(entry.models) == set(Layout) for entry in profile.compute.values())
    assert profile.sustained is None


def test_a_profile_survives_its_file_and_fits_again(
    measured: DeviceProfile, tmp_path: Path
) -> None:
    path = tmp_path / "made-up.toml"
    write_profile(measured, path)
    again = read_profile(path)
    assert again == measured
    assert refit(again) == measured


def test_power_is_measured_where_energy_is_counted(tmp_path: Path) -> None:
    battery = tmp_path / "sys/class/power_supply/BAT0"
    battery.mkdir(parents=True)
    for name, value in {"type": "Battery", "status": "Discharging", "power_now": 6e6}.items():
        (battery / name).write_text(str(value))
    profile = _measured(tmp_path)
    assert profile.power is not None
    assert profile.power.idle_w == pytest.approx(6.0)
    assert profile.power.compute_w == pytest.approx(6.0)
    assert profile.power.source == "battery"


def test_refitting_needs_samples(measured: DeviceProfile) -> None:
    bare = {n: msgspec.structs.replace(e, samples=()) for n, e in measured.compute.items()}
    with pytest.raises(ValueError, match="no samples"):
        refit(msgspec.structs.replace(measured, compute=bare))


@pytest.mark.parametrize(
    ("text", "name"),
    [("Anna's MacBook.local", "anna-s-macbook.local"), ("Ünïcode", "n-code"), ("--", "device")],
)
def test_names(text: str, name: str) -> None:
    assert valid_name(text) == name
