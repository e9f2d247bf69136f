"""Measure how much of this machine's processors other programs use, while a speed is measured."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from cleave.machine.sensors import read_file, usable_cores

_BUSY: Final = 0.25  # share of this process's cores that others use, above which speeds are too low
_LEAST_S: Final = 0.2  # processor time of all cores; the counters' ticks are 0.01 s
_NOT_WORKING: Final = frozenset((1, 3, 4))  # columns of /proc/stat: low priority, idle, disk wait
_COUNTED: Final = 8  # the columns of /proc/stat after these repeat time of virtual machines


class OtherLoad:
    """Measures the load by other programs, from the creation of this object until `share` is read.

    Programs of low priority do not count, because they run only on idle processors.

    Args:
        root: folder that contains `proc`.
        own_s: returns the processor time of this process, in seconds.

    Example:
        >>> others = OtherLoad()
        >>> speed = measure(backend)
        >>> print(speed.flops_per_s, others.remark())
    """

    def __init__(
        self, root: Path = Path("/"), own_s: Callable[[], float] = time.process_time
    ) -> None:
        self._root, self._own_s = root, own_s
        self._began = self._times()

    def share(self) -> float:
        """Return the share of all processors that other programs have used; 0 if unknown.

        It is also 0 if this object was created only a moment ago.
        """
        used_s, all_s, own_s = (
            now - then for now, then in zip(self._times(), self._began, strict=True)
        )
        return min(1.0, max(0.0, used_s - own_s) / all_s) if all_s >= _LEAST_S else 0.0

    def disturbs(self) -> bool:
        """Return whether other programs use processors that this process would use too."""
        cores = os.cpu_count() or 1
        return cores * (1 - self.share()) < (1 - _BUSY) * len(usable_cores())

    def remark(self) -> str:
        """Return a clause about a speed that was measured under load; empty if undisturbed."""
        if not self.disturbs():
            return ""
        return f"while other programs used {self.share():.0%} of this machine's processors"

    def _times(self) -> tuple[float, float, float]:
        """Return the used and total processor time of the machine, and this process's, in s."""
        line = (read_file(self._root / "proc/stat") or "").partition("\n")[0].split()[1:]
        if line:
            columns = [int(ticks) / os.sysconf("SC_CLK_TCK") for ticks in line[:_COUNTED]]
            used_s = sum(s for number, s in enumerate(columns) if number not in _NOT_WORKING)
            return used_s, sum(columns), self._own_s()
        with suppress(ImportError):
            import psutil

            times = psutil.cpu_times()
            return times.user + times.system, sum(times), self._own_s()
        return 0.0, 0.0, 0.0
