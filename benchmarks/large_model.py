"""OPT-1.3B on a machine of 24 GB, with the commands that a user gives.

    python -m benchmarks.large_model [--model opt-1.3b] [--seq 512] [--methods tiles,stages]

Runs `cleave train --devices 8 --batch 2 --seq 512 --dtype bf16` for two steps by each method, the
same with `--devices 0` (plain PyTorch, with the same way to save memory), and that with
`--state-dir`. By stages the devices' weights are in this process, too, beside all gradients, so the
optimizer's state goes to files there as well. Prints peak memory, what of it was not in files,
seconds of the second step as ratios to plain PyTorch, and how far the losses are from its. Exit
code 1 beyond a limit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MEMORY_GB: Final = 22.0
RATIO: Final = 1.3
DIFFERENCE: Final = 0.02


@dataclass(frozen=True)
class Run:
    """What one command took.

    Attributes:
        losses: of its steps.
        step_s: of the last step, wall time.
        peak_gb: largest resident memory, with pages of mapped files.
        anonymous_gb: memory that is in no file, at the end of the last step.
    """

    losses: list[float]
    step_s: float
    peak_gb: float
    anonymous_gb: float


def run(options: argparse.Namespace, devices: int, method: str, state: str = "") -> Run:
    """Train two steps."""
    with tempfile.TemporaryDirectory(prefix="cleave-benchmark-") as folder:
        command = [
            sys.executable, "-m", "cleave_cli", "train", "--model", options.model, "--devices",
            str(devices), "--steps", "2", "--batch", "2", "--seq", str(options.seq), "--dtype",
            "bf16", "--method", method, "--json", "--runs", folder, "--checkpoint-every", "0",
            *(["--state-dir", state] if state else []),
        ]  # fmt: skip
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        steps: list[tuple[float, float]] = []
        anonymous = 0
        for line in process.stdout:
            record = json.loads(line)
            if record["event"] == "step":
                steps.append((record["loss"], record["wall_s"]))
                anonymous = _anonymous_bytes(process.pid)
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"the command failed: {' '.join(command)}")
    losses = [loss for loss, _ in steps]
    return Run(losses, steps[-1][1], usage.ru_maxrss * 1024 / 1e9, anonymous / 1e9)


def _anonymous_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def main() -> None:
    """Run all and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="opt-1.3b")
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--methods", default="tiles,stages")
    options = parser.parse_args()
    print(f"{options.model}, bf16, 2 x {options.seq} tokens, 2 steps", flush=True)
    plain = run(options, 0, "local")
    _tell("plain PyTorch", plain)
    good = True
    with tempfile.TemporaryDirectory(prefix="cleave-benchmark-") as state:
        mapped = run(options, 0, "local", state)
    _tell("with --state-dir", mapped)
    print(f"  {mapped.step_s / plain.step_s:.2f} times the plain step; losses as plain to the bit: "
          f"{mapped.losses == plain.losses}", flush=True)  # fmt: skip
    good &= mapped.losses == plain.losses
    for method in options.methods.split(","):
        with tempfile.TemporaryDirectory(prefix="cleave-benchmark-") as state:
            ours = run(options, 8, method, state if method == "stages" else "")
        _tell(f"8 emulated devices by {method}", ours)
        worst = max(abs(a / b - 1) for a, b in zip(ours.losses, plain.losses, strict=True))
        ratio = ours.step_s / plain.step_s
        print(
            f"  {ratio:.2f} times the plain step (at most {RATIO}); losses {worst:.1e} from plain "
            f"(at most {DIFFERENCE}); at most {MEMORY_GB:g} GB",
            flush=True,
        )
        good &= ratio <= RATIO and worst <= DIFFERENCE and ours.peak_gb <= MEMORY_GB
    sys.exit(0 if good else 1)


def _tell(what: str, run: Run) -> None:
    print(
        f"{what}: {run.step_s:.1f} s the second step, {run.peak_gb:.1f} GB at most, "
        f"{run.anonymous_gb:.1f} GB of it in no file at the end",
        flush=True,
    )


if __name__ == "__main__":
    main()
