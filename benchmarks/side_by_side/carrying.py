"""What links cost of the cores that compute: gradients are summed over gloo, and nothing else done.

    python -m benchmarks.side_by_side.carrying [--link 1000/1000] [--mb 500]

Four processes in namespaces behind links of 20 ms sum `--mb` of fp32, as DDP does for a model of
that size. A link's packets are carried by a process of this machine, so that fast links take cores
from the arithmetic, which devices' own network cards do not. Prints how long the sum takes, how
long its bytes take at the links' rate, and what it takes of all cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import Final

import psutil

from benchmarks.links import (
    LimitedNamespace,
    let_reach_one_another,
    limited_namespace,
    namespaces_missing,
)
from benchmarks.side_by_side.contenders.group import environment
from benchmarks.side_by_side.setting import Link

DEVICES: Final = 4
DELAY_S: Final = 0.01
BUCKET: Final = 25_000_000
"""Bytes that are summed at once, as by DDP."""

_MODULE: Final = "benchmarks.side_by_side.carrying"


def summed(nbytes: int) -> None:
    """Sum buckets with the other processes; the first prints how long it took, and of all cores."""
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
    """Start a process that sums, in its namespace."""
    command = [sys.executable, "-m", _MODULE, "--sum", str(nbytes)]
    return subprocess.Popen(
        namespaces[rank].inside(*command),
        env=os.environ | environment(rank, namespaces),
        stdout=subprocess.PIPE,
        text=True,
    )


def main() -> None:
    """Print what it takes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--link", type=Link.of, default=Link(1000, 1000))
    parser.add_argument("--mb", type=int, default=500)
    parser.add_argument("--sum", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sum:
        summed(options.sum)
        return
    if options.mb * 1_000_000 < BUCKET:
        parser.error(
            f"--mb {options.mb} is less than one bucket; use {BUCKET // 1_000_000} or more"
        )
    if missing := namespaces_missing():
        parser.error(f"no links can be made here: {missing}")
    link: Link = options.link
    with ExitStack() as stack:
        namespaces = [
            stack.enter_context(limited_namespace(number, link.down, link.up, DELAY_S))
            for number in range(DEVICES)
        ]
        let_reach_one_another(namespaces)
        began = [namespace.passed_bytes() for namespace in namespaces]
        workers = [worker(rank, namespaces, options.mb * 1_000_000) for rank in range(DEVICES)]
        told, *_ = [each.communicate()[0] for each in workers]
        ended = [namespace.passed_bytes() for namespace in namespaces]
    if any(each.returncode for each in workers):
        sys.exit("a process could not sum with the others; see what it wrote above")
    found = json.loads(told.splitlines()[-1])
    passed = sum(sum(after) - sum(before) for after, before in zip(ended, began, strict=True))
    ring = 2 * (DEVICES - 1) / DEVICES * options.mb * 1e6
    print(
        f"{options.mb} MB on {DEVICES} devices behind {link.name}: {found['took_s']:.1f} s; at the "
        f"links' rate {max(ring / link.up, ring / link.down):.1f} s; {found['cores_s']:.1f} s of "
        f"{os.cpu_count()} cores, {found['cores_s'] / passed * 1e9:.1f} for each GB through a link"
    )


if __name__ == "__main__":
    main()
