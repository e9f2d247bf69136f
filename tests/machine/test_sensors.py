"""What a machine tells of itself, from a made-up `/proc` and `/sys`."""

from __future__ import annotations

from pathlib import Path

import pytest

from cleave.machine.sensors import (
    PowerMeter,
    Sensors,
    kind_of,
    on_android,
    this_machine,
    usable_cores,
)
from profiles.device_profile import DeviceKind


def _write(root: Path, files: dict[str, object]) -> Path:
    for name, value in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    return root


class Clock:
    """Time that passes when told."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


RAPL = "sys/class/powercap"
BATTERY = "sys/class/power_supply/BAT0"


def test_an_empty_tree_tells_nothing(tmp_path: Path) -> None:
    sensors = Sensors(tmp_path)
    assert sensors.temperature_c() is None
    assert sensors.battery_w() is None
    assert sensors.energy_counters() == []
    meter = PowerMeter(sensors)
    assert not meter.available
    meter.sample()
    meter.sample()
    assert meter.watts is None


@pytest.mark.parametrize("key", ["model name", "Hardware", "Model"])
def test_the_processor_has_a_name(tmp_path: Path, key: str) -> None:
    _write(tmp_path, {"proc/cpuinfo": f"processor\t: 0\n{key}\t: Fast Chip 9\nflags : x\n"})
    machine = this_machine(tmp_path)
    assert machine.cpu == "Fast Chip 9"
    assert machine.cores == len(usable_cores()) >= 1
    assert machine.memory_bytes is None or machine.memory_bytes > 2**24
    assert machine.system


@pytest.mark.parametrize(
    ("board", "battery", "android", "kind"),
    [
        ("Raspberry Pi 4 Model B Rev 1.4\0", False, False, DeviceKind.SBC),
        ("Xunlong Orange Pi Zero\0", True, False, DeviceKind.SBC),
        ("Apple MacBook Air (13-inch, M1, 2020)\0", True, False, DeviceKind.LAPTOP),
        ("linux,dummy-virt\0", False, False, None),
        ("", True, False, DeviceKind.LAPTOP),
        ("", False, False, None),
        ("", False, True, DeviceKind.PHONE),
    ],
)
def test_its_kind(
    tmp_path: Path, board: str, battery: bool, android: bool, kind: DeviceKind | None
) -> None:
    (tmp_path / "sys/class/power_supply").mkdir(parents=True)
    if battery:
        _write(tmp_path, {f"{BATTERY}/type": "Battery"})
    if board:
        _write(tmp_path, {"proc/device-tree/model": board})
    assert kind_of(this_machine(tmp_path), android=android) is kind


@pytest.mark.parametrize(
    ("case", "cpu", "battery", "kind"),
    [
        ("3", "model name : AMD Ryzen 5 5600X", False, DeviceKind.DESKTOP),
        ("35", "", False, DeviceKind.DESKTOP),
        ("10", "", False, DeviceKind.LAPTOP),  # without its battery
        ("30", "", True, DeviceKind.TABLET),
        ("23", "", False, DeviceKind.SERVER),
        ("1", "model name : AMD EPYC 7763 64-Core Processor", False, DeviceKind.SERVER),
        ("1", "model name : Intel(R) Xeon(R) CPU E5-2673 v4", False, DeviceKind.SERVER),
        ("2", "model name : Intel(R) Xeon(R) W-2145 CPU", False, None),
        ("3", "flags : fpu hypervisor", False, None),  # a virtual machine
        ("x", "", False, None),
    ],
)
def test_its_kind_by_its_case_and_processor(
    tmp_path: Path, case: str, cpu: str, battery: bool, kind: DeviceKind | None
) -> None:
    (tmp_path / "sys/class/power_supply").mkdir(parents=True)
    files: dict[str, object] = {
        "sys/class/dmi/id/chassis_type": case,
        "proc/cpuinfo": cpu or "flags : fpu",
    }
    _write(tmp_path, files | ({f"{BATTERY}/type": "Battery"} if battery else {}))
    assert kind_of(this_machine(tmp_path), android=False) is kind


def test_android_shows_in_the_platform_or_in_termuxs_environment() -> None:
    assert on_android("android", {})
    assert on_android("linux", {"ANDROID_ROOT": "/system"})
    assert not on_android("linux", {})


def test_the_processor_is_hotter_than_its_disk(tmp_path: Path) -> None:
    root = _write(
        tmp_path,
        {
            "sys/class/hwmon/hwmon0/name": "nvme",
            "sys/class/hwmon/hwmon0/temp1_input": 80000,
            "sys/class/hwmon/hwmon1/name": "k10temp",
            "sys/class/hwmon/hwmon1/temp1_input": 55500,
            "sys/class/hwmon/hwmon1/temp2_input": "garbage",
            "sys/class/thermal/thermal_zone0/type": "acpitz",
            "sys/class/thermal/thermal_zone0/temp": -274000,
        },
    )
    assert Sensors(root).temperature_c() == 55.5


def test_a_zone_of_any_name_will_do_where_there_is_no_other(tmp_path: Path) -> None:
    zone = "sys/class/thermal/thermal_zone"
    _write(tmp_path, {f"{zone}0/type": "acpitz", f"{zone}0/temp": 41000})
    assert Sensors(tmp_path).temperature_c() == 41.0
    _write(tmp_path, {f"{zone}1/type": "cpu-thermal", f"{zone}1/temp": 39000})
    assert Sensors(tmp_path).temperature_c() == 39.0


def test_rapl_counts_packages_and_memory_and_wraps(tmp_path: Path) -> None:
    zone = f"{RAPL}/intel-rapl:0"
    _write(
        tmp_path,
        {
            f"{zone}/name": "package-0",
            f"{zone}/energy_uj": 9_000_000,
            f"{zone}/max_energy_range_uj": 10_000_000,
            f"{zone}:0/name": "core",  # within the package: not counted twice
            f"{zone}:0/energy_uj": 5,
            f"{zone}:1/name": "dram",
            f"{zone}:1/energy_uj": 0,
            f"{zone}:1/max_energy_range_uj": 10_000_000,
        },
    )
    clock = Clock()
    meter = PowerMeter(Sensors(tmp_path), clock)
    assert meter.available
    meter.sample()
    assert meter.watts is None
    clock.now_s += 2
    _write(tmp_path, {f"{zone}/energy_uj": 3_000_000, f"{zone}:1/energy_uj": 2_000_000})
    meter.sample()
    assert meter.watts == pytest.approx((4 + 2) / 2)
    assert "RAPL" in meter.source


def test_the_platform_counts_alone(tmp_path: Path) -> None:
    for i, name in enumerate(("package-0", "psys")):
        _write(
            tmp_path, {f"{RAPL}/intel-rapl:{i}/name": name, f"{RAPL}/intel-rapl:{i}/energy_uj": 1}
        )
    (counter,) = Sensors(tmp_path).energy_counters()
    assert counter.joules_since_last() == 0
    _write(tmp_path, {f"{RAPL}/intel-rapl:1/energy_uj": 3_000_001})
    assert counter.joules_since_last() == 3


def test_counters_for_root_only_are_not_there(tmp_path: Path) -> None:
    zone = tmp_path / RAPL / "intel-rapl:0"
    _write(tmp_path, {f"{RAPL}/intel-rapl:0/name": "package-0"})
    (zone / "energy_uj").mkdir()  # as unreadable as it gets, for root as well
    assert Sensors(tmp_path).energy_counters() == []


@pytest.mark.parametrize(
    ("values", "watts"),
    [
        ({"power_now": 7_500_000}, 7.5),
        ({"current_now": 2_000_000, "voltage_now": 4_000_000}, 8.0),
        ({"current_now": -2_000_000, "voltage_now": 4_000_000}, 8.0),
        ({"current_now": 2_000_000}, None),
        ({}, None),
    ],
)
def test_a_battery_tells_what_it_gives(
    tmp_path: Path, values: dict[str, int], watts: float | None
) -> None:
    files = {"type": "Battery", "status": "Discharging", **values}
    _write(tmp_path, {f"{BATTERY}/{name}": value for name, value in files.items()})
    assert Sensors(tmp_path).battery_w() == watts
    assert this_machine(tmp_path).has_battery is True
    clock = Clock()
    meter = PowerMeter(Sensors(tmp_path), clock)
    meter.sample()
    clock.now_s += 3
    meter.sample()
    assert meter.watts == watts


def test_a_charger_hides_what_the_machine_draws(tmp_path: Path) -> None:
    _write(
        tmp_path,
        {f"{BATTERY}/type": "Battery", f"{BATTERY}/status": "Charging", f"{BATTERY}/power_now": 9},
    )
    assert Sensors(tmp_path).battery_w() is None


def test_a_mouse_is_no_laptop(tmp_path: Path) -> None:
    mouse = "sys/class/power_supply/hidpp_battery_0"
    _write(tmp_path, {f"{mouse}/type": "Battery", f"{mouse}/scope": "Device"})
    assert this_machine(tmp_path).has_battery is False
