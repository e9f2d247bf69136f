"""Measures how much concurrent matrix multiplication processes slow each other down.

Each process multiplies on one thread, pinned to its own core, so that the processes compete only
for memory bandwidth, caches and cooling. When run as a program, this module is one of these
processes. Each line on stdin contains a start time (Unix time) and a duration, both in seconds. For
each line, the process prints the median time of one multiplication in seconds.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final

import numpy as np

from cleave.machine.sensors import usable_cores

SIDE: Final = 384  # side of the square fp32 tile that every process multiplies
_THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_START_S: Final = 0.05  # delay before each round, so that all processes start it together


def process_counts(cores: int) -> list[int]:
    """Return the process counts to measure: 1 to 8, then 50 % more each time, up to `cores`."""
    counts = [1]
    while counts[-1] < cores:
        last = counts[-1]
        counts.append(min(cores, last + 1 if last < 8 else last + last // 2))
    return counts


def measure_contention(backend: str, seconds: float) -> tuple[float, ...]:
    """Measure a tile's slowdown factors for 1, 2, ... concurrent processes, up to one per core.

    Each process count is measured for `seconds`. Slowdowns for counts that are not in
    `process_counts` are interpolated.

    Raises:
        OSError: if a process cannot be started.
        ValueError: if a process exits early.
    """
    cores = usable_cores()
    measured: dict[int, float] = {}
    with ExitStack() as stack:
        workers = [stack.enter_context(_Worker(backend, core)) for core in cores]
        for worker in workers:
            worker.answer()  # the worker is ready
        for count in process_counts(len(cores)):
            at_s = time.time() + _START_S
            for worker in workers[:count]:
                worker.ask(at_s, seconds)
            measured[count] = statistics.median([worker.answer() for worker in workers[:count]])
    every = np.interp(range(1, len(cores) + 1), list(measured), list(measured.values()))
    return tuple(float(took_s) / measured[1] for took_s in every)


class _Worker:
    """The parent's handle to a worker process, which runs this module on one core."""

    def __init__(self, backend: str, core: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.contention", backend, str(core)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C goes to the parent, which stops the workers
            env={**os.environ, **dict.fromkeys(_THREAD_VARIABLES, "1")},
        )

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:  # the process had already exited
                continue

    def ask(self, at_s: float, seconds: float) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{at_s} {seconds}\n")
        self._process.stdin.flush()

    def answer(self) -> float:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ValueError("a process that measures contention ended early")
        return float(line)


def work(arguments: Sequence[str]) -> None:
    """Run as a worker process. `arguments` are the name of the backend and the core number."""
    backend_name, core = arguments
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {int(core)})
    from cleave.arrays import DType
    from cleave.machine.backends import NumpyBackend, TorchBackend
    from cleave.machine.sensors import hold_strips_well
    from profiles.measuring.gemm_timer import Bench
    from profiles.performance import Layout

    hold_strips_well()
    library, _, device = backend_name.partition(":")
    backend = TorchBackend(device or "cpu") if library == "torch" else NumpyBackend()
    bench = Bench(backend, 2 * SIDE * SIDE)
    order = bench.order(SIDE, SIDE, SIDE, Layout.NN, DType.FP32, DType.FP32)
    bench.once(order)  # makes the backend load its kernels before the measurement
    sys.stdout.write("0\n")
    sys.stdout.flush()
    for line in sys.stdin:
        at_s, seconds = (float(word) for word in line.split())
        time.sleep(max(0.0, at_s - time.time()))
        until_s = time.perf_counter() + seconds
        took = [bench.once(order)]
        while time.perf_counter() < until_s:
            took.append(bench.once(order))
        sys.stdout.write(f"{statistics.median(took)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    work(sys.argv[1:])
