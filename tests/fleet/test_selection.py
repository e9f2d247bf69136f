"""Which GEMMs stay on the PS: those that it is predicted to do sooner, and no others."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

import cleave
from cleave.arrays import Buffer, DType, empty
from cleave.fleet.product import Multiplier, Side
from cleave.fleet.selection import SelectiveFleet, Selector, measure_ps
from cleave.gemm import Gemm
from cleave.machine.backends import NumpyBackend
from cleave.planner.plan import DeviceRates, ElementBytes
from cleave.planner.tiles.planner import TilePlanner
from profiles.fleet_device import FleetDevice

FP32 = ElementBytes(4, 4)


def _clock(step_s: float) -> Iterator[float]:
    now = 0.0
    while True:
        yield now
        now += step_s


def _selector(call_s: float) -> Selector:
    """A PS that takes so long for any of the GEMMs that it measures itself with."""
    ticks = _clock(call_s)
    return Selector(TilePlanner(), NumpyBackend(), lambda: next(ticks))


def _fleet(bytes_per_s: float) -> list[DeviceRates]:
    return [DeviceRates(i, bytes_per_s, bytes_per_s, 1e13) for i in range(4)]


def test_the_ps_is_measured_by_its_clock() -> None:
    ticks = _clock(0.5)
    speed = measure_ps(NumpyBackend(), DType.FP32, lambda: next(ticks))
    assert speed.call_s == 0.5
    assert speed.flops_per_s == pytest.approx(2 * 512**3 / 0.5)
    assert speed.predicted_s(Gemm(512, 512, 512)) == pytest.approx(1.0)


@pytest.mark.parametrize(("bytes_per_s", "on_fleet"), [(1e3, False), (1e12, True)])
def test_the_faster_side_wins(bytes_per_s: float, on_fleet: bool) -> None:
    decision = _selector(0.1).decide(
        Gemm(512, 512, 512), FP32, DType.FP32, _fleet(bytes_per_s), epoch=1
    )
    assert decision.on_fleet is on_fleet
    assert ("fleet is faster" in decision.reason) is on_fleet


@pytest.mark.parametrize("devices", [0, 4])
def test_without_devices_or_their_memory_the_ps_is_chosen(devices: int) -> None:
    full = [replace(device, memory_bytes=0) for device in _fleet(1e12)][:devices]
    gemm = Gemm(512, 512, 512)
    assert not _selector(9.0).decide(gemm, FP32, DType.FP32, full, epoch=1).on_fleet


def test_a_changed_fleet_is_asked_anew() -> None:
    selector, gemm = _selector(0.1), Gemm(512, 512, 512)
    assert not selector.decide(gemm, FP32, DType.FP32, _fleet(1e3), epoch=1).on_fleet
    assert not selector.decide(gemm, FP32, DType.FP32, _fleet(1e12), epoch=1).on_fleet
    assert selector.decide(gemm, FP32, DType.FP32, _fleet(1e12), epoch=2).on_fleet


@pytest.mark.slow
def test_a_fleet_that_is_busy_otherwise_is_not_asked() -> None:
    profile = FleetDevice("test", 1e15, 1e15, 1e15, 0.0, 2**30)
    with cleave.emulated([profile]) as fleet:
        selective = SelectiveFleet(fleet, fleet, _selector(0.1), keep=True)
        with selective.left_alone():
            _multiply(selective)
        assert fleet.counters().blocks == 0
        _multiply(selective)
        assert fleet.counters().blocks == 1


def _multiply(fleet: Multiplier) -> None:
    rng = np.random.default_rng(0)
    a = rng.standard_normal((30, 20)).astype(np.float32)
    b = rng.standard_normal((25, 20)).astype(np.float32)
    left, right = (fleet.operand(Buffer(x, DType.FP32)) for x in (a, b))
    out = fleet.submit(Side(left), Side(right, True), empty(30, 25, DType.FP32)).result()
    np.testing.assert_allclose(out.array, a @ b.T, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bytes_per_s", "keep", "blocks", "kept"),
    [(1e3, True, 0, 1), (1e15, True, 1, 0), (1e3, False, 1, 1)],
    ids=["faster here", "faster there", "only looked at"],
)
def test_a_fleet_keeps_what_is_faster_here(
    bytes_per_s: float, keep: bool, blocks: int, kept: int
) -> None:
    profile = FleetDevice("test", 1e15, bytes_per_s, bytes_per_s, 0.0, 2**30)
    with cleave.emulated([profile]) as fleet:
        selective = SelectiveFleet(fleet, fleet, _selector(0.1), keep=keep)
        _multiply(selective)
        assert (fleet.counters().blocks > 0) is bool(blocks)
        summary = selective.kept()
        assert (summary.gemms, summary.total) == (kept, 1)
        assert (summary.saves_s > 0) is bool(kept)
