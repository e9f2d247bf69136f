"""Sensors for the owner's policy: last use, power supply and temperature of the machine.

The sources are `/sys`, `/dev` and logind on Linux, `ioreg` and `pmset` on macOS, and the Win32 API
on Windows. A value that the system does not provide is None.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

from cleave.device.policy import Condition, Observation, Policy
from cleave.errors import UsageError
from cleave.machine.gpu_sensors import GpuSensors
from cleave.machine.sensors import Sensors, read_file, usable_cores

Runner: TypeAlias = Callable[[Sequence[str]], str | None]  # None if the command fails


_NUMBER: Final = re.compile(r"\s*-?\d+(\.\d+)?\s*")


class OwnerSensors(Protocol):
    """Sensors of a machine. A method returns None if the system does not provide the value."""

    def idle_s(self) -> float | None:
        """Return the time since the last user input in any session, in seconds."""

    def charging(self) -> bool | None:
        """Return True if the machine is plugged in or has no battery."""

    def temperature_c(self) -> float | None:
        """Return the highest temperature of the CPU, or else of all sensors, in degrees Celsius."""
        return None  # macOS and Windows provide no temperature to ordinary users


def observe(
    sensors: OwnerSensors,
    policy: Policy,
    hour: float | None = None,
    data_bytes: int = 0,
    gpus: GpuSensors | None = None,
) -> Observation:
    """Return the current values of the sensors that the policy depends on.

    Args:
        hour: fractional local hour of the day; None to use the current time.
        data_bytes: number of bytes transferred in the current span of the data cap.
        gpus: sensors of the machine's GPUs; None to leave GPUs out.
    """
    now = time.localtime()
    temperature_c = None if policy.max_temperature_c is None else sensors.temperature_c()
    if temperature_c is not None and gpus is not None:  # without the CPU's, it stays unknown
        temperature_c = max(temperature_c, gpus.temperature_c() or temperature_c)
    idle_s = sensors.idle_s() if Condition.IDLE in policy.when else None
    if idle_s is not None and gpus is not None:  # a game or a video call, without other input
        used_s = gpus.idle_s()
        idle_s = idle_s if used_s is None else min(idle_s, used_s)
    return Observation(
        hour=now.tm_hour + now.tm_min / 60 if hour is None else hour,
        idle_s=idle_s,
        charging=sensors.charging() if Condition.CHARGING in policy.when else None,
        temperature_c=temperature_c,
        data_bytes=data_bytes,
    )


def this_machine() -> OwnerSensors:
    """Return the sensors for this machine's operating system."""
    if sys.platform == "darwin":
        return MacSensors()
    if sys.platform == "win32":
        return WindowsSensors(ctypes.windll.kernel32, ctypes.windll.user32)
    return LinuxSensors()


def run_command(command: Sequence[str]) -> str | None:
    """Run a command. Return its output, or None if the command fails or takes over 5 s."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def step_aside(niceness: int = 10) -> None:
    """Raise this process's niceness to at least `niceness`. Do nothing on Windows."""
    if sys.platform != "win32":
        os.nice(max(0, niceness - os.nice(0)))


def cores_to_lend(count: int) -> list[int]:
    """Return the indices of the last `count` usable cores.

    The first cores are not lent, because hardware interrupts are usually handled there.

    Raises:
        UsageError: if `count` is below 1 or above the number of usable cores.
    """
    usable = usable_cores()
    if not 1 <= count <= len(usable):
        raise UsageError(f"--cores is {count}; this machine can lend 1 to {len(usable)}")
    return usable[-count:]


def keep_to_cores(count: int) -> bool:
    """Restrict this process to `cores_to_lend(count)` on Linux. Return False on other systems.

    Call this function before libraries start threads, because threads inherit the restriction.
    Without the restriction, only the number of threads limits the CPU usage.

    Raises:
        UsageError: if `count` is below 1 or above the number of usable cores.
    """
    kept = cores_to_lend(count)
    if sys.platform != "linux":
        return False
    os.sched_setaffinity(0, kept)
    return True


class LinuxSensors(OwnerSensors):
    """Sensors on Linux.

    The time of the last input comes from logind and, with an X display, from `xprintidle`. Without
    these sources, the time of the last terminal input is used. In a graphical session, `idle_s`
    then returns None, because terminals do not receive the session's input.
    """

    def __init__(
        self,
        root: Path = Path("/"),
        run: Runner = run_command,
        clock: Callable[[], float] = time.time,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._root = root
        self._run = run
        self._clock = clock
        self._environment = environment

    def idle_s(self) -> float | None:
        screen_s = self._screen_idle_s()
        sessions = self._sessions()
        idle = [] if screen_s is None else [screen_s]
        for session in sessions or []:
            idle_s = self._session_idle_s(session, by_display=screen_s is not None)
            idle += [] if idle_s is None else [idle_s]
        if idle:
            return min(idle)
        if sessions is None and self._has_graphical_session():
            return None
        return self._terminals_idle_s()  # no other source exists, or no user is logged in

    def charging(self) -> bool | None:
        online, discharging = [], []
        for supply in sorted((self._root / "sys/class/power_supply").glob("*")):
            if read_file(supply / "scope") == "Device":  # the battery of a mouse
                continue
            match read_file(supply / "type"):
                case "Mains" | "USB":
                    online.append(read_file(supply / "online") == "1")
                case "Battery":
                    discharging.append(
                        {"Discharging": True, "Unknown": None}.get(
                            read_file(supply / "status") or "Unknown", False
                        )
                    )
        if not discharging:
            return True
        if online:
            return any(online)
        return None if None in discharging else not any(discharging)

    def temperature_c(self) -> float | None:
        return Sensors(self._root).temperature_c()

    def _screen_idle_s(self) -> float | None:
        if not self._environment.get("DISPLAY"):
            return None
        text = self._run(["xprintidle"])
        return float(text) / 1000 if text and _NUMBER.fullmatch(text) else None

    def _sessions(self) -> list[dict[str, str]] | None:
        """Return the properties of all user sessions; None if logind does not answer."""
        listed = self._run(["loginctl", "list-sessions", "--no-legend"])
        if listed is None:
            return None
        names = [line.split()[0] for line in listed.splitlines() if line.split()]
        if not names:
            return []
        wanted = ("Class", "Type", "IdleHint", "IdleSinceHint")
        shown = self._run(
            ["loginctl", "show-session", *names, *(f"--property={name}" for name in wanted)]
        )
        if shown is None:
            return None
        sessions = [
            dict(line.partition("=")[::2] for line in block.splitlines())
            for block in shown.strip().split("\n\n")
        ]
        return [s for s in sessions if s.get("Class") == "user"]  # skip login screens and services

    def _session_idle_s(self, session: dict[str, str], *, by_display: bool) -> float | None:
        """Return the time in seconds since the last user input in a session.

        `session` contains logind's properties. The result is None if the session has no known user
        input, or if `xprintidle` reports the input (`by_display`).
        """
        since = session.get("IdleSinceHint", "")
        since_s = int(since) / 1e6 if since.isdigit() else 0.0
        idle_s = max(0.0, self._clock() - since_s)
        if session.get("Type") in ("x11", "wayland", "mir"):
            # A desktop sets IdleHint after a delay. IdleSinceHint is when IdleHint last changed.
            return None if by_display else idle_s if session.get("IdleHint") == "yes" else 0.0
        # For a terminal session, IdleSinceHint is the time of the last input.
        return idle_s if session.get("Type") == "tty" and since_s else None

    def _has_graphical_session(self) -> bool:
        sockets = [*self._root.glob("tmp/.X11-unix/X*"), *self._root.glob("run/user/*/wayland-*")]
        shown = {"DISPLAY", "WAYLAND_DISPLAY"} & self._environment.keys()
        return bool(sockets or shown)

    def _terminals_idle_s(self) -> float | None:
        """Return the time in seconds since the last input on any terminal; None if unknown."""
        used = []
        for folder, pattern in (("dev", "tty[0-9]*"), ("dev/pts", "[0-9]*")):
            for terminal in (self._root / folder).glob(pattern):
                try:
                    used.append(terminal.stat().st_atime)
                except OSError:  # the terminal was closed meanwhile
                    continue
        return max(0.0, self._clock() - max(used)) if used else None


class MacSensors(OwnerSensors):
    """Sensors on macOS, from `ioreg` and `pmset`. Ordinary users cannot read temperatures."""

    def __init__(self, run: Runner = run_command) -> None:
        self._run = run

    def idle_s(self) -> float | None:
        text = self._run(["ioreg", "-r", "-d", "1", "-c", "IOHIDSystem"])
        found = re.search(r'"HIDIdleTime"\s*=\s*(\d+)', text or "")
        return int(found[1]) / 1e9 if found else None

    def charging(self) -> bool | None:
        text = self._run(["pmset", "-g", "batt"])
        return "'AC Power'" in text if text else None


class _LastInput(ctypes.Structure):
    _fields_ = (("cbSize", ctypes.c_uint), ("dwTime", ctypes.c_uint32))


class _PowerStatus(ctypes.Structure):
    _fields_ = (
        ("ACLineStatus", ctypes.c_ubyte),
        ("BatteryFlag", ctypes.c_ubyte),
        ("BatteryLifePercent", ctypes.c_ubyte),
        ("SystemStatusFlag", ctypes.c_ubyte),
        ("BatteryLifeTime", ctypes.c_uint32),
        ("BatteryFullLifeTime", ctypes.c_uint32),
    )


class WindowsSensors(OwnerSensors):
    """Sensors on Windows, from kernel32 and user32. Ordinary users cannot read temperatures."""

    def __init__(self, kernel32: Any, user32: Any) -> None:
        self._kernel32 = kernel32
        self._user32 = user32

    def idle_s(self) -> float | None:
        last = _LastInput(cbSize=ctypes.sizeof(_LastInput))
        if not self._user32.GetLastInputInfo(ctypes.byref(last)):
            return None
        # Both values count milliseconds modulo 2**32, so they wrap around after 49 days.
        return float((self._kernel32.GetTickCount() - last.dwTime) % 2**32) / 1000

    def charging(self) -> bool | None:
        status = _PowerStatus()
        if not self._kernel32.GetSystemPowerStatus(ctypes.byref(status)):
            return None
        if status.BatteryFlag != 255 and status.BatteryFlag & 128:  # no battery
            return True
        return {0: False, 1: True}.get(status.ACLineStatus)
