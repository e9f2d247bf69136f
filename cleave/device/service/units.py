"""Contents and paths of the systemd and launchd files that start `cleave join`."""

from __future__ import annotations

import plistlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from cleave.errors import UsageError

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
# A wrong option stays wrong; what else goes wrong is tried again.
Restart=on-failure
RestartSec=60
RestartPreventExitStatus=2
# It answers what it was given before it stops.
TimeoutStopSec=45
Nice=10
IOSchedulingClass=idle
CPUWeight=20
MemoryMax={memory}
NoNewPrivileges=yes
LockPersonality=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
# No PrivateTmp: a display's socket in /tmp tells that somebody may sit at the machine.
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
    """The supported service managers."""

    SYSTEMD = "systemd"
    LAUNCHD = "launchd"


@dataclass(frozen=True, slots=True)
class Service:
    """The parameters of a service that runs `cleave join`.

    Attributes:
        command: program and arguments to run.
        memory_max_bytes: memory limit (systemd's `MemoryMax`) above which the kernel may kill the
            service.
        account: account that a system-wide service runs as; None for a service of the user.
    """

    command: tuple[str, ...]
    memory_max_bytes: int
    account: str | None = None


@dataclass(frozen=True, slots=True)
class Places:
    """Paths of a service's files.

    Attributes:
        unit: systemd unit file or launchd property list.
        url: file with the join URL, which contains the credential.
        log: log file under launchd; unused under systemd, which logs to its journal.
    """

    unit: Path
    url: Path
    log: Path


def places(
    manager: ServiceManager, *, system: bool, config: Path, home: Path, root: Path
) -> Places:
    """Return the paths of a service's files.

    Args:
        manager: the service manager (systemd or launchd).
        system: True for a system-wide service, False for a service of the user.
        config: the user's configuration folder, usually `~/.config`.
        home: the user's home folder.
        root: root of the file system.
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
    """Return a command line for `ExecStart=`. The leading colon disables expansion of `$`.

    Raises:
        UsageError: when systemd cannot start the program because of quotes or backslashes in its
            path.
    """
    if set(command[0]) & set("\\\"'"):
        raise UsageError(
            f"systemd starts no program with quotes or backslashes in its path, as in "
            f"{command[0]}; install Cleave in another folder"
        )
    return " ".join([quoted(":" + command[0]), *map(quoted, command[1:])])


def systemd_unit(service: Service) -> str:
    """Return a systemd unit file: system-wide if the service has an account, else for a user."""
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
    """Return a launchd property list: a daemon if the service has an account, else an agent."""
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
