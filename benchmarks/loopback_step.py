"""Compare a training step over loopback WebSockets with plain PyTorch in the same run.

    python -m benchmarks.loopback_step

Trains OPT-125M, batch 2, sequence 32, fp32, with 2 and 4 device processes. Prints the step time as
a ratio, the fixed cost of a small GEMM, bytes relative to sending every operand and result once,
and memory of the PS and devices from step 5 to step 55. The process waits passively in OpenMP, as
`cleave serve` does; plain PyTorch is timed in the same process.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported

import argparse
import statistics
import time
from collections.abc import Sequence

import numpy as np

import cleave
from benchmarks.common import joined, make_trainer, resident_bytes, spread
from cleave.arrays import Buffer, DType, empty
from cleave.fleet.fleet import Fleet
from cleave.fleet.product import Side
from cleave.scheduler.counters import FleetCounters
from cleave.training.loop.job import JobSpec
from cleave.training.loop.trainer import Trainer


def seconds(trainer: Trainer) -> float:
    """Return the seconds of one step."""
    began_s = time.perf_counter()
    trainer.train_step()
    return time.perf_counter() - began_s


def small_gemm_s(fleet: Fleet, repeats: int = 200) -> float:
    """Return the median seconds of an 8x8x8 GEMM with fresh operands."""
    values = np.ones((8, 8), np.float32)
    times = []
    for _ in range(repeats):
        a, b = (Side(fleet.operand(Buffer(values, DType.FP32))) for _ in range(2))
        began_s = time.perf_counter()
        fleet.submit(a, b, empty(8, 8, DType.FP32)).result()
        times.append(time.perf_counter() - began_s)
    return statistics.median(times)


def settled_bytes(trainer: Trainer, pids: Sequence[int]) -> list[float]:
    """Return each process's resident bytes, as the median of five steps to even out allocators."""
    samples = []
    for _ in range(5):
        trainer.train_step()
        samples.append([resident_bytes(pid) for pid in pids])
    return [statistics.median(of_process) for of_process in zip(*samples, strict=True)]


def report_bytes(spent: FleetCounters) -> None:
    floor = spent.floor_down_bytes + spent.floor_up_bytes
    moved = spent.downlink_bytes + spent.uplink_bytes
    print(
        f"  bytes per step: {spent.downlink_bytes / 1e6:.1f} MB down, "
        f"{spent.uplink_bytes / 1e6:.1f} MB up; floor {floor / 1e6:.1f} MB "
        f"({spent.floor_down_bytes / 1e6:.1f} down, {spent.floor_up_bytes / 1e6:.1f} up); "
        f"ratio {moved / floor:.3f} (at most 1.1)"
    )


def measure(devices: int, pairs: int, soak: int) -> None:
    job = JobSpec(model="opt-125m", batch=2, seq=32, steps=1000, checkpoint_every=0, method="tiles")
    with (
        cleave.serve() as server,
        joined(server.url, devices, "--backend", "numpy", "--threads", "1") as processes,
    ):
        server.fleet.wait_for(devices)
        plain, offloaded = make_trainer(job, None), make_trainer(job, server.fleet)
        for trainer in (plain, offloaded):
            seconds(trainer)
        ratios, plain_s, ours_s = [], [], []
        for _ in range(pairs):
            plain_s.append(seconds(plain))
            ours_s.append(seconds(offloaded))
            ratios.append(ours_s[-1] / plain_s[-1])
        print(f"{devices} devices:")
        print(
            f"  step against plain PyTorch: {spread(ratios)} (at most 3); "
            f"plain {statistics.median(plain_s):.3f} s, ours {statistics.median(ours_s):.3f} s"
        )
        del plain
        before = server.fleet.counters()
        offloaded.train_step()
        report_bytes(server.fleet.counters() - before)
        print(f"  small GEMM: {small_gemm_s(server.fleet) * 1e3:.2f} ms (at most 5)")

        pids = [os.getpid(), *(p.process.pid for p in processes)]
        while offloaded.step < 5:
            offloaded.train_step()
        start, early = offloaded.step, settled_bytes(offloaded, pids)
        while offloaded.step < start + soak:
            offloaded.train_step()
        late = settled_bytes(offloaded, pids)
        growth = [b / a - 1 for a, b in zip(early, late, strict=True)]
        print(
            f"  memory from step {start} to {offloaded.step}: PS "
            f"{early[0] / 1e6:.0f} to {late[0] / 1e6:.0f} MB ({growth[0]:+.2%}), devices "
            f"{max(growth[1:]):+.2%} at most (below 2 %), {max(late[1:]) / 1e6:.0f} MB largest"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--soak", type=int, default=50)
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 4])
    options = parser.parse_args()
    for devices in options.devices:
        measure(devices, options.pairs, options.soak)


if __name__ == "__main__":
    main()
