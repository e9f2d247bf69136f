"""The memory of a device: of a process and all that it has started (Linux)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Resident:
    """What of a process is resident, in bytes.

    Attributes:
        peak: the most since `forget_peak`.
        shared: what it shares with other processes on purpose, now.
    """

    peak: int
    shared: int


def resident(status: str) -> Resident:
    """Read what `/proc/PID/status` says."""
    found = {}
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name in ("VmHWM", "RssShmem"):
            found[name] = int(value.split()[0]) * 1024
    return Resident(found.get("VmHWM", 0), found.get("RssShmem", 0))


def together(processes: Iterable[Resident]) -> int:
    """Return the most memory of a device's processes, with what they share counted once.

    Their peaks are added up, though they need not have been at the same time.
    """
    parts = [*processes]
    own = sum(one.peak - min(one.peak, one.shared) for one in parts)
    return own + max((one.shared for one in parts), default=0)


def peak_bytes(pids: Iterable[int]) -> int:
    """Return the most memory of processes since `forget_peak`; those that have ended count 0."""
    found = []
    for pid in pids:
        try:
            found.append(resident(Path(f"/proc/{pid}/status").read_text()))
        except OSError:  # it has ended meanwhile
            continue
    return together(found)


def forget_peak(pids: Iterable[int]) -> None:
    """Let the peak of processes be what is resident now."""
    for pid in pids:
        try:
            Path(f"/proc/{pid}/clear_refs").write_text("5")
        except OSError:  # it has ended meanwhile
            continue
