"""Shared helpers of the benchmarks: trainers, device processes, process memory."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cleave.fleet.fleet import Fleet
from cleave.planner.plan import Method
from cleave.training.loop.context import TrainContext
from cleave.training.loop.inputs import prepare
from cleave.training.loop.job import JobSpec
from cleave.training.loop.records import Record
from cleave.training.loop.run_folder import RunFolder
from cleave.training.loop.trainer import Trainer
from cleave.training.lora.adapters import load_adapted
from cleave.training.lora.spec import LoraSpec
from cleave.transport.join_url import url_file
from cleave.workload.build import load_model


def make_trainer(job: JobSpec, fleet: Fleet | None) -> Trainer:
    """Return a trainer that writes to a temporary folder and reports nothing.

    Raises:
        ValueError: when a job with a fleet has method `auto`, so that the measured work is unknown.
    """
    if fleet is not None and job.method == Method.AUTO.value:
        raise ValueError("a benchmark's job with a fleet names its method")
    context = TrainContext(fleet, _ignore)
    dataset = prepare(job, context)
    folder = RunFolder.create(Path(tempfile.mkdtemp(prefix="cleave-benchmark-")))
    model: Any
    if job.lora:
        adapted, spec = load_adapted(dataset.source, LoraSpec.of(job.lora), seed=job.seed)
        model = adapted.get_base_model()
    else:
        model, spec = load_model(dataset.source, seed=job.seed)
    return Trainer(job, spec, model, dataset, folder, context)


def machine() -> str:
    """Return a description of the machine: number and model of its cores."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
            break
    return f"{os.cpu_count()} cores, {name}"


def _ignore(record: Record) -> None:
    return None


@dataclass
class DeviceProcess:
    """A `cleave join` process that is ready."""

    process: subprocess.Popen[str]

    def resident_bytes(self) -> int:
        """Return the process's resident memory in bytes."""
        return resident_bytes(self.process.pid)


@contextmanager
def joined(url: str, count: int, *options: str) -> Iterator[list[DeviceProcess]]:
    """Yield `count` device processes that have joined a server; end them after the block."""
    with url_file(url) as source:
        yield from _joined(source, count, *options)


def _joined(source: str, count: int, *options: str) -> Iterator[list[DeviceProcess]]:
    command = [sys.executable, "-m", "cleave_cli", "join", source, "--json", *options]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    try:
        for process in processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line or json.loads(line)["event"] != "ready":
                raise RuntimeError(f"a device process did not become ready: {line!r}")
        yield [DeviceProcess(process) for process in processes]
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


def resident_bytes(pid: int, which: str = "VmRSS") -> int:
    """Return the resident memory of a process in bytes (Linux).

    Args:
        which: its name in `/proc/PID/status`: VmRSS, VmHWM (the peak) or RssAnon (without files).
    """
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{which}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"process {pid} has no resident memory")


def spread(values: Sequence[float]) -> str:
    """Return the median with the smallest and the largest value, as text."""
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"
