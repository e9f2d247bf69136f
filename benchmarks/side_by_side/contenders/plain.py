"""Plain PyTorch on this machine alone, by `cleave train` without devices: the reference."""

from __future__ import annotations

import os

from benchmarks.side_by_side.contenders.served import training
from benchmarks.side_by_side.run import Run


def run(run: Run) -> None:
    """Train in one process on all cores."""
    runs = str(run.logs / "runs")
    run.row.best = f"one process, {os.cpu_count()} threads, no link"
    job = run.processes.start(
        "train",
        training(run, "--devices", "0", "--runs", runs),
        OMP_NUM_THREADS=str(os.cpu_count()),
    )
    run.follow(run.processes.records(job), server=job)
