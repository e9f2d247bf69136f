"""Installs and removes a service: its files, and the service manager's commands."""

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
    """The outcome of a command: its exit status and its output."""

    code: int
    text: str


Runner: TypeAlias = Callable[[Sequence[str]], ServiceOutcome]


def run_command(command: Sequence[str]) -> ServiceOutcome:
    """Run a command; the exit status is 127 if it does not exist or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return ServiceOutcome(127, str(error))
    return ServiceOutcome(done.returncode, (done.stdout + done.stderr).strip())


@dataclass(slots=True)
class _Changes:
    """Writes files, and can restore all of them."""

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
        for folder in sorted(self.folders, reverse=True):  # inner ones first
            with suppress(OSError):  # somebody else put a file there meanwhile
                folder.rmdir()


def _write(path: Path, content: bytes, mode: int, owner: str | None = None) -> None:
    """Write a file that is at no time readable by more people than its mode allows."""
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
    """The service of this user, or of the machine.

    Args:
        places: paths of its files.
        system: whether it is the machine's service.
        run: runs the service manager's commands.
        user: the user's id, for launchd.
        root: root of the file system.
    """

    manager: ServiceManager
    places: Places
    system: bool
    run: Runner
    user: int
    root: Path = Path("/")

    def require_manager(self) -> None:
        """Fail if the service manager does not run.

        Raises:
            CleaveError: with advice on what to do instead.
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
        """Write the files and start the service; restore the previous files if that fails.

        Args:
            account: the account that has to read the URL; None for this user.

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
                with suppress(CleaveError):  # the first error is the one to report
                    self._start()
            else:
                self._reload()
            raise CleaveError(f"the service was not installed: {_plain(error)}") from None

    def uninstall(self) -> None:
        """Stop the service and remove its files.

        Raises:
            CleaveError: when no service is installed.
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
        """Return the service's state as the service manager names it, or `not installed`."""
        if not self.places.unit.exists():
            return "not installed"
        if self.manager is ServiceManager.SYSTEMD:
            # The text is more precise than the exit status, which is the same for several states.
            return self._systemctl("is-active", UNIT_NAME).text or "unknown"
        shown = self.run(["launchctl", "print", f"{self._domain}/{LABEL}"])
        states = [line.split("=")[1] for line in shown.text.splitlines() if "state =" in line]
        return states[0].strip() if shown.code == 0 and states else "not loaded"

    @property
    def log_command(self) -> str:
        """Return the command that shows the service's log."""
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
            self.run(["launchctl", "bootout", f"{self._domain}/{LABEL}"])  # an older service
            start = ["launchctl", "bootstrap", self._domain, str(self.places.unit)]
            outcomes = (self.run(command) for command in [start])
        for outcome in outcomes:
            if outcome.code:
                raise CleaveError(f"{self.manager.value} says: {outcome.text or outcome.code}")

    def _stop(self) -> None:
        """Stop the service if it runs."""
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
    """Return an error's message, without Python's wrapping."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror.lower()}: {error.filename}"
    return str(error)
