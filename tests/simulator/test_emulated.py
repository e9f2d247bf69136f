"""`cleave` in the simulator, the planner's prediction, and virtual-time emulation are one."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cleave.arrays import Buffer, DType
from cleave.fleet.fleet import Fleet
from cleave.fleet.product import Side
from cleave.gemm import Gemm
from cleave.planner.plan import DeviceRates, ElementBytes, PsRates
from cleave.planner.tiles.planner import TilePlanner
from cleave.planner.tiles.shape import RateArrays
from cleave.workload.registry import find_model
from cleave.workload.step import step_gemms
from emulator.virtual import VirtualRuntime, emulated
from profiles.fleet_device import FleetDevice
from profiles.fleets import paper_fleet
from simulator.catalogue import methods
from simulator.method import Conditions
from simulator.tiles import backward_task, tasks_s

BF16 = ElementBytes(2, 2)


def equal(count: int, latency_s: float) -> list[FleetDevice]:
    """Devices that are all the same."""
    return [FleetDevice(f"equal-{i}", 6e12, 50e6, 8e6, latency_s, 2 * 10**9) for i in range(count)]


def mixed(count: int) -> list[FleetDevice]:
    """Devices that differ in everything, and more than those of the paper."""
    return [
        FleetDevice(
            f"mixed-{i}",
            (2e12, 6e12, 20e12)[i % 3],
            (10e6, 60e6, 100e6, 25e6)[i % 4],
            (2e6, 8e6)[i % 2],
            0.01 * (i % 3),
            (1 + i % 3) * 10**9,
        )
        for i in range(count)
    ]


def matrix(rows: int, columns: int) -> Buffer:
    """Of which there is only the size."""
    return Buffer(np.broadcast_to(np.uint16(0), (rows, columns)), DType.BF16)


def emulated_s(fleet: Fleet, gemm: Gemm) -> float:
    """Virtual seconds for a GEMM on devices that hold nothing."""
    runtime = fleet.runtime
    assert isinstance(runtime, VirtualRuntime)
    began_s = runtime.now_s
    a, b = fleet.operand(matrix(gemm.m, gemm.k)), fleet.operand(matrix(gemm.k, gemm.n))
    fleet.submit(Side(a), Side(b), matrix(gemm.m, gemm.n)).result()
    took_s = runtime.now_s - began_s
    del a, b
    runtime.settle()
    return took_s


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "batch", "seq", "devices"),
    [
        ("opt-tiny", 32, 512, mixed(7)),
        pytest.param("opt-tiny", 32, 512, paper_fleet(16), marks=pytest.mark.nightly),
        pytest.param("llama-tiny", 32, 512, paper_fleet(8), marks=pytest.mark.nightly),
        pytest.param("opt-125m", 16, 512, mixed(11), marks=pytest.mark.nightly),
        pytest.param("opt-350m", 8, 512, equal(4, 0.05), marks=pytest.mark.nightly),
    ],
)
def test_a_step_takes_what_it_takes_emulated(
    model: str, batch: int, seq: int, devices: list[FleetDevice]
) -> None:
    # Message headers, which no prediction counts, are the difference.
    fleet = emulated(devices, compute=False, coding="off")
    fleet.planner = TilePlanner(PsRates())
    rates = fleet.runtime.fleet_rates()[1]
    conditions = Conditions(find_model(model), batch, seq, rates, BF16)
    (outcome,) = methods()["cleave"].outcomes(conditions)
    simulated_s = outcome.step_s - {p.name: p.seconds for p in outcome.parts}["attention"]
    gemms = step_gemms(conditions.spec, batch, seq, fused_siblings=True)
    one_s = {gemm: emulated_s(fleet, gemm) for gemm in {each.gemm: None for each in gemms}}
    total_s = math.fsum(each.count * one_s[each.gemm] for each in gemms)
    assert total_s == pytest.approx(simulated_s, rel=0.02)


def test_a_task_takes_what_its_messages_take_one_after_the_other() -> None:
    # Each device by itself, event by event: download, multiply and upload, each in turn.
    spec = find_model("opt-125m")
    task = backward_task(spec, 512, 2)
    devices = [DeviceRates(i, d.downlink_bytes_per_s, d.uplink_bytes_per_s, d.flops_per_s)
               for i, d in enumerate(mixed(5))]  # fmt: skip
    took_s = tasks_s(task, 40, RateArrays.of(devices))
    done = 0
    for device in devices:
        down_s = computed_s = back_s = 0.0
        while True:
            down_s += task.download_bytes / device.downlink_bytes_per_s
            computed_s = max(computed_s, down_s) + task.flops / device.flops_per_s
            back_s = max(back_s, computed_s) + task.upload_bytes / device.uplink_bytes_per_s
            if back_s > took_s * (1 + 1e-6):
                break
            done += 1
    assert done >= 40
