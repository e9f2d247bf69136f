"""Groups of processes that may use a share of this machine's cores: Linux, root (cgroups)."""

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
"""Short beside a step, so that processes do not wait for one another in bursts."""

_END_S: Final = 5.0


@dataclass(frozen=True)
class LimitedCores:
    """A group of processes that together may use so many cores.

    Attributes:
        processes: the file that a process is put into the group by.
    """

    processes: Path

    def inside(self, *command: str) -> list[str]:
        """Return a command that is run in the group. Its process is that of the command."""
        return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.processes), *command]


@contextmanager
def limited_cores(name: str, cores: float) -> Iterator[LimitedCores]:
    """Yield a group that may use a number of cores, as 0.5, and delete it with the block.

    What still runs in it then is killed.

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
    """Kill what runs in a group, and delete it once nothing does."""
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
