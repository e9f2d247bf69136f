"""What a run records of its energy: emulated devices observed, counters of the machine read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cleave.arrays import Buffer, DType, empty
from cleave.energy.account import DeviceUsage
from cleave.energy.meter import Basis
from cleave.energy.run_energy import RunEnergy, run_energy, side_by_side
from cleave.errors import UsageError
from cleave.fleet.fleet import Fleet
from cleave.fleet.product import Side
from cleave.machine.sensors import PowerMeter, Sensors
from emulator.activity import Multiplication, Presence
from emulator.run_meter import FleetMeter, RunMeter
from emulator.virtual import VirtualRuntime, emulated
from profiles.device_profile import DeviceKind
from profiles.fleet_device import FleetDevice

SPELL = DeviceUsage("iphone-12", 2, 20.0, 8.0, 3.0, 1e6, 2e5)


def devices() -> list[FleetDevice]:
    return [
        FleetDevice(f"phone-{i}", 1e9, 1e6, 5e5, 0.01, 10**8, profile="iphone-12") for i in (0, 1)
    ]


def multiply(fleet: Fleet, side: int) -> None:
    ones = fleet.operand(Buffer(np.ones((side, side), np.float32), DType.FP32))
    fleet.submit(Side(ones), Side(ones), empty(side, side, DType.FP32)).result()


def shell_of(fleet: Fleet) -> VirtualRuntime:
    runtime = fleet.runtime
    assert isinstance(runtime, VirtualRuntime)
    return runtime


def test_what_emulated_devices_do_is_what_the_fleet_counts() -> None:
    with emulated(devices(), seed=1) as fleet:
        runtime = shell_of(fleet)
        before = fleet.counters()
        meter = RunMeter(PowerMeter(Sensors(Path("/nowhere"))), runtime, devices())
        multiply(fleet, 64)
        energy = meter.finish()
        spent = fleet.counters() - before
    assert len(energy.usages) == 1
    usage = energy.usages[0]
    assert (usage.profile, usage.devices) == ("iphone-12", 2)
    assert usage.compute_s == pytest.approx(2 * 64**3 / 1e9, rel=1e-6)
    assert usage.present_s == pytest.approx(2 * energy.duration_s)
    assert (usage.down_bytes, usage.up_bytes) == (spent.downlink_bytes, spent.uplink_bytes)
    assert usage.radio_s == pytest.approx(usage.down_bytes / 1e6 + usage.up_bytes / 5e5)
    assert energy.machine_j is None


def test_devices_that_come_and_go() -> None:
    meter = FleetMeter({"a": "iphone-12", "b": "iphone-12"}, {1: "a"}, 10.0)
    meter(Multiplication(1, 1, 1, 1, 2, 11.0, 13.0))
    meter(Presence(15.0, 1, "a", False))
    meter(Presence(16.0, 2, "b", True))
    meter(Presence(18.0, 3, "a", True))
    meter(Presence(19.0, 4, "stranger", True))
    phones, strangers = meter.usages(20.0)
    assert (phones.devices, phones.present_s, phones.compute_s) == (2, 5 + 4 + 2, 2.0)
    assert (strangers.profile, strangers.devices, strangers.present_s) == ("", 1, 1.0)


def test_a_machine_that_counts_its_energy(tmp_path: Path) -> None:
    zone = tmp_path / "sys/class/powercap/intel-rapl:0"
    zone.mkdir(parents=True)
    (zone / "name").write_text("package-0")
    (zone / "energy_uj").write_text("1000000")
    times = iter((0.0, 0.0, 10.0, 10.0))
    clock = lambda: next(times)  # noqa: E731
    meter = RunMeter(PowerMeter(Sensors(tmp_path), clock), clock=clock)
    (zone / "energy_uj").write_text("251000000")
    energy = meter.finish()
    assert energy.machine_j == pytest.approx(250.0)
    assert energy.ps.basis is Basis.MEASURED
    assert energy.ps.energy_j == pytest.approx(250.0)
    assert "RAPL" in energy.machine_source


def test_a_record_comes_back_and_resumptions_add_up() -> None:
    stranger = DeviceUsage("", 1, 9.0, 1.0, 1.0, 1e6, 2e5, kind=DeviceKind.PHONE, flops_per_s=1e9)
    faster = replace(stranger, flops_per_s=2e9)
    first = RunEnergy(10.0, 5.0, (SPELL, stranger), 100.0, "RAPL")
    second = RunEnergy(20.0, 6.0, (SPELL, faster), 50.0, "RAPL")
    lines = [json.loads(json.dumps(run.to_record())) for run in (first, second)]
    found = run_energy([{"event": "step", "step": 1}, *lines])
    assert run_energy(lines[:1]) == first
    assert (found.duration_s, found.machine_j) == (30.0, 150.0)
    both = DeviceUsage("", 1, 18.0, 2.0, 2.0, 2e6, 4e5, kind=DeviceKind.PHONE, flops_per_s=2e9)
    assert found.usages == (DeviceUsage("iphone-12", 2, 40.0, 16.0, 6.0, 2e6, 4e5), both)
    assert found.ps.energy_j is None  # the machine multiplied for its devices
    assert any("not counted" in note for note in found.notes())


def test_a_run_without_or_with_a_damaged_record() -> None:
    with pytest.raises(UsageError, match="no energy record"):
        run_energy([{"event": "done"}])
    with pytest.raises(UsageError, match="damaged"):
        run_energy([{"event": "energy", "duration_s": "long"}])


def test_servers_that_train_together_have_other_devices_and_one_machine() -> None:
    machine = RunEnergy(0.0, 30.0, (), 500.0, "RAPL")
    servers = [RunEnergy(100.0, 25.0, (SPELL,)), RunEnergy(90.0, 25.0, (SPELL,))]
    whole = side_by_side(machine, servers)
    assert (whole.duration_s, whole.wall_s, whole.machine_j) == (100.0, 30.0, 500.0)
    (usage,) = whole.usages
    assert (usage.devices, usage.down_bytes) == (4, 2e6)
    assert usage.present_s == pytest.approx(20.0 + 20.0 * 100 / 90)  # the second waits 10 s
    assert side_by_side(machine, []) == machine
    assert run_energy([whole.to_record()]) == whole
