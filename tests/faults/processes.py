"""Device processes by slot: killed, stopped and replaced."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.faults.plan import Fault

_ROOT = Path(__file__).parents[2]


@dataclass
class Processes:
    """One device process for each slot; a killed one is replaced. A context manager.

    Args:
        url: what the process of a slot joins.
        slots: how many.
        options: of `tests.faults.device`.
    """

    url: Callable[[int], str]
    slots: int
    options: tuple[str, ...] = ()
    _processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    _stopped: set[int] = field(default_factory=set)
    _closed: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> Self:
        for slot in range(self.slots):
            self._start(slot)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._lock:
            self._closed = True
            for process in self._processes.values():
                process.kill()
            for process in self._processes.values():
                process.wait()

    @property
    def running(self) -> dict[int, int]:
        """Return the process id of each slot."""
        with self._lock:
            return {slot: process.pid for slot, process in self._processes.items()}

    def strike(self, slot: int, fault: Fault) -> None:
        """KILL the process of a slot and start another, or STOP it."""
        with self._lock:
            process = self._processes[slot]
            if self._closed:
                return
            if fault is Fault.KILL:
                process.kill()
                process.wait()
                self._stopped.discard(slot)
                self._start(slot)
            elif fault is Fault.STOP:
                self._stopped.add(slot)
                process.send_signal(signal.SIGSTOP)

    def gone(self, slot: int) -> None:
        """The session of a slot ended: a stopped process goes on, as a laptop that wakes up."""
        with self._lock:
            if slot in self._stopped and not self._closed:
                self._stopped.discard(slot)
                self._processes[slot].send_signal(signal.SIGCONT)

    def _start(self, slot: int) -> None:
        command = [sys.executable, "-m", "tests.faults.device", self.url(slot), *self.options]
        # Many processes share a few cores: one thread each keeps them from waiting for one another.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._processes[slot] = subprocess.Popen(
            command, cwd=_ROOT, env=environment, stderr=subprocess.DEVNULL
        )
