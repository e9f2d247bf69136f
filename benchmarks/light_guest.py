"""Measure the start-up time and memory of a device process.

    python -m benchmarks.light_guest

Makes a fresh virtual environment with only Cleave's base requirements (no torch), joins a server
from it, and prints the time from the command until the device is ready, and resident memory before
and after computing, without the operands.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

import numpy as np

import cleave
from benchmarks.common import resident_bytes
from cleave.arrays import Buffer, DType, empty
from cleave.fleet.product import Side

ROOT = Path(__file__).resolve().parent.parent


def base_environment(folder: Path) -> Path:
    """Make a virtual environment with the base requirements; return its `cleave` command."""
    venv.create(folder, with_pip=True)
    subprocess.run(
        [folder / "bin" / "pip", "install", "--quiet", "--editable", str(ROOT)], check=True
    )
    probe = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is not None)"
    subprocess.run([folder / "bin" / "python", "-c", probe], check=True)
    return folder / "bin" / "cleave"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cleave-benchmark-") as folder:
        command = base_environment(Path(folder))
        ready_s, idle, used = [], [], []
        weight = Buffer(np.zeros((3072, 768), np.float32), DType.FP32)
        x = Buffer(np.zeros((64, 768), np.float32), DType.FP32)
        out = empty(64, 3072, DType.FP32)
        operand_bytes = weight.nbytes + x.nbytes + out.nbytes
        for _ in range(options.repeats):
            with cleave.serve() as server:
                began_s = time.perf_counter()
                process = subprocess.Popen(
                    [command, "join", server.url, "--json", "--threads", "1", "--once"],
                    stdout=subprocess.PIPE, text=True,
                )  # fmt: skip
                assert process.stdout is not None
                event = json.loads(process.stdout.readline())
                ready_s.append(time.perf_counter() - began_s)
                assert event["event"] == "ready", event
                server.fleet.wait_for(1)
                idle.append(resident_bytes(process.pid) / 1e6)
                a, b = server.fleet.operand(x), server.fleet.operand(weight)
                for _ in range(20):
                    server.fleet.submit(Side(a), Side(b, True), out).result()
                used.append(resident_bytes(process.pid) / 1e6)
            process.wait()
        print(f"backend {event['executor']}, Python {sys.version.split()[0]}, no torch")
        print(
            f"  ready after {statistics.median(ready_s):.2f} s (below 1); worst {max(ready_s):.2f}"
        )
        print(
            f"  resident: {statistics.median(idle):.0f} MB once joined, "
            f"{statistics.median(used):.0f} MB after GEMMs with {operand_bytes / 1e6:.0f} MB of "
            f"operands and results (below 100 MB plus those)"
        )


if __name__ == "__main__":
    main()
