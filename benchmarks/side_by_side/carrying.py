"""Measure the CPU cost of emulated links: sum gradients over gloo and do nothing else.

    python -m benchmarks.side_by_side.carrying [--link 1000/1000] [--mb 500] [--json FILE]

Four processes in namespaces behind links of 20 ms sum `--mb` of fp32, as DDP does for a model of
that size. A process on this machine carries a link's packets, so fast links take CPU time from
computation, unlike the network cards of real devices. Prints the duration of the sum, the duration
of its bytes at the links' rate, and the CPU time on all cores. `--json` keeps the result in a file
for the report (`docs/side-by-side-links.json`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import psutil

from benchmarks.common import machine
from benchmarks.links import (
    LimitedNamespace,
    let_reach_one_another,
    limited_namespace,
    namespaces_missing,
)
from benchmarks.side_by_side.contenders.group import environment
from benchmarks.side_by_side.setting import Link
from cleave.files import write_atomically

DEVICES: Final = 4
DELAY_S: Final = 0.01
BUCKET: Final = 25_000_000
"""Bytes that are summed at once, as in DDP."""

_MODULE: Final = "benchmarks.side_by_side.carrying"


@dataclass(frozen=True)
class Carried:
    """The cost of a sum over links, without other work.

    Attributes:
        link: rates of the link, as `100/20`.
        mb: summed MB of each device.
        took_s: seconds until all devices had the sum.
        passed_bytes: bytes through all links, up and down.
        cores_s: CPU seconds on all cores of the machine.
        machine: description of the machine.
    """

    link: str
    mb: int
    took_s: float
    passed_bytes: int
    cores_s: float
    machine: str

    @property
    def rate_s(self) -> float:
        """Return the seconds that a ring's bytes take at the links' rate."""
        link, nbytes = Link.of(self.link), 2 * (DEVICES - 1) / DEVICES * self.mb * 1e6
        return max(nbytes / link.up, nbytes / link.down)


def read(path: Path) -> list[Carried]:
    """Return the sums in a file; none if the file does not exist.

    Raises:
        ValueError: when the file cannot be read or has other content.
    """
    try:
        return [Carried(**told) for told in json.loads(path.read_text())]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{os.fspath(path)!r} keeps no such sums: {error}") from error


def keep(path: Path, found: Carried) -> None:
    """Add a sum to a file, replacing an earlier one with the same link."""
    sums = [*(one for one in read(path) if one.link != found.link), found]
    write_atomically(path, (json.dumps([asdict(one) for one in sums], indent=1) + "\n").encode())


def summed(nbytes: int) -> None:
    """Sum buckets with the other processes; rank 0 prints the duration and the CPU time."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    bucket = torch.ones(BUCKET // 4)
    dist.all_reduce(bucket)  # opens the connections
    dist.barrier()
    began_s, before = time.perf_counter(), psutil.cpu_times()
    for _ in range(nbytes // BUCKET):
        dist.all_reduce(bucket)
    dist.barrier()
    took_s, after = time.perf_counter() - began_s, psutil.cpu_times()
    busy_s = took_s * (os.cpu_count() or 1) - (after.idle - before.idle)
    if dist.get_rank() == 0:
        print(json.dumps({"took_s": took_s, "cores_s": busy_s}), flush=True)
    dist.destroy_process_group()


def worker(rank: int, namespaces: list[LimitedNamespace], nbytes: int) -> subprocess.Popen[str]:
    """Start a summing process in its namespace."""
    command = [sys.executable, "-m", _MODULE, "--sum", str(nbytes)]
    return subprocess.Popen(
        namespaces[rank].inside(*command),
        env=os.environ | environment(rank, namespaces),
        stdout=subprocess.PIPE,
        text=True,
    )


def measured(link: Link, mb: int) -> Carried:
    """Sum behind links.

    Raises:
        RuntimeError: if a process could not sum with the others.
    """
    with ExitStack() as stack:
        namespaces = [
            stack.enter_context(limited_namespace(number, link.down, link.up, DELAY_S))
            for number in range(DEVICES)
        ]
        let_reach_one_another(namespaces)
        began = [namespace.passed_bytes() for namespace in namespaces]
        workers = [worker(rank, namespaces, mb * 1_000_000) for rank in range(DEVICES)]
        told, *_ = [each.communicate()[0] for each in workers]
        ended = [namespace.passed_bytes() for namespace in namespaces]
    if any(each.returncode for each in workers):
        raise RuntimeError("a process could not sum with the others; see what it wrote above")
    passed = sum(sum(after) - sum(before) for after, before in zip(ended, began, strict=True))
    found = json.loads(told.splitlines()[-1])
    return Carried(link.name, mb, found["took_s"], int(passed), found["cores_s"], machine())


def main() -> None:
    """Measure and print the cost."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--link", default="1000/1000", help="Mbit/s down/up")
    parser.add_argument("--mb", type=int, default=500)
    parser.add_argument("--json", type=Path, help="keep what was found in this file")
    parser.add_argument("--sum", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sum:
        summed(options.sum)
        return
    if options.mb * 1_000_000 < BUCKET:
        parser.error(
            f"--mb {options.mb} is less than one bucket; use {BUCKET // 1_000_000} or more"
        )
    try:
        link = Link.of(options.link)
        if options.json:
            read(options.json)  # before the time is spent
    except ValueError as error:
        parser.error(str(error))
    if missing := namespaces_missing():
        parser.error(f"no links can be made here: {missing}")
    try:
        found = measured(link, options.mb)
    except RuntimeError as error:
        sys.exit(str(error))
    print(
        f"{found.mb} MB on {DEVICES} devices behind {found.link}: {found.took_s:.1f} s; at the "
        f"links' rate {found.rate_s:.1f} s; {found.cores_s:.1f} s of {os.cpu_count()} cores, "
        f"{found.cores_s / found.passed_bytes * 1e9:.1f} for each GB through a link"
    )
    if options.json:
        keep(options.json, found)


if __name__ == "__main__":
    main()
