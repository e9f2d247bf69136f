"""The memory of a device: a process and its children (Linux)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import psutil


def most_resident(status: str) -> int:
    """Return the peak resident bytes from the text of `/proc/PID/status`; 0 if missing."""
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def peak_bytes(pids: Sequence[int]) -> int:
    """Return the memory of processes; ended processes count 0.

    The first process counts with its peak since `forget_peak`. The others were forked from it and
    share most of its pages, so they count with their current unshared memory.
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
    """Reset the peak of processes to their current resident memory."""
    for pid in pids:
        try:
            Path(f"/proc/{pid}/clear_refs").write_text("5")
        except OSError:  # it has ended meanwhile
            continue
