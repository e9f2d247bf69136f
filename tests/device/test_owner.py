"""Observing a machine: fake file systems and commands, with what real ones print."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from cleave.device.owner import (
    LinuxSensors,
    MacSensors,
    WindowsSensors,
    observe,
    run_command,
    this_machine,
)
from cleave.device.policy import Condition, Observation, Policy
from cleave.machine.gpu_sensors import GpuSensors
from cleave.machine.sensors import available_memory_bytes, total_memory_bytes

NOW_S = 1_800_000_000.0


class FakeCommands:
    """Answers by a command's first words."""

    def __init__(self, answers: Mapping[str, str]) -> None:
        self.answers = answers

    def __call__(self, command: Sequence[str]) -> str | None:
        line = " ".join(command)
        return next((text for start, text in self.answers.items() if line.startswith(start)), None)


def linux(root: Path, answers: Mapping[str, str] | None = None, **environment: str) -> LinuxSensors:
    return LinuxSensors(root, FakeCommands(answers or {}), lambda: NOW_S, environment)


def write(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def terminal(root: Path, name: str, idle_s: float) -> None:
    write(root, {name: ""})
    os.utime(root / name, (NOW_S - idle_s, NOW_S))


# --- idleness on Linux ---


def logind(*sessions: tuple[str, str, float | None, str]) -> dict[str, str]:
    """Sessions as (type, idle hint, idle since so many seconds, class)."""
    blocks = []
    for kind, hint, since_s, role in sessions:
        since = 0 if since_s is None else int((NOW_S - since_s) * 1e6)
        blocks.append(f"Type={kind}\nClass={role}\nIdleHint={hint}\nIdleSinceHint={since}")
    names = "".join(f"  c{i} 1000 ann  seat0 tty2\n" for i in range(len(sessions)))
    return {"loginctl list-sessions": names, "loginctl show-session": "\n\n".join(blocks) + "\n"}


@pytest.mark.parametrize(
    ("sessions", "idle_s"),
    [
        ([("wayland", "yes", 120.0, "user")], 120),
        ([("wayland", "no", 5000.0, "user")], 0),  # in use since then
        ([("x11", "no", None, "user")], 0),  # has never told: then it is in use
        ([("tty", "no", 40.0, "user"), ("x11", "yes", 900.0, "user")], 40),  # someone by ssh
        ([("wayland", "yes", 9.0, "greeter"), ("tty", "yes", 4000.0, "user")], 4000),
    ],
)
def test_logind(
    tmp_path: Path, sessions: list[tuple[str, str, float | None, str]], idle_s: float
) -> None:
    assert linux(tmp_path, logind(*sessions)).idle_s() == pytest.approx(idle_s, abs=1e-3)


def test_the_screen_saver_knows_better_than_logind(tmp_path: Path) -> None:
    answers = {"xprintidle": "61500\n", **logind(("x11", "no", None, "user"))}
    assert linux(tmp_path, answers, DISPLAY=":0").idle_s() == 61.5
    assert linux(tmp_path, answers).idle_s() == 0  # without a display it is not asked
    by_ssh = {"xprintidle": "61500\n", **logind(("tty", "no", 3.0, "user"))}
    assert linux(tmp_path, by_ssh, DISPLAY=":0").idle_s() == pytest.approx(3)


def test_terminals_tell_where_nothing_else_does(tmp_path: Path) -> None:
    assert linux(tmp_path).idle_s() is None
    terminal(tmp_path, "dev/tty1", 5000)
    terminal(tmp_path, "dev/ttyUSB0", 1)  # a serial port, not a keyboard
    assert linux(tmp_path).idle_s() == pytest.approx(5000)
    terminal(tmp_path, "dev/pts/0", 70)
    terminal(tmp_path, "dev/pts/ptmx", 1)
    assert linux(tmp_path).idle_s() == pytest.approx(70)


@pytest.mark.parametrize("socket", ["tmp/.X11-unix/X0", "run/user/1000/wayland-0"])
def test_terminals_know_nothing_of_a_graphical_session(tmp_path: Path, socket: str) -> None:
    terminal(tmp_path, "dev/tty1", 5000)
    write(tmp_path, {socket: ""})
    assert linux(tmp_path).idle_s() is None


@pytest.mark.parametrize("sessions", [[], [("wayland", "no", 9.0, "greeter")]])
def test_a_machine_where_nobody_is_logged_in_is_idle(
    tmp_path: Path, sessions: list[tuple[str, str, float | None, str]]
) -> None:
    """It shows a greeter, or nothing: terminals tell since when."""
    terminal(tmp_path, "dev/tty1", 5000)
    write(tmp_path, {"run/user/120/wayland-0": ""})
    answers = logind(*sessions) if sessions else {"loginctl list-sessions": ""}
    assert linux(tmp_path, answers).idle_s() == pytest.approx(5000)


# --- power ---


def supply(name: str, **fields: str) -> dict[str, str]:
    return {f"sys/class/power_supply/{name}/{key}": text for key, text in fields.items()}


@pytest.mark.parametrize(
    ("supplies", "charging"),
    [
        ({}, True),
        (supply("AC", type="Mains", online="0"), True),  # a desktop with an odd supply
        (supply("AC", type="Mains", online="1") | supply("B", type="Battery", status="Full"), True),
        (
            supply("AC", type="Mains", online="0")
            | supply("UCSI", type="USB", online="1")
            | supply("B", type="Battery", status="Charging"),
            True,
        ),
        (
            supply("AC", type="Mains", online="0")
            | supply("B", type="Battery", status="Discharging"),
            False,
        ),
        (supply("B", type="Battery", status="Discharging"), False),
        (supply("B", type="Battery", status="Not charging"), True),
        (supply("B", type="Battery", status="Unknown"), None),
        (supply("M", type="Battery", status="Discharging", scope="Device"), True),
    ],
)
def test_charging(tmp_path: Path, supplies: dict[str, str], charging: bool | None) -> None:
    write(tmp_path, supplies)
    assert linux(tmp_path).charging() is charging


# --- temperature ---


# --- other systems, by what their tools are documented to print ---


def test_macos() -> None:
    ioreg = '  |   "HIDIdleTime" = 4310000000\n  |   "HIDClickTime" = 500000000\n'
    drawing = "Now drawing from '{} Power'\n -InternalBattery-0 (id=1)\t80%; charging\n"
    sensors = MacSensors(FakeCommands({"ioreg": ioreg, "pmset": drawing.format("AC")}))
    assert sensors.idle_s() == pytest.approx(4.31)
    assert sensors.charging() is True
    assert sensors.temperature_c() is None
    assert MacSensors(FakeCommands({"pmset": drawing.format("Battery")})).charging() is False
    assert MacSensors(FakeCommands({})).idle_s() is None
    assert MacSensors(FakeCommands({})).charging() is None


class FakeWindows:
    """Both of its libraries."""

    def __init__(self, line: int, battery: int) -> None:
        self.line, self.battery = line, battery

    def GetLastInputInfo(self, pointer: Any) -> int:  # noqa: N802 - its name
        assert pointer._obj.cbSize == 8
        pointer._obj.dwTime = 2**32 - 1000
        return 1

    def GetTickCount(self) -> int:  # noqa: N802
        return ctypes.c_int32(4000).value

    def GetSystemPowerStatus(self, pointer: Any) -> int:  # noqa: N802
        pointer._obj.ACLineStatus, pointer._obj.BatteryFlag = self.line, self.battery
        return 1


@pytest.mark.parametrize(
    ("line", "battery", "charging"),
    [(1, 8, True), (0, 1, False), (255, 255, None), (0, 128, True)],
)
def test_windows(line: int, battery: int, charging: bool | None) -> None:
    windows = FakeWindows(line, battery)
    sensors = WindowsSensors(windows, windows)
    assert sensors.idle_s() == pytest.approx(5)  # the counter started anew between
    assert sensors.charging() is charging
    assert sensors.temperature_c() is None


# --- together ---


def test_only_what_the_policy_needs_is_looked_at() -> None:
    class Never:
        def idle_s(self) -> float | None:
            raise AssertionError

        def charging(self) -> bool | None:
            return False

        def temperature_c(self) -> float | None:
            raise AssertionError

    policy = Policy(when=frozenset({Condition.CHARGING}))
    assert observe(Never(), policy, hour=4.5) == Observation(4.5, charging=False)
    assert 0 <= observe(Never(), Policy()).hour < 24


def test_this_machine_can_be_asked() -> None:
    everything = Policy(when=frozenset(Condition), max_temperature_c=80)
    seen = observe(this_machine(), everything)
    assert seen.idle_s is None or seen.idle_s >= 0
    assert (total_memory_bytes() or 0) > 10**8


@pytest.mark.parametrize(
    ("line", "files"),
    [
        ("0::/cleave.service", {"cleave.service/memory.max": 900,
         "cleave.service/memory.current": 300}),
        ("0::/on/the/host", {"memory.max": 900, "memory.current": 300}),
        ("4:cpu,memory:/x", {"memory/x/memory.limit_in_bytes": 900,
         "memory/x/memory.usage_in_bytes": 300}),
        ("3:cpu:/x\n0::/", {"memory.max": "max", "memory.current": 300}),
    ],
)  # fmt: skip
def test_a_control_group_limits_the_memory(
    tmp_path: Path, line: str, files: dict[str, object]
) -> None:
    groups = {f"sys/fs/cgroup/{name}": value for name, value in files.items()}
    for name, value in {"proc/self/cgroup": line, **groups}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    limited = "max" not in files.values()
    assert (total_memory_bytes(tmp_path) == 900) is limited
    assert (available_memory_bytes(tmp_path) == 600) is limited


def test_commands_that_fail_or_are_not_there_answer_nothing() -> None:
    assert run_command(["echo", "x"]) == "x\n"
    assert run_command(["false"]) is None
    assert run_command(["/no/such/command"]) is None


# --- GPUs ---


@pytest.mark.parametrize(
    ("use", "gpu_c", "idle_s", "hot_c"),
    [("3", "84", 400, 84), ("60", "40", 0, 55), ("-", "[N/A]", 400, 55)],
)
def test_gpus_count_as_use_and_heat(
    tmp_path: Path, use: str, gpu_c: str, idle_s: float, hot_c: float
) -> None:
    """What is unknown of the CPU stays unknown, whatever the GPU shows."""
    table = f"# gpu pid type sm mem enc dec command\n 0 8617 G {use} 1 - - game\n"
    answers = {"nvidia-smi pmon": table, "nvidia-smi --query-gpu=temperature": f"{gpu_c}\n"}
    gpus = GpuSensors(FakeCommands(answers), tmp_path, lambda: 0.0, has_nvidia=True)
    terminal(tmp_path, "dev/tty1", 400)
    lent = Policy(when=frozenset({Condition.IDLE}), max_temperature_c=80)
    assert observe(linux(tmp_path), lent, gpus=gpus).temperature_c is None
    write(
        tmp_path,
        {"sys/class/hwmon/hwmon0/name": "k10temp", "sys/class/hwmon/hwmon0/temp1_input": "55000"},
    )
    seen = observe(linux(tmp_path), lent, gpus=gpus)
    assert (seen.idle_s, seen.temperature_c) == (idle_s, hot_c)
