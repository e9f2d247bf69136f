"""The memory of a device: of a process and all that it has started (Linux)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import psutil


def most_resident(status: str) -> int:
    """Return the most bytes that were resident, from what `/proc/PID/status` says; 0 if nothing."""
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def peak_bytes(pids: Sequence[int]) -> int:
    """Return the memory of processes; those that have ended count 0.

    Of the first it is the most since `forget_peak`; of the others, which it has forked and which
    share most of their pages with it, what each has for itself now.
    """
    found = 0
    for number, pid in enumerate(pids):
        try:
            if number:
                found += psutil.Process(pid).memory_full_info().uss
            else:
                found += most_resident(Path(f"/proc/{pid}/status").read_text())
        except (OSError, psutil.Error):  # it has ended meanwhile
            continue
    return found


def forget_peak(pids: Sequence[int]) -> None:
    """Let the peak of processes be what is resident now."""
    for pid in pids:
        try:
            Path(f"/proc/{pid}/clear_refs").write_text("5")
        except OSError:  # it has ended meanwhile
            continue
