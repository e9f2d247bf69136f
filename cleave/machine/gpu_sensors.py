"""Read what the GPUs of this machine do for other programs, and their temperature.

The sources are `nvidia-smi`, which comes with NVIDIA's driver, and the Linux kernel, for drivers
that state the use of each process (amdgpu, i915, xe and others). A value that no source provides is
None.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from cleave.machine.sensors import Sensors, read_file

IN_USE: Final = 0.25
"""Least share of a GPU that counts as use by the owner. A desktop needs less, a game more."""

_QUERY: Final = ("--query-gpu=temperature.gpu", "--format=csv,noheader,nounits")
_PROCESSES: Final = ("pmon", "-c", "1", "-s", "u")  # samples for one second
_ENGINE: Final = re.compile(r"drm-(engine|cycles|total-cycles)-(?!capacity-)(\S+):\s+(\d+)")
_CLIENT: Final = re.compile(r"drm-(pdev|client-id):\s+(\S+)")
_OWN: Final = re.compile(r"\bcleave(_cli)?\b")  # in the command line of a process

# Busy and total time by GPU, client and engine, in ns or cycles; the total of ns is 0.
Busy = Mapping[tuple[str, str, str], tuple[int, int]]


def nvidia_temperatures_c(text: str) -> list[float]:
    """Return the temperatures that `nvidia-smi --query-gpu=temperature.gpu` prints, in Celsius.

    A GPU without a sensor (`[N/A]`) is left out.
    """
    return [float(line) for line in text.splitlines() if re.fullmatch(r"\s*\d+(\.\d+)?\s*", line)]


def nvidia_use(text: str, is_own: Callable[[int], bool]) -> float | None:
    """Return the largest share of an NVIDIA GPU that other programs use, from 0 to 1.

    Args:
        text: the output of `nvidia-smi pmon -c 1 -s u`. A process without use has dashes.
        is_own: returns True for the process ID of a program that does not count.

    Returns:
        The share; None if the output has no table of processes.

    Example:
        >>> nvidia_use(text, lambda pid: pid == os.getpid())
    """
    columns: list[str] = []
    by_gpu: defaultdict[str, float] = defaultdict(float)
    for line in text.splitlines():
        words = line.removeprefix("#").split()
        if line.startswith("#"):
            columns = columns or words
        elif {"gpu", "pid", "sm"} <= {*columns} and len(words) >= len(columns) - 1:
            row = dict(zip(columns, words, strict=False))
            engines = [row.get(name, "-") for name in ("sm", "enc", "dec")]
            used = max((float(each) for each in engines if each.isdigit()), default=0.0)
            counts = row["pid"].isdigit() and not is_own(int(row["pid"]))
            by_gpu[row["gpu"]] += used / 100 if counts else 0.0
    return min(1.0, max(by_gpu.values())) if by_gpu else None


def drm_busy(texts: Sequence[str]) -> Busy:
    """Return how long each engine of each GPU has computed for each client of its driver.

    Args:
        texts: files `/proc/PID/fdinfo/FD` of devices in `/dev/dri`. Files of one client have the
            same values, which count once. The driver xe counts cycles, and others count ns.
    """
    found: dict[tuple[str, str, str], tuple[int, int]] = {}
    for text in texts:
        names = dict(_CLIENT.findall(text))
        if "client-id" in names:
            counts = {(kind, of): int(count) for kind, of, count in _ENGINE.findall(text)}
            for (kind, engine), busy in counts.items():
                total = 0 if kind == "engine" else counts.get(("total-cycles", engine), 0)
                if kind == "engine" or (kind == "cycles" and total):
                    found[names.get("pdev", ""), names["client-id"], engine] = busy, total
    return found


def drm_use(before: Busy, now: Busy, elapsed_s: float) -> float:
    """Return the largest share of an engine that clients used between two calls of `drm_busy`."""
    by_engine: defaultdict[tuple[str, str], float] = defaultdict(float)
    for (gpu, client, engine), (busy, total) in now.items():
        busy_before, total_before = before.get((gpu, client, engine), (busy, total))
        passed = total - total_before if total > total_before else 1e9 * elapsed_s
        by_engine[gpu, engine] += max(0, busy - busy_before) / passed
    return min(1.0, max(by_engine.values(), default=0.0))


def is_own_process(pid: int) -> bool:
    """Return True for this process and other processes of Cleave, as far as they can be seen."""
    if pid == os.getpid():
        return True
    with suppress(ImportError, OSError):
        import psutil

        with suppress(psutil.Error):
            return bool(_OWN.search(" ".join(psutil.Process(pid).cmdline()[:4])))
    return False


class GpuSensors:
    """Sensors of all GPUs of this machine.

    Args:
        run: runs a command and returns its output, or None if it fails.
        root: the folder that contains `proc` and `sys`.
        has_nvidia: whether `nvidia-smi` is installed; None to look for it.
    """

    def __init__(
        self,
        run: Callable[[Sequence[str]], str | None],
        root: Path = Path("/"),
        clock: Callable[[], float] = time.monotonic,
        is_own: Callable[[int], bool] = is_own_process,
        *,
        has_nvidia: bool | None = None,
    ) -> None:
        self._run, self._root, self._clock, self._is_own = run, root, clock, is_own
        self._has_nvidia = bool(shutil.which("nvidia-smi")) if has_nvidia is None else has_nvidia
        self._before: tuple[Busy, float] | None = None
        self._in_use_s: float | None = None  # when a GPU was last in use

    def temperature_c(self) -> float | None:
        """Return the temperature of the hottest GPU in Celsius; None if unknown."""
        text = self._run(["nvidia-smi", *_QUERY]) if self._has_nvidia else None
        found = [*nvidia_temperatures_c(text or ""), *Sensors(self._root).of_gpus_c()]
        return max(found, default=None)

    def use_by_others(self) -> float | None:
        """Return the largest share of a GPU that other programs use; None if unknown.

        The kernel counts since the previous call, so the first call finds only NVIDIA's GPUs. It
        shows an ordinary user only the user's own processes.
        """
        text = self._run(["nvidia-smi", *_PROCESSES]) if self._has_nvidia else None
        shares = [nvidia_use(text, self._is_own)] if text else []
        texts = [*self._files_of_others()]
        now, now_s, before = drm_busy(texts), self._clock(), self._before
        self._before = now, now_s
        if texts and before is not None and now_s > before[1]:
            shares.append(drm_use(before[0], now, now_s - before[1]))
        return max((share for share in shares if share is not None), default=None)

    def idle_s(self) -> float | None:
        """Return the time since other programs were last seen using a GPU, in seconds.

        None if no use was seen, or the use is unknown.
        """
        share = self.use_by_others()
        if share is not None and share >= IN_USE:
            self._in_use_s = self._clock()
        return None if self._in_use_s is None else self._clock() - self._in_use_s

    def _files_of_others(self) -> Iterator[str]:
        """Yield the files of the kernel that state how other processes use GPUs."""
        for folder in (self._root / "proc").glob("[0-9]*/fd"):
            with suppress(OSError):  # the process has ended, or is another user's
                files = [each for each in folder.iterdir() if _is_gpu(each)]
                if files and not self._is_own(int(folder.parent.name)):
                    for file in files:
                        yield read_file(folder.parent / "fdinfo" / file.name) or ""


def _is_gpu(descriptor: Path) -> bool:
    with suppress(OSError):
        return os.readlink(descriptor).startswith("/dev/dri/")
    return False
