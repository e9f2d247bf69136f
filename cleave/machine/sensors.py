"""What this machine is and what its sensors show. What the system does not tell is None.

On Linux everything is read from `/proc` and `/sys`; a copy of such a tree will do as well.
Elsewhere `psutil` and `platform` say what they know, and there are no sensors.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_CPU_SENSORS: Final = ("cpu", "coretemp", "k10temp", "zenpower", "x86_pkg_temp", "soc", "tdie")
_PLAUSIBLE_C: Final = (1.0, 125.0)  # sensors that are not connected show 0, -273 or 127


@dataclass(frozen=True, slots=True)
class Machine:
    """This machine, as it describes itself.

    Attributes:
        cpu: its name; empty where unknown.
        cores: that this process may use.
        memory_bytes: installed; None where unknown.
        system: operating system and architecture.
        has_battery: whether it can run on one; None where unknown.
        board: what its device tree calls it; empty where it has none, as on PCs.
    """

    cpu: str
    cores: int
    memory_bytes: int | None
    system: str
    has_battery: bool | None
    board: str


def this_machine(root: Path = Path("/")) -> Machine:
    """Describe this machine.

    Args:
        root: where `proc` and `sys` are.
    """
    return Machine(
        cpu=_cpu_name(root),
        cores=len(usable_cores()),
        memory_bytes=total_memory_bytes(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}".strip(),
        has_battery=_has_battery(root),
        board=(_read(root / "proc/device-tree/model") or "").rstrip("\0"),
    )


def usable_cores() -> list[int]:
    """The cores that this process may run on, by number."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _cpu_name(root: Path) -> str:
    text = _read(root / "proc/cpuinfo")
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


def total_memory_bytes() -> int | None:
    """The machine's memory; None where the system does not tell."""
    with suppress(ImportError):
        import psutil

        return int(psutil.virtual_memory().total)
    with suppress(AttributeError, ValueError, OSError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def _has_battery(root: Path) -> bool | None:
    if (root / "sys/class/power_supply").is_dir():
        return any(True for _ in _batteries(root))
    with suppress(ImportError, AttributeError, OSError):
        import psutil

        return psutil.sensors_battery() is not None
    return None


# --- sensors ---


class Sensors:
    """Temperature, frequency and energy, where the system exposes them.

    Args:
        root: where `sys` is.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def temperature_c(self) -> float | None:
        """Of the processor, its hottest sensor; of all sensors where none is named after it."""
        found = [*self._hwmon(), *self._zones()]
        named = [c for name, c in found if any(word in name.lower() for word in _CPU_SENSORS)]
        return max(named or [c for _, c in found], default=None)

    def _hwmon(self) -> Iterator[tuple[str, float]]:
        for folder in sorted((self._root / "sys/class/hwmon").glob("hwmon*")):
            name = _read(folder / "name") or ""
            for file in sorted(folder.glob("temp*_input")):
                yield from _celsius(name, file)

    def _zones(self) -> Iterator[tuple[str, float]]:
        for folder in sorted((self._root / "sys/class/thermal").glob("thermal_zone*")):
            yield from _celsius(_read(folder / "type") or "", folder / "temp")

    def frequency_hz(self) -> float | None:
        """Now, as the mean over all cores."""
        folder = self._root / "sys/devices/system/cpu"
        files = folder.glob("cpu[0-9]*/cpufreq/scaling_cur_freq")
        kilohertz = [value for file in files if (value := _number(file)) is not None]
        return 1e3 * sum(kilohertz) / len(kilohertz) if kilohertz else None

    def battery_w(self) -> float | None:
        """What the batteries give; None unless they are the only source."""
        watts = 0.0
        for folder in _batteries(self._root):
            if _read(folder / "status") != "Discharging":
                return None
            power = _number(folder / "power_now")
            if power is None:
                current, voltage = (_number(folder / f"{n}_now") for n in ("current", "voltage"))
                if current is None or voltage is None:
                    return None
                power = current * voltage / 1e6
            watts += abs(power) / 1e6  # some drivers count discharging as negative
        return watts or None

    def energy_counters(self) -> list[EnergyCounter]:
        """RAPL's: the whole platform where it is counted, else processor packages and memory.

        Empty where there are none, or where only root may read them.
        """
        packages, memory = [], []
        for folder in sorted((self._root / "sys/class/powercap").glob("intel-rapl*:*")):
            counter = EnergyCounter(folder)
            name = _read(folder / "name") or ""
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
    """One counter of RAPL, which starts again from 0 when it is full."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._last: float | None = None

    def microjoules(self) -> float | None:
        """What it shows; None where it cannot be read."""
        return _number(self._folder / "energy_uj")

    def joules_since_last(self) -> float:
        """Counted since the call before; 0 the first time."""
        now, last = self.microjoules(), self._last
        self._last = now
        if now is None or last is None:
            return 0.0
        if now < last:
            now += _number(self._folder / "max_energy_range_uj") or 0.0
        return max(0.0, now - last) / 1e6


class PowerMeter:
    """Mean power between the first and the last call of `sample`.

    Args:
        sensors: what to read: RAPL, else batteries.
        clock: in seconds.
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
        """Whether this machine tells its power."""
        return bool(self.source)

    def sample(self) -> None:
        """Read the sensors; often enough that a counter is not full twice in between."""
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
        """Between the first and the last sample; None as `watts` is."""
        return None if self.watts is None else self._joules

    @property
    def watts(self) -> float | None:
        """None where nothing is exposed, or before the second sample."""
        if not self.available or self._first_s is None or self._last_s <= self._first_s:
            return None
        return self._joules / (self._last_s - self._first_s) or None


class SessionEnergy:
    """What this machine drew since this was made, for telemetry.

    The whole machine as far as it is counted: also what else it did in that time.

    Args:
        meter: of this machine.
    """

    def __init__(self, meter: PowerMeter) -> None:
        self._meter = meter
        meter.sample()

    def telemetry(self) -> dict[str, float]:
        """`energy_j`; nothing where the machine does not tell."""
        self._meter.sample()
        joules = self._meter.joules
        return {} if joules is None else {"energy_j": joules}


def _batteries(root: Path) -> Iterator[Path]:
    for folder in sorted((root / "sys/class/power_supply").glob("*")):
        # A mouse has a battery, too; its scope is "Device".
        if _read(folder / "type") == "Battery" and _read(folder / "scope") != "Device":
            yield folder


def _celsius(name: str, file: Path) -> Iterator[tuple[str, float]]:
    value = _number(file)
    if value is not None and _PLAUSIBLE_C[0] <= value / 1e3 <= _PLAUSIBLE_C[1]:
        yield name, value / 1e3


def _number(file: Path) -> float | None:
    text = _read(file)
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _read(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # not there, not for everyone, or the driver has no value now
        return None
