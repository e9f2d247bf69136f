"""Read the description, kind and sensors of this machine, and limit what its allocator keeps.

Sensors are read from `/sys`, on Linux only. On other systems, only the description is available,
from `psutil` and `platform`.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from profiles.device_profile import DeviceKind


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h of glibc
_LARGEST_MMAP_THRESHOLD = 32 * 2**20

IDLE_BYTES: Final = 2 * 2**20  # a device that stores less, and has no runs, is between two steps


def return_free_memory() -> None:
    """Return all free memory to the kernel. Without glibc's allocator, do nothing."""
    if sys.platform.startswith("linux"):
        with suppress(OSError, AttributeError):  # not glibc
            ctypes.CDLL(None).malloc_trim(0)


def hold_strips_well() -> Callable[[], None]:
    """Make glibc reuse the memory of freed arrays instead of returning it to the kernel.

    By default, glibc adapts its thresholds to the sizes of freed memory blocks. With arrays of many
    sizes, a process would spend much of its time on page faults, and fragmentation would increase
    its memory use.

    Returns:
        `return_free_memory`. Call it when the device is idle.
    """
    if sys.platform.startswith("linux"):
        with suppress(OSError, AttributeError):  # not glibc
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(_M_ARENA_MAX, 1)
            mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
            mallopt(_M_TRIM_THRESHOLD, 8 * _LARGEST_MMAP_THRESHOLD)
    return return_free_memory


_CPU_SENSORS: Final = ("cpu", "coretemp", "k10temp", "zenpower", "x86_pkg_temp", "soc", "tdie")
_GPU_DRIVERS: Final = ("amdgpu", "i915", "nouveau", "radeon", "xe")
_PLAUSIBLE_C: Final = (1.0, 125.0)  # disconnected sensors show 0, -273 or 127


@dataclass(frozen=True, slots=True)
class Machine:
    """A description of this machine. Unknown strings are empty, other unknown values None.

    Attributes:
        system: name and release of the operating system, and processor architecture.
        board: name of the machine in its device tree; empty if it has no device tree.
        chassis: type of the case, as in SMBIOS 3.7, table 17; 0 if unknown or a virtual machine.
    """

    cpu: str
    cores: int
    memory_bytes: int | None
    system: str
    has_battery: bool | None
    board: str
    chassis: int


def this_machine(root: Path = Path("/")) -> Machine:
    """Describe this machine. `root` is the folder that contains `proc` and `sys`."""
    return Machine(
        cpu=_cpu_name(root),
        cores=len(usable_cores()),
        memory_bytes=total_memory_bytes(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}".strip(),
        has_battery=_has_battery(root),
        board=(read_file(root / "proc/device-tree/model") or "").rstrip("\0"),
        chassis=_chassis(root),
    )


def _chassis(root: Path) -> int:
    if re.search(
        r"^flags\s*:.*\bhypervisor\b", read_file(root / "proc/cpuinfo") or "", re.MULTILINE
    ):
        return 0  # some hypervisors state the case of a desktop
    text = read_file(root / "sys/class/dmi/id/chassis_type") or ""
    return int(text) if text.isdecimal() else 0


def usable_cores() -> list[int]:
    """Return the indices of the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _cpu_name(root: Path) -> str:
    text = read_file(root / "proc/cpuinfo")
    for key in ("model name", "Hardware", "Model", "cpu model"):  # x86, old and new ARM, MIPS
        found = re.search(rf"^{key}\s*:\s*(.+)$", text or "", re.MULTILINE)
        if found:
            return found[1].strip()
    if sys.platform == "darwin":
        with suppress(OSError, subprocess.SubprocessError):
            shown = subprocess.run(
                ["sysctl", "-n", "machdep.cpu.brand_string"],
                capture_output=True, text=True, timeout=5, check=True,
            )  # fmt: skip
            return shown.stdout.strip()
    return platform.processor()


def _memory_groups(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit and the use, in bytes, of each control group that limits this process.

    Services and containers have such limits on Linux. In a container, the kernel may report the
    group's path on the host, but the group's files are at the root.
    """
    groups = root / "sys/fs/cgroup"
    for line in (read_file(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        first = groups / "memory" if controllers else groups
        names = ("limit_in_bytes", "usage_in_bytes") if controllers else ("max", "current")
        for folder in dict.fromkeys((first / path.strip("/"), first)):
            most, now = (read_file(folder / f"memory.{name}") or "" for name in names)
            if most.isdecimal() and now.isdecimal():
                yield int(most), int(now)


def total_memory_bytes(root: Path = Path("/")) -> int | None:
    """Return the machine's memory in bytes, or this process's limit if smaller; None if unknown."""
    found = [most for most, _ in _memory_groups(root)]
    with suppress(ImportError):
        import psutil

        return min([int(psutil.virtual_memory().total), *found])
    with suppress(AttributeError, ValueError, OSError):
        return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *found])
    return None


def available_memory_bytes(root: Path = Path("/")) -> int | None:
    """Return the memory that a new process can use, in bytes; None if unknown."""
    try:
        import psutil
    except ImportError:
        return None
    rest = (max(0, most - now) for most, now in _memory_groups(root))
    return min([int(psutil.virtual_memory().available), *rest])


def _has_battery(root: Path) -> bool | None:
    if (root / "sys/class/power_supply").is_dir():
        return any(True for _ in _batteries(root))
    with suppress(ImportError, AttributeError, OSError):
        import psutil

        return psutil.sensors_battery() is not None
    return None


# --- sensors ---


class Sensors:
    """Reads the temperature, frequency and energy sensors below `root`, which contains `sys`."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def temperature_c(self) -> float | None:
        """Return the highest temperature of the CPU, or else of all sensors; None if unknown."""
        found = [*self._hwmon(), *self._zones()]
        named = [c for name, c in found if any(word in name.lower() for word in _CPU_SENSORS)]
        return max(named or [c for _, c in found], default=None)

    def of_gpus_c(self) -> list[float]:
        """Return the temperatures of GPUs whose driver states them; NVIDIA's does not."""
        return [c for name, c in self._hwmon() if name in _GPU_DRIVERS]

    def _hwmon(self) -> Iterator[tuple[str, float]]:
        for folder in sorted((self._root / "sys/class/hwmon").glob("hwmon*")):
            name = read_file(folder / "name") or ""
            for file in sorted(folder.glob("temp*_input")):
                yield from _celsius(name, file)

    def _zones(self) -> Iterator[tuple[str, float]]:
        for folder in sorted((self._root / "sys/class/thermal").glob("thermal_zone*")):
            yield from _celsius(read_file(folder / "type") or "", folder / "temp")

    def battery_w(self) -> float | None:
        """Return the batteries' discharge power in W; None if unknown or not discharging."""
        watts = 0.0
        for folder in _batteries(self._root):
            if read_file(folder / "status") != "Discharging":
                return None
            power = _number(folder / "power_now")
            if power is None:
                current, voltage = (_number(folder / f"{n}_now") for n in ("current", "voltage"))
                if current is None or voltage is None:
                    return None
                power = current * voltage / 1e6
            watts += abs(power) / 1e6  # some drivers report discharge power as negative
        return watts or None

    def energy_counters(self) -> list[EnergyCounter]:
        """Return the platform-wide RAPL counter, or those of CPUs and memory if there is none."""
        packages, memory = [], []
        for folder in sorted((self._root / "sys/class/powercap").glob("intel-rapl*:*")):
            counter = EnergyCounter(folder)
            name = read_file(folder / "name") or ""
            if counter.microjoules() is None:
                continue
            if name == "psys":
                return [counter]
            if name.startswith("package"):
                packages.append(counter)
            elif name == "dram":
                memory.append(counter)
        return packages + memory


class EnergyCounter:
    """A RAPL energy counter, which restarts at 0 when it overflows."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._last: float | None = None

    def microjoules(self) -> float | None:
        """Return the counter's value in microjoules; None if it cannot be read."""
        return _number(self._folder / "energy_uj")

    def joules_since_last(self) -> float:
        """Return the energy in J since the previous call; 0 at the first call or if unreadable."""
        now, last = self.microjoules(), self._last
        self._last = now
        if now is None or last is None:
            return 0.0
        if now < last:
            now += _number(self._folder / "max_energy_range_uj") or 0.0
        return max(0.0, now - last) / 1e6


class PowerMeter:
    """Measures this machine's energy and mean power between the first and last `sample` calls.

    RAPL counters are used if available, and otherwise batteries. `source` is a user-facing
    description of the sensors. It is empty if the machine has neither.
    """

    def __init__(self, sensors: Sensors, clock: Callable[[], float] = time.perf_counter) -> None:
        self._sensors, self._clock = sensors, clock
        self._counters = sensors.energy_counters()
        self._first_s: float | None = None
        self._last_s = 0.0
        self._joules = 0.0
        self.source = ""
        if self._counters:
            self.source = "RAPL: processor and memory, without what else the machine has"
        elif sensors.battery_w() is not None:
            self.source = "battery"

    @property
    def available(self) -> bool:
        """Return True if this machine has sensors for power or energy."""
        return bool(self.source)

    def sample(self) -> None:
        """Update the total energy. Call this method again before a counter overflows twice."""
        now_s = self._clock()
        if self._counters:
            self._joules += sum(c.joules_since_last() for c in self._counters)
        elif self._first_s is not None:
            self._joules += (self._sensors.battery_w() or 0.0) * (now_s - self._last_s)
        if self._first_s is None:
            self._first_s = now_s
        self._last_s = now_s

    @property
    def joules(self) -> float | None:
        """Return the energy in J between the first and the last sample; None if unknown."""
        return None if self.watts is None else self._joules

    @property
    def watts(self) -> float | None:
        """Return the mean power in W between the first and the last sample; None if unknown."""
        if not self.available or self._first_s is None or self._last_s <= self._first_s:
            return None
        return self._joules / (self._last_s - self._first_s) or None


class SessionEnergy:
    """Reports the energy that this machine has used since the object was created."""

    def __init__(self, meter: PowerMeter) -> None:
        self._meter = meter
        meter.sample()

    def telemetry(self) -> dict[str, float]:
        """Return the telemetry value `energy_j` in J; an empty dictionary if it is unknown."""
        self._meter.sample()
        joules = self._meter.joules
        return {} if joules is None else {"energy_j": joules}


def _batteries(root: Path) -> Iterator[Path]:
    for folder in sorted((root / "sys/class/power_supply").glob("*")):
        # The battery of a mouse has the scope "Device".
        if read_file(folder / "type") == "Battery" and read_file(folder / "scope") != "Device":
            yield folder


def _celsius(name: str, file: Path) -> Iterator[tuple[str, float]]:
    value = _number(file)
    if value is not None and _PLAUSIBLE_C[0] <= value / 1e3 <= _PLAUSIBLE_C[1]:
        yield name, value / 1e3


def _number(file: Path) -> float | None:
    text = read_file(file)
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def read_file(file: Path) -> str | None:
    """Return the stripped text of a sensor's file; None if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # missing, not readable, or the driver has no value now
        return None


# Matches the names of single-board computers in device trees. A device tree alone is not enough:
# phones, laptops and virtual machines also have device trees.
_BOARDS: Final = re.compile(
    r"\b(raspberry pi|orange ?pi|banana ?pi|rock ?pi|rock ?\d|rockpro|nanop[ic]|odroid|jetson|"
    r"orin\b|beagle|tinker board|visionfive|khadas|libre computer)",
    re.IGNORECASE,
)

_SERVERS: Final = re.compile(r"\b(epyc|xeon(?!.* w)|ampere|neoverse|graviton)", re.IGNORECASE)

# Types of cases by kind of device.
_CASES: Final = {
    "TABLET": (30,),
    "LAPTOP": (8, 9, 10, 14, 31, 32),
    "DESKTOP": (3, 4, 6, 7, 13, 15, 16, 24, 35),
    "SERVER": (17, 23, 28),
}


def kind_of(machine: Machine, *, android: bool) -> DeviceKind | None:
    """Return a machine's kind; None if its case, board and processor do not reveal the kind."""
    from profiles.device_profile import DeviceKind  # its imports would slow down every command

    if android:
        return DeviceKind.PHONE
    if _BOARDS.search(machine.board):
        return DeviceKind.SBC
    for name, types in _CASES.items():
        if machine.chassis in types:
            return DeviceKind[name]
    if machine.has_battery:
        return DeviceKind.LAPTOP
    if _SERVERS.search(machine.cpu):
        return DeviceKind.SERVER
    mac = machine.system.startswith("Darwin") and machine.has_battery is False
    return DeviceKind.DESKTOP if mac else None


def on_android(platform: str = sys.platform, environ: Mapping[str, str] = os.environ) -> bool:
    """Return True on Android, as indicated by the platform name or by Termux's `ANDROID_ROOT`."""
    return platform == "android" or "ANDROID_ROOT" in environ
