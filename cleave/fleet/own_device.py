"""A device process that a job may start on the computer of the parameter server (PS)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from cleave.machine.sensors import available_memory_bytes, total_memory_bytes

_STOP_S: Final = 10.0  # maximum wait for the process to exit before it is killed
_NICENESS: Final = 10  # the PS's own work takes precedence

_SHARE_OF_MEMORY: Final = 0.25  # maximum share of the computer's memory that the device offers
_SHARE_OF_AVAILABLE: Final = 0.5  # maximum share of the memory that is available


def offered_bytes(reserved_bytes: int) -> int:
    """Return the memory that a device on this computer should offer, in bytes; 0 if unknown.

    Args:
        reserved_bytes: additional memory that the PS itself will need, beyond what it uses now.
    """
    total, available = total_memory_bytes(), available_memory_bytes()
    if total is None or available is None:
        return 0
    spare = max(0, available - reserved_bytes)
    return round(min(_SHARE_OF_MEMORY * total, _SHARE_OF_AVAILABLE * spare))


def end_process(process: subprocess.Popen[Any], patience_s: float) -> None:
    """Terminate a process and wait until it exits. Kill the process after `patience_s` seconds."""
    process.terminate()
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _give_way(pid: int) -> None:
    """Give a process a lower CPU priority than other processes.

    Linux may schedule sessions as groups (autogroup), so that a process's niceness only counts
    within its session. Therefore the niceness of the session is set too.
    """
    os.setpriority(os.PRIO_PROCESS, pid, _NICENESS)
    with suppress(FileNotFoundError, PermissionError), open(f"/proc/{pid}/autogroup", "r+") as file:
        file.write(str(_NICENESS))


class OwnDevice:
    """A device process on the PS's computer. It connects to the PS like any other device.

    Args:
        command: command that starts the process, without the `--memory` option.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def runs(self) -> bool:
        """Return True if the process is running, even if it has not joined the fleet yet."""
        process = self._process
        return process is not None and process.poll() is None

    def start(self, memory_bytes: int) -> None:
        """Start the process if it is not running. The device offers `memory_bytes` bytes."""
        if self.runs:
            return
        # A separate session or process group makes Ctrl-C stop the job before the device.
        group = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)  # on Windows
        self._process = subprocess.Popen(
            [*self._command, "--memory", str(memory_bytes // 10**6)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            creationflags=group,
        )
        if sys.platform != "win32":
            with suppress(ProcessLookupError):  # the process has already exited
                _give_way(self._process.pid)

    def stop(self) -> None:
        """Stop the process if it is running."""
        process, self._process = self._process, None
        if process is not None:
            end_process(process, _STOP_S)
