"""Installs and removes the `cleave join` service with systemd or launchd."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from cleave.device.service.units import LABEL, UNIT_NAME, Places, ServiceManager
from cleave.errors import CleaveError
from cleave.files import make_folder, new_file, write_all


@dataclass(frozen=True, slots=True)
class ServiceOutcome:
    """The exit status and the output (stdout and stderr) of a command."""

    code: int
    text: str


Runner: TypeAlias = Callable[[Sequence[str]], ServiceOutcome]


def run_command(command: Sequence[str]) -> ServiceOutcome:
    """Run a command. The exit status is 127 if the command does not exist or runs over 60 s."""
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
    """Write a file atomically. Its content is never readable with a looser mode than `mode`."""
    draft = path.with_name(f".{path.name}.new")
    draft.unlink(missing_ok=True)
    try:
        with new_file(draft, mode) as file:
            draft.chmod(mode)
            write_all(file, content)
        if owner is not None:
            shutil.chown(draft, owner)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


@dataclass(frozen=True, slots=True)
class Installer:
    """Installs, removes and inspects the service, either for this user or system-wide.

    Args:
        manager: the service manager (systemd or launchd).
        places: paths of the service's files.
        system: True for a system-wide service, False for a service of this user.
        run: runs a command of the service manager.
        user: user ID, for launchd.
        root: root of the file system.
    """

    manager: ServiceManager
    places: Places
    system: bool
    run: Runner
    user: int
    root: Path = Path("/")

    def require_manager(self) -> None:
        """Raise if the service manager is not running.

        Raises:
            CleaveError: with a suggestion of what to do instead.
        """
        if self.manager is ServiceManager.SYSTEMD:
            there = (self.root / "run/systemd/system").is_dir()
        else:
            there = self.run(["launchctl", "version"]).code == 0
        if not there:
            raise CleaveError(
                f"{self.manager.value} is not running here, so nothing was installed; have "
                f"whatever starts programs on this machine start `cleave join` with the same "
                f"options, or get the file with --print"
            )

    def install(self, unit: bytes, url: str, account: str | None = None) -> None:
        """Write the service's files and start the service; restore the old files on failure.

        Args:
            unit: content of the unit file or property list.
            url: join URL, which contains the credential.
            account: account that owns the file with the join URL; None for this user.

        Raises:
            CleaveError: when the service manager does not run or refuses the service.
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
        """Stop the service and remove its files.

        Raises:
            CleaveError: when no service is installed, or a file cannot be removed.
        """
        if not self.places.unit.exists():
            raise CleaveError(f"no service is installed: there is no {self.places.unit}")
        self._stop()
        try:
            self.places.unit.unlink()
            self.places.url.unlink(missing_ok=True)
        except OSError as error:
            raise CleaveError(f"the service could not be removed: {_plain(error)}") from None
        self._reload()

    def status(self) -> str:
        """Return the service manager's name for the service's state, or `not installed`."""
        if not self.places.unit.exists():
            return "not installed"
        if self.manager is ServiceManager.SYSTEMD:
            # Several states share one exit status, so the text is more precise.
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
            # Unload the previous version of the service.
            self.run(["launchctl", "bootout", f"{self._domain}/{LABEL}"])
            start = ["launchctl", "bootstrap", self._domain, str(self.places.unit)]
            outcomes = (self.run(command) for command in [start])
        for outcome in outcomes:
            if outcome.code:
                raise CleaveError(f"{self.manager.value} says: {outcome.text or outcome.code}")

    def _stop(self) -> None:
        """Stop the service if it is running, and do not start it at the next boot or login."""
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
