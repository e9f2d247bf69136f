"""Peers of `torch.distributed` over gloo: one worker in each namespace, which print their steps.

The way from one to another leads through this machine: up the one's link, down the other's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from benchmarks.links import LimitedNamespace, let_reach_one_another
from benchmarks.side_by_side.contenders.options import options
from benchmarks.side_by_side.method import Way
from benchmarks.side_by_side.run import Run

_PORT: Final = 29_500  # inside a namespace


def best(run: Run) -> str:
    """Return the settings that a worker uses, in words."""
    halved = run.method.dtype == "bf16" or run.method.variant == "halved"
    match run.method.way:
        case Way.DDP:
            return (
                "gradient_as_bucket_view, init_sync off, buckets of 25 MB overlapped with the "
                f"backward pass, gradients as {'bf16' if halved else 'fp32'}"
            )
        case Way.FSDP:
            kept = run.method.variant != "reshard"
            return (
                f"fully_shard for each layer, reshard_after_forward={not kept}, weights and "
                f"gradients as {run.method.dtype}"
            )
        case _:
            return ""  # the worker says what it has chosen


def environment(rank: int, namespaces: Sequence[LimitedNamespace]) -> dict[str, str]:
    """Return what a process needs to join the group, each in a namespace of its own."""
    return {
        "OMP_NUM_THREADS": "1",
        "RANK": str(rank),
        "WORLD_SIZE": str(len(namespaces)),
        "MASTER_ADDR": namespaces[0].guest,
        "MASTER_PORT": str(_PORT),
        "GLOO_SOCKET_IFNAME": namespaces[rank].there,
    }


def run(run: Run) -> None:
    """Train with a worker in each namespace."""
    let_reach_one_another(run.namespaces)
    module = f"benchmarks.side_by_side.workers.{run.method.way.value}"
    run.row.best = best(run)
    workers = [
        run.processes.start(
            f"worker-{rank}",
            namespace.inside(sys.executable, "-m", module, *options(run)),
            **environment(rank, run.namespaces),
        )
        for rank, namespace in enumerate(run.namespaces)
    ]
    run.follow(run.processes.records(workers[0]), workers)
