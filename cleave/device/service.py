"""Installs and removes `cleave join` as a service of systemd or launchd."""

from __future__ import annotations

import plistlib
import shutil
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Final, TypeAlias

from cleave.errors import CleaveError, UsageError
from cleave.files import make_folder, write_atomically

UNIT_NAME: Final = "cleave-join.service"
LABEL: Final = "org.cleave.join"

_ESCAPES: Final = {"\\": "\\\\", '"': '\\"', "%": "%%", "\n": "\\n", "\t": "\\t", "\r": "\\r"}

_UNIT: Final = """\
[Unit]
Description=Cleave device: lends this machine to a parameter server
StartLimitIntervalSec=0
{network}
[Service]
{account}ExecStart={command}
# Status 2 means an invalid option, so a restart would fail again.
Restart=on-failure
RestartSec=60
RestartPreventExitStatus=2
# Time to answer pending requests before it stops.
TimeoutStopSec=45
Nice=10
IOSchedulingClass=idle
CPUWeight=20
MemoryMax={memory}
NoNewPrivileges=yes
LockPersonality=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
# No PrivateTmp: X11 sockets in /tmp show whether somebody may be using the machine.
{protection}
[Install]
WantedBy={target}
"""

_NETWORK: Final = "Wants=network-online.target\nAfter=network-online.target\n"

_PROTECTION: Final = """\
ProtectSystem=strict
ProtectHome=read-only
StateDirectory=cleave
StateDirectoryMode=0700
Environment=CLEAVE_STATE=%S/cleave
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectControlGroups=yes
"""


class ServiceManager(Enum):
    """A supported service manager."""

    SYSTEMD = "systemd"
    LAUNCHD = "launchd"


@dataclass(frozen=True, slots=True)
class Service:
    """The parameters of a service that runs `cleave join`.

    Attributes:
        memory_max_bytes: systemd's `MemoryMax`, above which the kernel may kill the service.
        account: account under which a system-wide service runs; None for a user service.
    """

    command: tuple[str, ...]
    memory_max_bytes: int
    account: str | None = None


@dataclass(frozen=True, slots=True)
class Places:
    """Paths of the unit file or property list, the file with the join URL, and the launchd log."""

    unit: Path
    url: Path
    log: Path


def places(
    manager: ServiceManager, *, system: bool, config: Path, home: Path, root: Path
) -> Places:
    """Return the paths of a service's files.

    Args:
        config: the user's configuration folder, usually `~/.config`.
    """
    if manager is ServiceManager.SYSTEMD:
        units = root / "etc/systemd/system" if system else config / "systemd/user"
        unit = units / UNIT_NAME
    else:
        unit = (root / "Library/LaunchDaemons" if system else home / "Library/LaunchAgents") / (
            f"{LABEL}.plist"
        )
    url = (root / "etc" if system else config) / "cleave/join.url"
    log = (root if system else home) / "Library/Logs/cleave-join.log"
    return Places(unit, url, log)


def quoted(argument: str) -> str:
    """Return an argument in double quotes, with systemd's special characters escaped."""
    return '"' + "".join(_ESCAPES.get(c, c) for c in argument) + '"'


def systemd_command(command: Sequence[str]) -> str:
    """Return the value of `ExecStart=`. Raise UsageError if systemd cannot use the program path."""
    if set(command[0]) & set("\\\"'"):
        raise UsageError(
            f"systemd cannot start a program whose path contains quotes or backslashes: "
            f"{command[0]}; install Cleave in another folder"
        )
    return " ".join([quoted(":" + command[0]), *map(quoted, command[1:])])


def systemd_unit(service: Service) -> str:
    """Return a systemd unit: for a system service if `account` is set, else for a user service."""
    system = service.account is not None
    return _UNIT.format(
        command=systemd_command(service.command),
        memory=service.memory_max_bytes,
        account=f"User={service.account}\n" if system else "",
        network=_NETWORK if system else "",
        protection=_PROTECTION if system else "",
        target="multi-user.target" if system else "default.target",
    )


def launchd_plist(service: Service, log: Path) -> bytes:
    """Return a launchd property list: for a daemon if `account` is set, else for an agent."""
    entries: dict[str, object] = {
        "Label": LABEL,
        "ProgramArguments": list(service.command),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": 60,
        "ExitTimeOut": 45,
        "Nice": 10,
        "LowPriorityIO": True,
        "StandardErrorPath": str(log),
    }
    if service.account is not None:
        entries["UserName"] = service.account
    return plistlib.dumps(entries)


@dataclass(frozen=True, slots=True)
class ServiceOutcome:
    """The exit status and the output (stdout and stderr) of a command."""

    code: int
    text: str


Runner: TypeAlias = Callable[[Sequence[str]], ServiceOutcome]


def run_command(command: Sequence[str]) -> ServiceOutcome:
    """Run a command. If it cannot be started or takes over 60 s, the exit status is 127."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return ServiceOutcome(127, str(error))
    return ServiceOutcome(done.returncode, (done.stdout + done.stderr).strip())


@dataclass(slots=True)
class _Changes:
    """Writes files and records their previous contents, so that all writes can be undone."""

    before: list[tuple[Path, bytes | None, int]] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)

    def write(self, path: Path, content: bytes, mode: int, owner: str | None = None) -> None:
        missing = [p for p in (path.parent, *path.parent.parents) if not p.exists()]
        make_folder(path.parent)
        self.folders += missing
        there = path.exists()
        self.before.append(
            (path, path.read_bytes() if there else None, path.stat().st_mode if there else mode)
        )
        _write(path, content, mode, owner)

    def undo(self) -> None:
        for path, content, mode in reversed(self.before):
            if content is None:
                path.unlink(missing_ok=True)
            else:
                _write(path, content, mode & 0o777)
        for folder in sorted(self.folders, reverse=True):  # inner folders first
            with suppress(OSError):  # another program may have put a file into the folder
                folder.rmdir()


def _write(path: Path, content: bytes, mode: int, owner: str | None = None) -> None:
    write_atomically(path, content, mode)
    path.chmod(mode)  # regardless of the umask
    if owner is not None:
        shutil.chown(path, owner)


@dataclass(frozen=True, slots=True)
class Installer:
    """Installs, removes and inspects a system service, or a service of the user with ID `user`."""

    manager: ServiceManager
    places: Places
    system: bool
    run: Runner
    user: int
    root: Path = Path("/")

    def require_manager(self) -> None:
        """Raise CleaveError, with a suggestion, if the service manager is not running."""
        if self.manager is ServiceManager.SYSTEMD:
            there = (self.root / "run/systemd/system").is_dir()
        else:
            there = self.run(["launchctl", "version"]).code == 0
        if not there:
            raise CleaveError(
                f"{self.manager.value} is not running here, so nothing was installed; start "
                "`cleave join` with the same options by other means, or print the service file "
                "with --print"
            )

    def install(self, unit: bytes, url: str, account: str | None = None) -> None:
        """Write the service's files and start the service. Restore the old files on failure.

        Args:
            unit: content of the unit file or property list.
            url: join URL, which contains the credential.
            account: account that owns the file with the join URL; None for this user.

        Raises:
            CleaveError: if the service manager is not running or rejects the service, or if a file
                cannot be written.
        """
        self.require_manager()
        changes = _Changes()
        older = self.places.unit.exists()
        try:
            changes.write(self.places.url, f"{url}\n".encode(), 0o600, account)
            changes.write(self.places.unit, unit, 0o644)
            self._start()
        except (OSError, LookupError, CleaveError) as error:
            self._stop()
            changes.undo()
            if older:
                with suppress(CleaveError):  # report the original error, not this one
                    self._start()
            else:
                self._reload()
            raise CleaveError(f"the service was not installed: {_plain(error)}") from None

    def uninstall(self) -> None:
        """Stop the service and remove its files. Raise CleaveError if it is not installed."""
        if not self.places.unit.exists():
            raise CleaveError(f"no service is installed: {self.places.unit} does not exist")
        self._stop()
        try:
            self.places.unit.unlink()
            self.places.url.unlink(missing_ok=True)
        except OSError as error:
            raise CleaveError(f"the service could not be removed: {_plain(error)}") from None
        self._reload()

    def status(self) -> str:
        """Return the state that the service manager reports for the service, or "not installed"."""
        if not self.places.unit.exists():
            return "not installed"
        if self.manager is ServiceManager.SYSTEMD:
            # Several states have the same exit status, so return the text.
            return self._systemctl("is-active", UNIT_NAME).text or "unknown"
        shown = self.run(["launchctl", "print", f"{self._domain}/{LABEL}"])
        states = [line.split("=")[1] for line in shown.text.splitlines() if "state =" in line]
        return states[0].strip() if shown.code == 0 and states else "not loaded"

    @property
    def log_command(self) -> str:
        """Return the shell command that shows the service's log."""
        if self.manager is ServiceManager.LAUNCHD:
            return f"tail -f '{self.places.log}'"
        return f"journalctl {'' if self.system else '--user '}-f -u {UNIT_NAME}"

    @property
    def _domain(self) -> str:
        return "system" if self.system else f"gui/{self.user}"

    def _start(self) -> None:
        if self.manager is ServiceManager.SYSTEMD:
            commands = [("daemon-reload",), ("enable", UNIT_NAME), ("restart", UNIT_NAME)]
            outcomes = (self._systemctl(*command) for command in commands)
        else:
            self._stop()  # unload the previous version of the service
            start = ["launchctl", "bootstrap", self._domain, str(self.places.unit)]
            outcomes = (self.run(command) for command in [start])
        for outcome in outcomes:
            if outcome.code:
                raise CleaveError(f"{self.manager.value} reports: {outcome.text or outcome.code}")

    def _stop(self) -> None:
        """Stop the service if it is running, and disable its start at boot or login."""
        if self.manager is ServiceManager.SYSTEMD:
            self._systemctl("disable", "--now", UNIT_NAME)
        else:
            self.run(["launchctl", "bootout", f"{self._domain}/{LABEL}"])

    def _reload(self) -> None:
        if self.manager is ServiceManager.SYSTEMD:
            self._systemctl("daemon-reload")

    def _systemctl(self, *arguments: str) -> ServiceOutcome:
        return self.run(["systemctl", *([] if self.system else ["--user"]), *arguments])


def _plain(error: Exception) -> str:
    """Return an error's message; for an OSError, the reason and the file name."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror.lower()}: {error.filename}"
    return str(error)
