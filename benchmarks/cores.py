"""Process groups limited to a share of this machine's cores: Linux, root (cgroups)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_ROOT: Final = Path("/sys/fs/cgroup")
_PERIOD_US: Final = 20_000
"""Scheduling period; short compared with a step, so that processes do not stall in bursts."""

_END_S: Final = 5.0


@dataclass(frozen=True)
class LimitedCores:
    """A group of processes with a common limit on cores.

    Attributes:
        processes: file to which a process id is written to join the group.
    """

    processes: Path

    def inside(self, *command: str) -> list[str]:
        """Return a command line that runs a command in the group, as the same process."""
        return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.processes), *command]


@contextmanager
def limited_cores(name: str, cores: float) -> Iterator[LimitedCores]:
    """Yield a group limited to `cores` cores (such as 0.5), and delete it after the block.

    Processes that still run in it are killed.

    Raises:
        OSError: when the system does not allow it.
    """
    first = (_ROOT / "cpu" / "cpu.cfs_period_us").parent
    older = first.is_dir()
    folder = (first if older else _ROOT) / name
    folder.mkdir()
    quota_us = max(1000, round(cores * _PERIOD_US))
    try:
        if older:
            (folder / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (folder / "cpu.cfs_quota_us").write_text(str(quota_us))
        else:
            (folder / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}")
        yield LimitedCores(folder / "cgroup.procs")
    finally:
        _delete(folder)


def _delete(folder: Path) -> None:
    """Kill all processes of a group, and delete the empty group."""
    until_s = time.monotonic() + _END_S
    while left := (folder / "cgroup.procs").read_text().split():
        for pid in left:
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > until_s:
            raise OSError(f"processes {', '.join(left)} of {str(folder)!r} do not end")
        time.sleep(0.01)
    folder.rmdir()
