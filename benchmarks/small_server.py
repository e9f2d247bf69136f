"""Train a model with a server that has too little memory to train it alone (Linux, root).

    python -m benchmarks.small_server [--model opt-350m] [--limit-gb 2.5] [--devices 3] [--steps 4]

A memory cgroup limits the server and the job that runs on it. Devices are `cleave join` processes
without a limit. The first run trains on the server alone, and should be killed. The second run has
`--state devices --state-dir`, so devices keep the layers' weights and optimizer state, and the
server's snapshot is in files. The peak contains the page cache, which the kernel frees when it
needs memory. Ends with 1 unless the first run fails and the second one reaches its last step.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.integration.processes import free_port

GROUPS: Final = Path("/sys/fs/cgroup")
CLEAVE: Final = (sys.executable, "-m", "cleave_cli")
START_S: Final = 90.0


@contextmanager
def limited(name: str, limit_bytes: int) -> Iterator[Path]:
    """Yield a memory cgroup with a limit."""
    old = GROUPS / "memory"  # version 1
    group = (old if old.is_dir() else GROUPS) / f"cleave-{os.getpid()}-{name}"
    group.mkdir()
    try:
        limit = "memory.limit_in_bytes" if old.is_dir() else "memory.max"
        (group / limit).write_text(str(limit_bytes))
        yield group
    finally:
        for _ in range(100):  # the kernel removes ended processes from the group with a delay
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.1)


def peak_bytes(group: Path) -> int:
    """Return the peak memory of a cgroup."""
    names = ("memory.max_usage_in_bytes", "memory.peak")
    return int(next(group / name for name in names if (group / name).exists()).read_text())


@contextmanager
def started(command: Sequence[str], log: Path, group: Path | None = None) -> Iterator[None]:
    """Run a process in the `with` block, in a cgroup if given."""
    held = ("sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs")) if group else ()
    with log.open("w") as out:
        process = subprocess.Popen(
            [*held, *CLEAVE, *command],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        try:
            yield
        finally:
            process.kill()
            process.wait()


def steps_of(model: str, limit_bytes: int, devices: int, steps: int) -> tuple[int, int]:
    """Train with `devices` devices, or alone without; return completed steps and peak memory."""
    with tempfile.TemporaryDirectory() as name, limited(f"of-{devices}", limit_bytes) as group:
        folder, port = Path(name), free_port()
        url = f"ws://127.0.0.1:{port}/ws"
        codes = ("--credential", "k", "--operator-credential", "o")
        serve = ("serve", "--port", port, "--data", "none", "--stages-on", "any", *codes)
        how = (
            ("--method", "stages", "--state", "devices", "--state-dir", str(folder / "state"))
            if devices
            else ("--method", "local", "--fallback", "local", "--memory", "plain")
        )
        with started((*serve, "--runs", str(folder / "runs")), folder / "server.log", group):
            until_s = time.monotonic() + START_S
            while "listening" not in (folder / "server.log").read_text():
                if time.monotonic() > until_s:
                    raise TimeoutError((folder / "server.log").read_text()[-500:])
                time.sleep(0.1)
            with _joined(url, devices, folder):
                done = subprocess.run(
                    [
                        *CLEAVE, "train", "--json", "--model", model, "--steps", str(steps),
                        "--batch", "2", "--seq", "128", "--checkpoint-every", "0",
                        "--server", f"{url}#c=o", *how,
                    ],
                    capture_output=True, text=True,
                )  # fmt: skip
            events = [json.loads(line) for line in done.stdout.splitlines() if line[:1] == "{"]
            if done.returncode:
                print(f"  {done.stderr.strip().splitlines()[-1:]}", flush=True)
            return sum(event["event"] == "step" for event in events), peak_bytes(group)


@contextmanager
def _joined(url: str, devices: int, folder: Path) -> Iterator[None]:
    """Run devices in the `with` block."""
    if not devices:
        yield
        return
    join = ("join", f"{url}#c=k", "--memory", "6GB")
    with started(join, folder / f"device-{devices}.log"), _joined(url, devices - 1, folder):
        yield


def main() -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="opt-350m")
    parser.add_argument("--limit-gb", type=float, default=2.5)
    parser.add_argument("--devices", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    limit, met = round(options.limit_gb * 1e9), True
    for devices in (0, options.devices):
        steps, peak = steps_of(options.model, limit, devices, options.steps)
        who = f"{devices} devices keep the layers" if devices else "the server alone"
        print(
            f"{options.model}, server limited to {options.limit_gb:g} GB, {who}: {steps} of "
            f"{options.steps} steps, peak {peak / 1e9:.2f} GB",
            flush=True,
        )
        met &= steps == (options.steps if devices else 0)
    print("met" if met else "NOT met")
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
