"""Compare several servers with one: losses, cost of a killed server, and whether devices stay.

Ray's nodes are processes on this machine, and devices are emulated in real time. Every run is a
separate `cleave train`, on 2 and 4 nodes with as many servers. All devices join the first server
and are redirected to the others. Sequences do not divide evenly. Losses are compared with those of
one server and of plain PyTorch. One run of each method kills a server by SIGKILL in mid-step. Exit
code 1 if losses differ from one server's by more than 1e-4, or if devices left when a server was
killed. With `--served` jobs go to `cleave serve --servers N` instead, once its devices are spread.

    python -m benchmarks.servers    # needs cleave-train[ray]; about 15 minutes on 2 cores
    python -m benchmarks.servers --only stages --servers 1,2 --no-kill
    python -m benchmarks.servers --only tiles --memory sharded    # servers share the weights
    python -m benchmarks.servers --only stages --servers 2 --served
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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from cleave.transport.addresses import outside_address

WAIT_S = 600.0
MOST_OFF = 1e-4
STEP = "step"


@dataclass(frozen=True, slots=True)
class Setting:
    """The common settings of all runs."""

    model: str
    steps: int
    batch: int
    seq: int
    devices: int
    memory: str

    @property
    def options(self) -> list[str]:
        """Return the options of `cleave train`."""
        return [
            "--model", self.model, "--steps", str(self.steps), "--batch", str(self.batch),
            "--seq", str(self.seq), "--json",
        ]  # fmt: skip


@dataclass(slots=True)
class Run:
    """The result of one run.

    Attributes:
        losses: loss of each step.
        step_s: median seconds of a step.
        wall_s: seconds from the end of the first step to the end of the last.
        joined: number of joins; redirected devices count twice.
        fewest: smallest number of connected devices after a server was killed.
        dealt: the servers' reports on the sequences of each server.
        lost_s, redone: after a server was killed, seconds until its step was finished, and number
            of repeated steps.
    """

    losses: list[float]
    step_s: float
    wall_s: float
    joined: int
    fewest: int
    dealt: list[str]
    lost_s: float = 0.0
    redone: int = 0


def cleave(*arguments: str) -> list[str]:
    """Return the command line of a `cleave` command."""
    return [sys.executable, "-m", "cleave_cli", *arguments]


@contextmanager
def nodes(count: int) -> Iterator[str]:
    """Run a Ray cluster of `count` nodes on this machine; yield its address."""
    ray = str(Path(sys.executable).parent / "ray")
    host, port = outside_address(), 26379
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    common = [
        "--num-cpus", "1", "--disable-usage-stats", "--node-ip-address", host,
        "--object-store-memory", str(400 * 2**20),
    ]  # fmt: skip
    head = [ray, "start", "--head", "--port", str(port), "--include-dashboard", "false", *common]
    subprocess.run(head, check=True, **quiet)
    try:
        for _ in range(count - 1):
            subprocess.run(
                [ray, "start", "--address", f"{host}:{port}", *common], check=True, **quiet
            )
        yield f"{host}:{port}"
    finally:
        subprocess.run([ray, "stop", "--force"], check=False, **quiet)


def records(path: Path) -> list[dict[str, Any]]:
    """Return the records that a command has printed so far."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def wait_for(path: Path, process: subprocess.Popen[bytes], enough: int, event: str) -> None:
    """Wait until a command has printed `enough` records of an event."""
    until_s = time.monotonic() + WAIT_S
    while sum(record.get("event") == event for record in records(path)) < enough:
        if process.poll() is not None or time.monotonic() > until_s:
            raise SystemExit(f"the run ended with {process.poll()}; see {path.parent}")
        time.sleep(0.05)


def started(command: Sequence[str], out: Path) -> subprocess.Popen[bytes]:
    """Start a command with stdout in a file and stderr in a file next to it."""
    with out.open("wb") as printed, out.with_suffix(".err").open("wb") as errors:
        return subprocess.Popen(command, stdout=printed, stderr=errors)


@contextmanager
def training(
    setting: Setting, method: str, servers: int, folder: Path, *, served: bool
) -> Iterator[subprocess.Popen[bytes]]:
    """Train on `servers` servers with emulated devices; yield the process that prints the steps."""
    out = folder / "train.jsonl"
    job = (
        "train", *setting.options, "--method", method, "--audit", "0.2", "--checkpoint-every", "5",
        "--memory", setting.memory,
    )  # fmt: skip
    with nodes(servers) as address, ExitStack() as opened:
        several = ("--servers", str(servers), "--ray", address, "--runs", str(folder / "runs"))
        first = folder / "serve.jsonl" if served else out
        command = (
            cleave("serve", *several, "--port", "27000", "--data", str(folder / "data"),
                   "--credential", "of the benchmark", "--stages-on", "any", "--json")
            if served
            else cleave(*job, *several, "--listen", "127.0.0.1:27000")
        )  # fmt: skip
        listening = started(command, first)
        opened.callback(listening.wait, 60)
        opened.callback(listening.terminate)
        wait_for(first, listening, 1, "listening")
        at = next(each for each in records(first) if each["event"] == "listening")
        fleet = emulate(at["url"], setting.devices, folder / "fleet.jsonl")
        opened.callback(fleet.wait, 60)
        opened.callback(fleet.terminate)
        if served:
            wait_until_spread(at["operator_url"], setting.devices)
            yield started(cleave(*job, "--server", at["operator_url"]), out)
        else:
            yield listening


def wait_until_spread(server: str, devices: int) -> None:
    """Wait until `cleave status` reports evenly spread devices."""
    counts: list[int] = []
    until_s = time.monotonic() + WAIT_S
    while sum(counts) < devices or max(counts) - min(counts) > 1:
        if time.monotonic() > until_s:
            raise SystemExit(f"the devices are not spread: {counts}")
        time.sleep(1)
        command = cleave("status", "--server", server, "--json")
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        counts = [count or 0 for count in json.loads(said)["server"]["servers"]]


def train(
    setting: Setting,
    method: str,
    servers: int,
    folder: Path,
    killed_after: int | None = None,
    *,
    served: bool,
) -> Run:
    """Train on `servers` servers; kill one of them in the step after `killed_after`."""
    out = folder / "train.jsonl"
    with training(setting, method, servers, folder, served=served) as job:
        try:
            lost_s, before, after = 0.0, 0, 0
            if killed_after is not None:
                wait_for(out, job, killed_after, STEP)
                time.sleep(0.3)  # wait until the next step is running
                before = len(records(folder / "fleet.jsonl"))
                lost_s = -time.monotonic()
                kill_a_server()
                done = killed_after + 1
                while max(r["step"] for r in records(out) if r["event"] == STEP) < done:
                    time.sleep(0.05)
                lost_s += time.monotonic()
                while max(r["step"] for r in records(out) if r["event"] == STEP) < setting.steps:
                    time.sleep(0.05)
                after = len(records(folder / "fleet.jsonl"))
            if job.wait(WAIT_S):
                raise SystemExit(f"cleave train failed; see {folder}")
        finally:
            job.kill()
    steps = [each for each in records(out) if each["event"] == STEP]
    seen = records(folder / "fleet.jsonl")
    joined = next(each["joined"] for each in seen if each["event"] == "summary")
    rates = [each for each in seen[before:after] if each["event"] == "rates"]
    fewest = min((each["connected"] for each in rates), default=setting.devices)
    final = {each["step"]: each for each in steps}
    times = sorted(each["wall_s"] for each in final.values())
    return Run(
        [final[step]["loss"] for step in sorted(final)],
        times[len(times) // 2],
        sum(times),
        joined,
        fewest,
        [
            line.removeprefix("server 1: ")
            for line in (folder / "train.err").read_text().splitlines()
            if "sequences of each step" in line
        ],
        lost_s,
        len(steps) - len(final),
    )


def emulate(url: str, devices: int, out: Path) -> subprocess.Popen[bytes]:
    """Start devices that join at a URL."""
    with out.open("wb") as printed:
        return subprocess.Popen(
            cleave(
                "emulate",
                "--devices",
                str(devices),
                "--fleet",
                "paper",
                "--server",
                url,
                "--json",
            ),
            stdout=printed,
            stderr=subprocess.DEVNULL,
        )


def kill_a_server() -> None:
    """Kill the worker of Ray Train that was started last."""
    found = [
        process
        for process in psutil.process_iter(["cmdline"])
        if "RayTrainWorker" in " ".join(process.info["cmdline"] or ())
    ]
    max(found, key=lambda process: process.create_time()).kill()


def here(setting: Setting, folder: Path, *options: str) -> list[float]:
    """Return the losses of one server with devices emulated in its process."""
    command = cleave("train", *setting.options, *options, "--runs", str(folder / "runs"))
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return [each["loss"] for each in found if each["event"] == STEP]


def main() -> None:
    """Print a row for each run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-tiny")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=9)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--devices", type=int, default=40)
    parser.add_argument("--servers", default="2,4")
    parser.add_argument("--only", default="stages,tiles")
    parser.add_argument("--memory", default="auto", help="of several servers")
    parser.add_argument("--no-kill", action="store_true")
    parser.add_argument("--served", action="store_true")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["RAY_AUTH_MODE"] = "token"  # made by `ray start --head` in the user's home folder
    os.environ.setdefault("PYTHONPATH", os.getcwd())
    setting = Setting(given.model, given.steps, given.batch, given.seq, given.devices, given.memory)
    base = Path(tempfile.mkdtemp(prefix="cleave-servers-"))
    plain = here(setting, base, "--devices", "0")
    methods = given.only.split(",")
    alone = {each: here(setting, base, "--devices", "8", "--method", each) for each in methods}
    print(
        f"{setting.model}, {setting.steps} steps of {setting.batch}x{setting.seq} tokens, fp32, "
        f"{setting.devices} devices in real time"
    )
    print(
        f"{'method':8}{'servers':>8}{'off one':>10}{'off plain':>11}{'s a step':>10}{'joined':>8}"
        "  killed"
    )
    counts = [int(each) for each in given.servers.split(",")]
    runs: list[tuple[str, int, int | None]] = [(m, n, None) for m in methods for n in counts]
    if not given.no_kill:
        runs += [(method, 2, given.steps // 2 + 1) for method in methods]
    good = True
    for number, (method, servers, killed) in enumerate(runs):
        folder = base / str(number)
        folder.mkdir()
        run = train(setting, method, servers, folder, killed, served=given.served)
        off, off_plain = (most_off(run.losses, each) for each in (alone[method], plain))
        text = ""
        if killed is not None:
            text = (
                f"in step {killed + 1}: {run.lost_s:.1f} s, {run.redone} steps again, "
                f"{run.fewest} devices stayed"
            )
        print(
            f"{method:8}{servers:8}{off:10.1e}{off_plain:11.1e}{run.step_s:10.2f}"
            f"{run.joined:8}  {text}",
            flush=True,
        )
        for text in run.dealt:
            print(f"{'':10}{text}")
        good &= off <= MOST_OFF and run.fewest == setting.devices
    sys.exit(not good)


def most_off(losses: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest difference between the two losses of a step."""
    return max(abs(a - b) for a, b in zip(losses, expected, strict=True))


if __name__ == "__main__":
    main()
