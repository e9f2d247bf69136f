"""Train OPT-1.3B on a machine with 24 GB, using the normal command line.

    python -m benchmarks.large_model [--model opt-1.3b] [--seq 512] [--clip 1] [--methods METHODS]

Trains two steps in plain PyTorch, in a program without Cleave that saves memory in the same way
(gradient checkpointing, and an optimizer that steps in the backward pass). Then runs `cleave train
--devices 8 --batch 2 --seq 512 --dtype bf16` with each method, with `--devices 0`, and with
`--devices 0 --state-dir`. By stages, this process also holds the devices' weights and all
gradients, so the optimizer's state goes to files there as well. Prints peak memory, peak anonymous
memory, seconds of the second step over plain PyTorch's, and differences of the losses from those of
`--devices 0`, which has the same weights and text. Exit code 1 beyond a limit. The memory limit is
for anonymous memory, because pages of mapped files are dropped when memory is short. Runs by stages
are not judged: eight devices share the machine's two cores, and ONNX Runtime has no bf16 products
on the CPU, while PyTorch uses the CPU's own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MEMORY_GB: Final = 22.0
RATIO: Final = 1.3
DIFFERENCE: Final = 0.02
_LOOK_S: Final = 0.1


@dataclass(frozen=True)
class Run:
    """The figures of one command.

    Attributes:
        losses: losses of the steps.
        step_s: wall time of the last step in seconds.
        peak_gb: peak resident memory, including pages of mapped files.
        anonymous_gb: peak anonymous memory.
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
            "--clip", str(options.clip), *(["--state-dir", state] if state else []),
        ]  # fmt: skip
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        steps: list[tuple[float, float]] = []
        with _watched(process.pid) as most:
            for line in process.stdout:
                record = json.loads(line)
                if record["event"] == "step":
                    steps.append((record["loss"], record["wall_s"]))
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"the command failed: {' '.join(command)}")
    losses = [loss for loss, _ in steps]
    return Run(losses, steps[-1][1], usage.ru_maxrss * 1024 / 1e9, max(most) / 1e9)


def plain_pytorch(options: argparse.Namespace) -> Run:
    """Train two steps without Cleave, in a separate process."""
    command = [sys.executable, "-m", "benchmarks.plain_step", options.model, "2", str(options.seq)]
    command.append(str(options.clip))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with _watched(process.pid) as most:
        steps = [float(json.loads(line)["wall_s"]) for line in process.stdout]
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"the command failed: {' '.join(command)}")
    return Run([], steps[-1], usage.ru_maxrss * 1024 / 1e9, max(most) / 1e9)


@contextmanager
def _watched(pid: int) -> Iterator[list[int]]:
    """Sample a process's anonymous memory several times per second."""
    found, over = [0], threading.Event()

    def look() -> None:
        while not over.wait(_LOOK_S):
            found.append(_anonymous_bytes(pid))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def _anonymous_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    found = (int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))
    return 1024 * next(found, 0)  # a process that has ended has no such line


def main() -> None:
    """Run all and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="opt-1.3b")
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--methods", default="auto,tiles,stages")
    options = parser.parse_args()
    title = f"{options.model}, bf16, 2 x {options.seq} tokens, 2 steps, --clip {options.clip:g}"
    print(title, flush=True)
    plain = plain_pytorch(options)
    _tell("plain PyTorch", plain)
    alone = run(options, 0, "local")
    _tell("--devices 0", alone)
    good = _in_time(alone, plain)
    with tempfile.TemporaryDirectory(prefix="cleave-benchmark-") as state:
        mapped = run(options, 0, "local", state)
    _tell("with --state-dir", mapped)
    good &= _in_time(mapped, plain)
    print(f"  losses the same to the bit: {mapped.losses == alone.losses}", flush=True)
    good &= mapped.losses == alone.losses
    for method in options.methods.split(","):
        with tempfile.TemporaryDirectory(prefix="cleave-benchmark-") as state:
            ours = run(options, 8, method, state if method == "stages" else "")
        _tell(f"8 emulated devices by {method}", ours)
        judged = method != "stages"
        good &= _in_time(ours, plain) or not judged
        worst = max(abs(a / b - 1) for a, b in zip(ours.losses, alone.losses, strict=True))
        print(f"  losses {worst:.1e} from those alone (at most {DIFFERENCE})", flush=True)
        good &= worst <= DIFFERENCE
    sys.exit(0 if good else 1)


def _in_time(run: Run, plain: Run) -> bool:
    ratio = run.step_s / plain.step_s
    good = ratio <= RATIO and run.anonymous_gb <= MEMORY_GB
    print(
        f"  {ratio:.2f} times the plain step (at most {RATIO}), at most {MEMORY_GB:g} GB: "
        f"{'met' if good else 'MISSED'}",
        flush=True,
    )
    return good


def _tell(what: str, run: Run) -> None:
    print(
        f"{what}: {run.step_s:.1f} s the second step, {run.peak_gb:.1f} GB at most, "
        f"{run.anonymous_gb:.1f} GB at most in no file",
        flush=True,
    )


if __name__ == "__main__":
    main()
