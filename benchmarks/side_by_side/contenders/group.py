"""Peers of `torch.distributed` over gloo: one worker per namespace, which print their steps.

Traffic between workers passes this machine, over the sender's uplink and the receiver's downlink.
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
    """Return a description of a worker's settings."""
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
            return ""  # the worker reports its own choice


def environment(rank: int, namespaces: Sequence[LimitedNamespace]) -> dict[str, str]:
    """Return the environment variables with which a process joins the group."""
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
