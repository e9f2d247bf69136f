"""The virtual fleet: its clock, its counted bytes, its numbers, and what losses do to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from cleave import arrays
from cleave.arrays import Buffer, DType
from cleave.errors import FleetError, UsageError
from cleave.fleet.fleet import Fleet
from cleave.fleet.product import GemmFuture, Side
from cleave.gemm import Gemm
from cleave.machine.backends import NumpyBackend
from cleave.planner.plan import DeviceRates, Plan, Planner
from cleave.planner.tiles.planner import TilePlanner
from cleave.protocol import messages
from cleave.protocol.codec import encode, wire_size
from cleave.scheduler.counters import FleetCounters
from emulator.activity import Activity, Direction, Transfer
from emulator.virtual import Arithmetic, VirtualRuntime, emulated
from profiles.fleet_device import FleetDevice
from profiles.fleets import paper_fleet
from tests.invariants import leftovers
from tests.planner.fakes import OneDevice

DEVICE = FleetDevice("test", 1e6, 1e4, 5e3, 0.5, 2**30)


def _fleet(
    profiles: Sequence[FleetDevice] = (DEVICE,) * 3,
    *,
    planner: Planner | None = None,
    whole_tiles: bool = True,
) -> tuple[Fleet, VirtualRuntime]:
    arithmetic = Arithmetic.WHOLE_TILES if whole_tiles else Arithmetic.BLOCKS
    runtime = VirtualRuntime(profiles, NumpyBackend(), arithmetic, coding="off")
    return Fleet(runtime, planner or TilePlanner()), runtime


def _matrix(rows: int, columns: int, seed: int, dtype: DType = DType.FP32) -> Buffer:
    values = np.random.default_rng(seed).integers(-2, 3, (rows, columns)).astype(np.float32)
    return Buffer(arrays.narrow(values, dtype), dtype)


def _submit(
    fleet: Fleet, m: int = 12, n: int = 10, k: int = 8, seed: int = 0, dtype: DType = DType.FP32
) -> GemmFuture:
    a, b = _matrix(m, k, seed, dtype), _matrix(k, n, seed + 1, dtype)
    sides = Side(fleet.operand(a)), Side(fleet.operand(b))
    return fleet.submit(*sides, arrays.empty(m, n, dtype))


def _check(future: GemmFuture) -> None:
    product = _side(future.a) @ _side(future.b)
    assert np.array_equal(future.result().float32(), product)


def _side(side: Side) -> arrays.Array:
    values = side.operand.buffer.float32()
    return values.T if side.transposed else values


def _watched(runtime: VirtualRuntime) -> list[Transfer]:
    """Every message from now on."""
    seen: list[Transfer] = []

    def note(activity: Activity) -> None:
        if isinstance(activity, Transfer):
            seen.append(activity)

    runtime.observers.append(note)
    return seen


# --- numbers ---


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("whole_tiles", [True, False])
@pytest.mark.parametrize("devices", [1, 5, pytest.param(40, marks=pytest.mark.nightly)])
def test_products_are_right(devices: int, whole_tiles: bool, dtype: DType) -> None:
    fleet, _ = _fleet(paper_fleet(devices), whole_tiles=whole_tiles)
    _check(_submit(fleet, 33, 47, 20, dtype=dtype))


def test_whole_tiles_are_within_rounding_of_blocks() -> None:
    rng = np.random.default_rng(0)
    a, b = (Buffer(rng.standard_normal(s, np.float32), DType.FP32) for s in [(90, 70), (70, 110)])
    results, times, blocks = [], [], []
    for whole_tiles in (True, False):
        fleet, runtime = _fleet([DEVICE] * 6, whole_tiles=whole_tiles)
        out = arrays.empty(90, 110, DType.FP32)
        future = fleet.submit(Side(fleet.operand(a)), Side(fleet.operand(b)), out)
        results.append(future.result().array)
        times.append(runtime.now_s)
        blocks.append(fleet.counters().blocks)
    np.testing.assert_allclose(results[0], results[1], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(results[0], a.array @ b.array, rtol=1e-4, atol=1e-4)
    assert times[0] == times[1]
    assert blocks[0] == blocks[1] > 6


@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 0)], ids=str)
def test_empty_gemms(shape: tuple[int, int, int]) -> None:
    fleet, runtime = _fleet()
    before_s = runtime.now_s
    m, n, k = shape
    out = arrays.empty(m, n, DType.BF16)
    out.array[...] = 7
    a, b = _matrix(m, k, 0, DType.BF16), _matrix(k, n, 0, DType.BF16)
    future = fleet.submit(Side(fleet.operand(a)), Side(fleet.operand(b)), out)
    assert future.result() is out
    assert not out.array.any()
    assert runtime.now_s == before_s


def test_shapes_and_dtypes_must_fit() -> None:
    fleet, _ = _fleet()
    a, b = fleet.operand(_matrix(3, 4, 0)), fleet.operand(_matrix(4, 5, 0))
    half = fleet.operand(_matrix(4, 5, 0, DType.BF16))
    out = arrays.empty(3, 5, DType.FP32)
    with pytest.raises(ValueError, match="cannot multiply"):
        fleet.submit(Side(a), Side(b, True), out)
    with pytest.raises(ValueError, match="fp32"):
        fleet.submit(Side(a), Side(b), arrays.empty(5, 3, DType.FP32))
    with pytest.raises(ValueError, match="fp32"):
        fleet.submit(Side(a), Side(half), out)
    with pytest.raises(ValueError, match="fp32"):  # the operands' dtype, or fp32
        fleet.submit(Side(a), Side(b), arrays.empty(3, 5, DType.BF16))


# --- bytes ---


@pytest.mark.parametrize("whole_tiles", [True, False])
def test_counted_bytes_are_those_of_the_encoded_messages(whole_tiles: bool) -> None:
    fleet, runtime = _fleet(paper_fleet(4), whole_tiles=whole_tiles)
    before = fleet.counters()
    seen = _watched(runtime)
    for seed in range(3):  # operands go after each, so that there are drops as well
        _check(_submit(fleet, 40, 30, 20, seed, DType.BF16))
    counted = fleet.counters() - before
    total = dict.fromkeys(Direction, 0)
    for transfer in seen:
        encoded = sum(len(part) for part in encode(transfer.message))
        assert encoded == transfer.nbytes == wire_size(transfer.message)
        total[transfer.direction] += encoded
    assert counted.downlink_bytes == total[Direction.DOWN]
    assert counted.uplink_bytes == total[Direction.UP]
    assert {type(t.message) for t in seen} == {
        messages.Put,
        messages.Run,
        messages.Drop,
        messages.Result,
    }


def test_counters_of_a_gemm() -> None:
    fleet, _ = _fleet(paper_fleet(4))
    before = fleet.counters()
    assert isinstance(before, FleetCounters)
    future = _submit(fleet, 40, 30, 20)
    future.result()
    counted = fleet.counters() - before
    assert future.job.plan is not None
    assert (counted.gemms, counted.tiles) == (1, len(future.job.plan.tiles))
    assert counted.floor_down_bytes == (40 * 20 + 20 * 30) * 4 < counted.downlink_bytes
    assert counted.floor_up_bytes == 40 * 30 * 4 < counted.uplink_bytes
    assert counted.reissued == counted.late == 0
    assert counted.waited_s > 0


def test_an_operand_that_is_held_is_sent_once() -> None:
    fleet, runtime = _fleet(paper_fleet(1))
    x = fleet.operand(_matrix(50, 40, 0))
    seen = _watched(runtime)
    for seed in (1, 2, 3):
        w = fleet.operand(_matrix(40, 30, seed))
        _check(fleet.submit(Side(x), Side(w), arrays.empty(50, 30, DType.FP32)))
    puts = [t.message.payload.nbytes for t in seen if isinstance(t.message, messages.Put)]
    assert sum(puts) == (50 * 40 + 3 * 40 * 30) * 4


def test_released_operands_are_forgotten_everywhere() -> None:
    fleet, runtime = _fleet(paper_fleet(3))
    for seed in range(20):
        _submit(fleet, 20, 20, 20, seed).result()
    _submit(fleet, 1, 1, 1).result()
    runtime._forget_released()
    assert leftovers(runtime.manager) == []
    assert not runtime._outputs
    assert not runtime._futures
    stored = sum(d.core.occupied_bytes for d in runtime.devices.values())
    assert stored <= 2 * 20 * 20 * 4 * 3  # what is told with the next message


# --- time ---


def _streamed_s(profile: FleetDevice, future: GemmFuture, seen: list[Transfer]) -> float:
    """When the last result is in, from the sizes of the messages alone."""
    named = messages.Welcome(device=1, features=("graphs", "keeps"), arrays="0" * 32)
    welcome = wire_size(named)
    down_s = up_s = compute_s = welcome / profile.downlink_bytes_per_s
    compute_s = up_s = 0.0
    results = iter([t.nbytes for t in seen if isinstance(t.message, messages.Result)])
    flops = {}
    sizes: dict[int, tuple[int, int]] = {}
    last_s = 0.0
    for transfer in seen:
        if transfer.direction is Direction.UP:
            continue
        message = transfer.message
        down_s += transfer.nbytes / profile.downlink_bytes_per_s
        if isinstance(message, messages.Put):
            sizes[message.id] = (message.rows, message.columns)
        elif isinstance(message, messages.Run):
            (m, k), (_, n) = (sizes[i] for i in message.inputs)
            flops[message.id] = 2 * m * n * k
            arrived_s = down_s + profile.latency_s
            compute_s = max(compute_s, arrived_s) + flops[message.id] / profile.flops_per_s
            up_s = max(up_s, compute_s) + next(results) / profile.uplink_bytes_per_s
            last_s = up_s + profile.latency_s
    assert sum(flops.values()) == future.job.gemm.flops
    return last_s


@pytest.mark.parametrize("strips", [1, 2, 5])
@pytest.mark.parametrize("flops_per_s", [2e2, 1e5])
@pytest.mark.parametrize("uplink_bytes_per_s", [1e2, 1e5])
def test_strips_blocks_and_computing_overlap(
    strips: int, flops_per_s: float, uplink_bytes_per_s: float
) -> None:
    profile = replace(DEVICE, flops_per_s=flops_per_s, uplink_bytes_per_s=uplink_bytes_per_s)
    fleet, runtime = _fleet([profile], planner=OneDevice(1, strips, strips))
    seen = _watched(runtime)
    started_s = runtime.now_s
    future = _submit(fleet, 12, 10, 8)
    _check(future)
    expected_s = _streamed_s(profile, future, seen)
    assert runtime.now_s - started_s == pytest.approx(expected_s, rel=1e-12)
    assert fleet.counters().fleet_s == pytest.approx(expected_s, rel=1e-12)


def test_gemms_submitted_before_the_first_wait_overlap() -> None:
    class Alternating(OneDevice):
        def planned(self, gemm: Gemm, devices: Sequence[DeviceRates]) -> Plan:
            self.device = 3 - self.device
            return super().planned(gemm, devices)

    one_by_one, runtime = _fleet([DEVICE] * 2, planner=Alternating(1))
    began_s = runtime.now_s
    for seed in range(2):
        _check(_submit(one_by_one, seed=seed))
    in_turn_s = runtime.now_s - began_s

    together, runtime = _fleet([DEVICE] * 2, planner=Alternating(1))
    began_s = runtime.now_s
    futures = [_submit(together, seed=seed) for seed in range(2)]
    assert runtime.now_s == began_s  # the clock moves only while somebody waits
    for future in futures:
        _check(future)
    both_s = runtime.now_s - began_s
    assert both_s == pytest.approx(in_turn_s / 2, rel=0.01)
    assert together.counters().fleet_s == pytest.approx(both_s)


# --- devices that come and go ---


@pytest.mark.parametrize("whole_tiles", [True, False])
def test_a_device_lost_on_the_way_costs_time_and_no_numbers(whole_tiles: bool) -> None:
    fleet, runtime = _fleet([replace(DEVICE, latency_s=0.0)] * 3, whole_tiles=whole_tiles)
    calm, calm_shell = _fleet([replace(DEVICE, latency_s=0.0)] * 3, whole_tiles=whole_tiles)
    began_s = runtime.now_s
    _check(_submit(calm, 30, 30, 30))
    took_s = calm_shell.now_s - began_s
    future = _submit(fleet, 30, 30, 30)
    runtime.lose(2, in_s=0.6 * took_s)
    _check(future)
    assert runtime.now_s - began_s > took_s
    assert fleet.counters().reissued > 0
    assert fleet.device_count == 2
    _check(_submit(fleet, 30, 30, 30, 5))


def test_without_devices_a_result_fails_and_a_new_device_takes_over() -> None:
    fleet, runtime = _fleet([DEVICE] * 2)
    future = _submit(fleet)
    for device in list(runtime.devices):
        runtime.lose(device, in_s=0.7)
    with pytest.raises(FleetError, match="all emulated devices have left"):
        future.result()
    assert fleet.device_count == 0
    with pytest.raises(FleetError, match="all emulated devices have left"):
        future.result()
    runtime.join(DEVICE)
    _check(future)
    assert fleet.device_count == 1


def test_losing_a_device_twice_or_before_its_hello_changes_nothing() -> None:
    fleet, runtime = _fleet([DEVICE] * 2)
    runtime.lose(1)
    runtime.lose(1)
    runtime.lose(99)
    runtime.lose(runtime.join(DEVICE))
    _check(_submit(fleet))
    assert fleet.device_count == 1


def test_a_closed_fleet_says_so() -> None:
    fleet, _ = _fleet()
    with fleet:
        _check(_submit(fleet))
    fleet.close()
    with pytest.raises(FleetError):
        _submit(fleet).result()


def test_an_emulated_device_that_is_refused_is_explained() -> None:
    with pytest.raises(UsageError, match="memory"):
        emulated([replace(DEVICE, memory_bytes=1000)])


def test_gemms_that_share_an_operand_fit_small_devices() -> None:
    """X is small, every W larger than the device; each alone is cut to fit."""
    fleet, _ = _fleet([replace(DEVICE, memory_bytes=16 * 2**20, downlink_bytes_per_s=1e9)])
    x = fleet.operand(Buffer(np.ones((4, 512), np.float32), DType.FP32))
    for _ in range(2):
        w = fleet.operand(Buffer(np.ones((512, 10_000), np.float32), DType.FP32))
        out = fleet.submit(Side(x), Side(w), arrays.empty(4, 10_000, DType.FP32)).result()
        assert (out.array == 512).all()
