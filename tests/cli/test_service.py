"""Services: units that systemd and launchd read back as meant, and nothing left behind."""

from __future__ import annotations

import configparser
import getpass
import json
import plistlib
import shutil
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from cleave.device.service import (
    LABEL,
    UNIT_NAME,
    Installer,
    Service,
    ServiceManager,
    ServiceOutcome,
    launchd_plist,
    places,
    systemd_command,
    systemd_unit,
)
from cleave.errors import CleaveError, UsageError
from cleave_cli.main import app

URL = "ws://192.168.1.20:8765/ws#c=secret"
SERVICE = Service(("/opt/my env/100%/python", "-m", "cleave_cli", "join", "@/x"), 3 * 10**9)


# --- what is written ---


def read_back(line: str) -> list[str]:
    """Split a command line as systemd does: quotes, C escapes, specifiers."""
    words, i = [], 0
    escapes = {"n": "\n", "t": "\t", "r": "\r"}
    while i < len(line):
        assert line[i] == '"'
        i += 1
        word = ""
        while line[i] != '"':
            if line[i] == "\\":
                i += 1
                word += escapes.get(line[i], line[i])
            elif line[i] == "%":
                i += 1
                assert line[i] == "%", "a specifier"
                word += "%"
            else:
                word += line[i]
            i += 1
        words.append(word)
        i += 2
    return words


@given(st.lists(st.text(st.characters(blacklist_categories=["Cs", "Cc"])), min_size=1))
def test_systemd_reads_back_every_argument(arguments: list[str]) -> None:
    line = systemd_command(["/bin/python", *arguments])
    assert "\n" not in line
    assert read_back(line) == [":/bin/python", *arguments]


@pytest.mark.parametrize("program", ["/a'b/python", '/a"b', "/a\\b"])
def test_programs_that_systemd_does_not_start(program: str) -> None:
    with pytest.raises(UsageError, match="another folder"):
        systemd_command([program])


def _section(unit: str) -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None, delimiters=["="])
    parser.read_string(unit)
    return parser["Service"]


def test_the_unit_of_a_user() -> None:
    section = _section(systemd_unit(SERVICE))
    assert read_back(section["ExecStart"]) == [":/opt/my env/100%/python", *SERVICE.command[1:]]
    assert section["Nice"] == "10"
    assert section["MemoryMax"] == "3000000000"
    assert section["RestartPreventExitStatus"] == "2"
    assert "User" not in section
    assert "WantedBy=default.target" in systemd_unit(SERVICE)


def test_the_unit_of_a_machine() -> None:
    unit = systemd_unit(Service(SERVICE.command, 10**9, "ann"))
    assert _section(unit)["User"] == "ann"
    assert _section(unit)["ProtectSystem"] == "strict"
    assert "WantedBy=multi-user.target" in unit


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed here")
@pytest.mark.parametrize("account", [None, "root"])
def test_systemd_accepts_the_unit(tmp_path: Path, account: str | None) -> None:
    program = tmp_path / "100% my $HOME env" / "python"
    program.parent.mkdir()
    program.symlink_to(sys.executable)
    command = (str(program), "-m", "x", 'a "b" \\ $c %n é', "")
    (tmp_path / UNIT_NAME).write_text(systemd_unit(Service(command, 10**9, account)))
    verified = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / UNIT_NAME)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert UNIT_NAME not in verified.stderr
    assert verified.returncode == 0


def test_the_property_list() -> None:
    entries = plistlib.loads(launchd_plist(SERVICE, Path("/log")))
    assert entries["Label"] == LABEL
    assert entries["ProgramArguments"] == list(SERVICE.command)
    assert entries["RunAtLoad"] is True
    assert entries["KeepAlive"] == {"SuccessfulExit": False}
    assert "UserName" not in entries
    machine = Service(SERVICE.command, 10**9, "ann")
    assert plistlib.loads(launchd_plist(machine, Path("/log")))["UserName"] == "ann"


# --- installing ---


class FakeManager:
    """Notes commands; fails those that contain a word."""

    def __init__(self, failing: str = "") -> None:
        self.failing = failing
        self.commands: list[str] = []

    def __call__(self, command: Sequence[str]) -> ServiceOutcome:
        self.commands.append(" ".join(command))
        if self.failing and self.failing in command:
            return ServiceOutcome(1, "access denied")
        return ServiceOutcome(0, "active")


def installer(
    root: Path,
    run: FakeManager,
    manager: ServiceManager = ServiceManager.SYSTEMD,
    *,
    system: bool = False,
    booted: bool = True,
) -> Installer:
    if booted:
        (root / "run/systemd/system").mkdir(parents=True, exist_ok=True)
    home = root / "home/ann"
    home.mkdir(parents=True, exist_ok=True)
    where = places(manager, system=system, config=home / ".config", home=home, root=root)
    return Installer(manager, where, system, run, 1000, root)


def snapshot(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else b""
        for path in root.rglob("*")
    }


@pytest.mark.parametrize("manager", list(ServiceManager))
@pytest.mark.parametrize("system", [False, True])
def test_install_status_uninstall(tmp_path: Path, manager: ServiceManager, system: bool) -> None:
    run = FakeManager()
    it = installer(tmp_path, run, manager, system=system)
    before = set(snapshot(tmp_path))
    assert it.status() == "not installed"
    it.install(b"the unit", URL, getpass.getuser() if system else None)
    assert it.places.unit.read_bytes() == b"the unit"
    assert it.places.url.read_text() == URL + "\n"
    assert stat.S_IMODE(it.places.url.stat().st_mode) == 0o600
    assert stat.S_IMODE(it.places.unit.stat().st_mode) == 0o644
    if manager is ServiceManager.SYSTEMD:
        control = "systemctl" if system else "systemctl --user"
        assert run.commands == [
            f"{control} daemon-reload",
            f"{control} enable {UNIT_NAME}",
            f"{control} restart {UNIT_NAME}",
        ]
        assert it.status() == "active"
    else:
        domain = "system" if system else "gui/1000"
        assert run.commands[-1] == f"launchctl bootstrap {domain} {it.places.unit}"
    it.uninstall()
    left = {path for path in snapshot(tmp_path) if (tmp_path / path).is_file()} - before
    assert not left
    assert it.status() == "not installed"
    with pytest.raises(CleaveError, match="no service is installed"):
        it.uninstall()


@pytest.mark.parametrize("failing", ["daemon-reload", "enable", "restart"])
def test_a_refused_service_leaves_nothing_behind(tmp_path: Path, failing: str) -> None:
    run = FakeManager(failing)
    it = installer(tmp_path, run)
    before = snapshot(tmp_path)
    with pytest.raises(CleaveError, match="not installed: systemd reports: access denied"):
        it.install(b"the unit", URL)
    assert snapshot(tmp_path) == before
    assert f"systemctl --user disable --now {UNIT_NAME}" in run.commands
    assert run.commands[-1] == "systemctl --user daemon-reload"


def test_a_refused_service_leaves_the_older_one(tmp_path: Path) -> None:
    it = installer(tmp_path, FakeManager())
    it.install(b"older", "ws://older")
    before = snapshot(tmp_path)
    run = FakeManager("enable")
    with pytest.raises(CleaveError):
        installer(tmp_path, run).install(b"newer", URL)
    assert snapshot(tmp_path) == before
    assert stat.S_IMODE(it.places.url.stat().st_mode) == 0o600


def test_what_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    run = FakeManager()
    it = installer(tmp_path, run, system=True)
    before = snapshot(tmp_path)
    with pytest.raises(CleaveError, match="no such user: 'nobody-at-all'"):
        it.install(b"the unit", URL, "nobody-at-all")
    assert snapshot(tmp_path) == before
    (tmp_path / "etc").write_text("in the way")
    with pytest.raises(CleaveError, match="not installed"):
        it.install(b"the unit", URL)
    assert (tmp_path / "etc").is_file()


def test_without_systemd_it_says_what_to_do(tmp_path: Path) -> None:
    run = FakeManager()
    it = installer(tmp_path, run, booted=False)
    before = snapshot(tmp_path)
    with pytest.raises(CleaveError, match=r"systemd is not running here.*--print"):
        it.install(b"the unit", URL)
    assert snapshot(tmp_path) == before
    assert not run.commands


# --- the command ---


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.delenv("SUDO_USER", raising=False)
    return tmp_path


@pytest.mark.skipif(sys.platform != "linux", reason="its unit is that of Linux")
def test_print_touches_nothing_and_hides_the_credential(home: Path) -> None:
    (home / "url").write_text(URL)
    options = ["--hours", "22-7", "--memory", "50%", "--name", "my laptop 50%"]
    printed = CliRunner().invoke(
        app, ["service", "install", f"@{home}/url", *options, "--print"], catch_exceptions=False
    )
    assert printed.exit_code == 0
    assert "secret" not in printed.stdout
    command = read_back(_section(printed.stdout)["ExecStart"])
    assert command[:5] == [
        f":{sys.executable}", "-m", "cleave_cli", "join", f"@{home}/.config/cleave/join.url"
    ]  # fmt: skip
    assert {"--when=idle,charging", "--hours=22-7", "--memory=50%", "--name=my laptop 50%"} <= set(
        command
    )
    assert [path.name for path in home.iterdir()] == ["url"]


def test_the_printed_options_are_those_of_join(home: Path) -> None:
    every = [
        "--when=always", "--hours=1-2", "--max-temp=80", "--idle-after=3", "--memory=1GB",
        "--max-data=5GB/day", "--cores=1", "--threads=1", "--backend=numpy", "--runner=cpu",
        "--name=x",
    ]  # fmt: skip
    printed = CliRunner().invoke(
        app, ["service", "install", URL, *every, "--print"], catch_exceptions=False
    )
    assert all(option in printed.stdout for option in every)
    shown = CliRunner().invoke(app, ["join", "--help"]).stdout
    assert all(option.partition("=")[0] in shown for option in every)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense"], "is not a join URL"),
        ([URL, "--hours", "9"], "22-7"),
        ([URL, "--memory", "x"], "50%"),
        ([URL, "--backend", "abacus"], "unknown backend"),
        (
            [URL, "--runner", "tpu"],
            "--runner 'tpu' does not run graphs; use one of auto, cpu, webgpu",
        ),
        ([URL, "--threads", "-5"], "--threads must be between 0"),
        ([URL, "--cores", "4000"], "--cores is 4000"),
        ([URL, "--name", 5000 * "x"], "--name has 5,000 characters"),
        ([URL, "--system"], "--account"),
    ],
)
def test_wrong_options_are_said_before_anything_is_done(
    home: Path, arguments: list[str], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        CliRunner().invoke(app, ["service", "install", *arguments], catch_exceptions=False)
    assert not list(home.iterdir())


def test_status_as_json(home: Path) -> None:
    shown = CliRunner().invoke(app, ["service", "status", "--json"], catch_exceptions=False)
    assert json.loads(shown.stdout)["state"] == "not installed"
    assert shown.exit_code == 0
