"""Measure the cost of a straggler to a job, with a real server and real processes.

    python -m benchmarks.stragglers [--late 5] [--good 3] [--steps 80] [--model opt-nano]
                                    [--at-once] [--from-start]

Two servers in this process have `--good` device processes each. The second also has the straggler.
Its results are right, but from its first task on (`--from-start`: also while its link is measured)
it answers `--late` seconds late, one answer after the other (`--at-once`: delays overlap). The same
job of `--steps` steps runs on both servers in turn, so that other load on this machine slows both
alike. Then the straggler recovers, and the time until it gets tasks again is printed.

Limit: the mean of the steps after the tenth is at most 1.15 times that without the straggler.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import cleave
from benchmarks.common import make_trainer
from cleave.device.compute_thread import ComputeThread, Outcome
from cleave.device.core import Order
from cleave.device.session import DeviceSession, device_hello
from cleave.fleet.fleet import Fleet
from cleave.machine.backends import NumpyBackend
from cleave.scheduler.sessions.probe import FIRST_ID
from cleave.server.fleet_server import Server
from cleave.training.loop.job import JobSpec
from cleave.transport.connection import open_connection
from cleave.transport.join_url import parse_join_url
from tests.log_lines import logged

LIMIT: Final = 1.15
SETTLING: Final = 10
"""Number of first steps that do not count, because the server is learning the straggler's speed."""

_FLOPS_PER_S: Final = 5e9
_BYTES_PER_S: Final = 100e6
_RECOVERY_S: Final = 300.0  # time limit for the straggler's recovery


@dataclass(frozen=True)
class Lateness:
    """The lateness of a device.

    Attributes:
        seconds: delay of each answer.
        at_once: whether delays overlap instead of following one another.
        from_start: whether the device is also late while its link is measured.
    """

    seconds: float
    at_once: bool
    from_start: bool = False


class LateComputer(ComputeThread):
    """Computes at once but reports late, until `recovered` is set."""

    def __init__(self, lateness: Lateness) -> None:
        super().__init__(NumpyBackend())
        self._lateness = lateness
        self._free_s = 0.0
        self._working = lateness.from_start
        self.recovered = not lateness.seconds

    def start(self, order: Order, done: Callable[[Order, Outcome], None]) -> None:
        """See `Computer.start`."""
        loop = asyncio.get_running_loop()
        self._working |= order.run < FIRST_ID

        def late(order: Order, outcome: Outcome) -> None:
            if self.recovered or not self._working:
                done(order, outcome)
                return
            from_s = loop.time() if self._lateness.at_once else max(loop.time(), self._free_s)
            self._free_s = from_s + self._lateness.seconds
            loop.call_at(self._free_s, done, order, outcome)

        super().start(order, late)


async def serve(url: str, name: str, lateness: Lateness) -> None:
    """Run a device until the server ends; SIGUSR1 makes it recover."""
    target = parse_join_url(url)
    # Measured rates are unreliable on a busy machine, so state them unless lateness should show.
    rate = 0.0 if lateness.from_start else _BYTES_PER_S
    hello = device_hello(
        credential=target.credential, name=name, memory_bytes=10**9, flops_per_s=_FLOPS_PER_S,
        downlink_bytes_per_s=rate, uplink_bytes_per_s=rate,
    )  # fmt: skip
    computer = LateComputer(lateness)

    def recover() -> None:
        computer.recovered = True

    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, recover)
    await DeviceSession(await open_connection(target), computer, hello).run()


@contextmanager
def device(server: Server, name: str, lateness: Lateness) -> Iterator[subprocess.Popen[bytes]]:
    """Run a device process, and yield it once it has joined."""
    command = [sys.executable, "-m", "benchmarks.stragglers", "--device", server.url]
    command += ["--name", name, "--late", str(lateness.seconds)]
    command += ["--at-once"] if lateness.at_once else []
    command += ["--from-start"] if lateness.from_start else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    there = server.fleet.device_count
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        while server.fleet.device_count == there:
            if process.poll() is not None:
                raise SystemExit(f"the device {name} did not join")
            time.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.wait()


def steps_s(servers: Sequence[Server], job: JobSpec) -> list[list[float]]:
    """Return the seconds of each step of a job for each server; the servers take turns."""
    trainers = [make_trainer(job, Fleet(server.live, server.fleet.planner)) for server in servers]
    found: list[list[float]] = [[] for _ in servers]
    for _ in range(job.steps):
        for trainer, steps in zip(trainers, found, strict=True):
            steps.append(trainer.train_step().wall_s)
    return found


def until_it_works(server: Server, job: JobSpec, name: str) -> float | None:
    """Train until a device's results are used again; return the seconds, None after a timeout."""

    def blocks() -> int:
        found = (d for d in server.describe_devices() if d["name"] == name)
        return sum(int(str(d["blocks"])) for d in found)

    trainer = make_trainer(job, Fleet(server.live, server.fleet.planner))
    began_s, before = time.monotonic(), blocks()
    while blocks() < before + 20:
        if time.monotonic() - began_s > _RECOVERY_S:
            return None
        trainer.train_step()
    return time.monotonic() - began_s


def described(steps: Sequence[float]) -> str:
    """Return a description of the steps that count."""
    counted = steps[SETTLING:]
    return (
        f"mean {statistics.mean(counted):.3f} s, median {statistics.median(counted):.3f} s, "
        f"worst {max(counted):.2f} s; of the first {SETTLING} mean "
        f"{statistics.mean(steps[:SETTLING]):.2f} s, worst {max(steps[:SETTLING]):.2f} s"
    )


def measure(options: argparse.Namespace) -> bool:
    """Run the benchmark; return whether the limit is met."""
    job = JobSpec(
        model=options.model, data=str(Path(__file__)), steps=options.steps, batch=options.batch,
        seq=options.seq, checkpoint_every=0, method="tiles",
    )  # fmt: skip
    prompt = Lateness(0.0, at_once=False)
    late = Lateness(options.late, options.at_once, options.from_start)
    shown = logging.StreamHandler(sys.stdout)
    shown.setFormatter(logging.Formatter("    %(message)s"))
    shown.addFilter(lambda record: "straggler" in record.getMessage())
    with (
        logged(shown),
        cleave.serve() as plain,
        cleave.serve() as other,
        contextmanager(_several)(plain, options.good, prompt),
        contextmanager(_several)(other, options.good, prompt),
        device(other, "straggler", late) as straggler,
    ):
        without, with_it = steps_s([plain, other], job)
        print(f"{options.good} good devices: {described(without)}", flush=True)
        print(f"and one {options.late:g} s late: {described(with_it)}", flush=True)
        straggler.send_signal(signal.SIGUSR1)
        back_s = until_it_works(other, job, "straggler")
    ratio = statistics.mean(with_it[SETTLING:]) / statistics.mean(without[SETTLING:])
    print(
        f"when it recovers it works again after "
        f"{'more than ' if back_s is None else ''}{_RECOVERY_S if back_s is None else back_s:.0f} s"
    )
    met = ratio <= LIMIT
    print(
        f"mean step after the tenth with the straggler, to that without: {ratio:.3f} "
        f"(at most {LIMIT}): {'met' if met else 'NOT met'}"
    )
    return met


def _several(server: Server, count: int, lateness: Lateness) -> Iterator[None]:
    if not count:
        yield
        return
    with device(server, f"good {count}", lateness):
        yield from _several(server, count - 1, lateness)


def main() -> None:
    """Measure, or run a device."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--late", type=float, default=5.0)
    parser.add_argument("--at-once", action="store_true")
    parser.add_argument("--from-start", action="store_true")
    parser.add_argument("--good", type=int, default=3)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--model", default="opt-nano")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--device", default="", help=argparse.SUPPRESS)
    parser.add_argument("--name", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.device:
        late = Lateness(options.late, options.at_once, options.from_start)
        asyncio.run(serve(options.device, options.name, late))
    elif not measure(options):
        sys.exit(1)


if __name__ == "__main__":
    main()
