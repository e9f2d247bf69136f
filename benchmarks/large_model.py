"""OPT-1.3B on a 24 GB machine, with the command that a user gives: peak memory and losses.

    python -m benchmarks.large_model

Runs `cleave train --model opt-1.3b --devices 8 --steps 2 --batch 2 --seq 256 --dtype bf16` and the
same with `--devices 0`; prints peak resident memory and the relative difference of the losses.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time


def run(devices: int, options: argparse.Namespace) -> tuple[list[float], float, float]:
    """Return losses, peak resident memory in GB, and seconds of one run."""
    command = [
        sys.executable, "-m", "cleave_cli", "train", "--model", options.model, "--devices",
        str(devices), "--steps", "2", "--batch", "2", "--seq", "256", "--dtype", "bf16",
        "--method", "tiles", "--json", "--runs", tempfile.mkdtemp(prefix="cleave-benchmark-"),
    ]  # fmt: skip
    began_s = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    records = [json.loads(line) for line in process.stdout]
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"the command failed: {' '.join(command)}")
    losses = [record["loss"] for record in records if record["event"] == "step"]
    return losses, usage.ru_maxrss * 1024 / 1e9, time.perf_counter() - began_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="opt-1.3b")
    options = parser.parse_args()
    ours, ours_gb, ours_s = run(8, options)
    plain, plain_gb, plain_s = run(0, options)
    worst = max(abs(a - b) / abs(b) for a, b in zip(ours, plain, strict=True))
    print(f"{options.model}, bf16, batch 2, sequence 256, 2 steps, 8 emulated devices")
    print(f"  peak memory: {ours_gb:.1f} GB (below 22); plain PyTorch {plain_gb:.1f} GB")
    print(f"  losses: {ours}, all finite: {all(map(math.isfinite, ours))}")
    print(f"  relative difference to --devices 0: {worst:.2e} (below 0.02)")
    print(f"  whole command: {ours_s:.0f} s; plain {plain_s:.0f} s")


if __name__ == "__main__":
    main()
