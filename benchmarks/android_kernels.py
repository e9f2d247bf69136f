"""The Android client's CPU kernel on a JVM, against a naive triple loop.

    python -m benchmarks.android_kernels

Needs a JDK and the Java libraries listed in `android_client/README.md`. Speed: products of
512 x 512 fp32 matrices. The naive loop, the kernel on one thread and the kernel on all threads take
turns for several rounds in one process. Each figure is the median over rounds of the best try.
Errors: the largest element error against double precision, as a share of the rounding bound (all
dtypes, transposed operands, odd sizes; above 1 is wrong). Phones have another compiler, so this
says nothing about their speed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.android.jvm import compile_core, missing

SIDE = 512


def measured(folder: Path, rounds: int, time_s: float) -> list[dict[str, Any]]:
    """Run the Java program and return its records: one per round, and one of errors."""
    command = compile_core(folder).run(
        "cleave.core.kernels.KernelBenchmark", str(SIDE), str(rounds), str(time_s)
    )
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def report(records: list[dict[str, Any]]) -> None:
    """Print speeds, ratios and errors."""
    *rounds, errors = records
    print(f"{SIDE}-sided fp32 squares, median of {len(rounds)} rounds:")
    names = {
        "naive": "naive triple loop",
        "one": "kernel, 1 thread",
        "all": f"kernel, {errors['threads']} threads",
    }
    for key, name in names.items():
        speed = statistics.median(record[key] for record in rounds)
        print(f"  {name:20} {speed / 1e9:8.2f} GFLOP/s")
    for key in ("one", "all"):
        ratios = [record[key] / record["naive"] for record in rounds]
        print(
            f"  {names[key] + ' / naive':28} {statistics.median(ratios):6.1f}  "
            f"(from {min(ratios):.1f} to {max(ratios):.1f})"
        )
    print(f"  ({errors['about']})")
    print(
        f"errors, as a share of what rounding allows: {errors['share']:.2f} on odd sizes, "
        f"{errors['square_share']:.4f} on squares of {SIDE}"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--time-s", type=float, default=0.7, help="for each measurement")
    options = parser.parse_args()
    if reason := missing():
        raise SystemExit(reason)
    with TemporaryDirectory() as folder:
        report(measured(Path(folder) / "java", options.rounds, options.time_s))


if __name__ == "__main__":
    main()
