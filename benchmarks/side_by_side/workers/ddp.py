"""One process of `torch.distributed` DDP over gloo.

`RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT` and `GLOO_SOCKET_IFNAME` are read from the
environment. In bf16, multiplications are autocast and gradients are all-reduced as bf16. The
variant `halved` has only the latter.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common import make_trainer
from benchmarks.side_by_side.workers.replicas import train
from benchmarks.side_by_side.workers.worker import read_options


def halved(bucket: Any) -> torch.futures.Future[Tensor]:
    """Average gradients as bf16, like torch's own hook, which needs NCCL."""
    given = bucket.buffer()
    small = (given / dist.get_world_size()).to(torch.bfloat16)
    work = dist.all_reduce(small, async_op=True)
    assert work is not None
    done: torch.futures.Future[Tensor] = work.get_future().then(
        lambda future: given.copy_(future.value()[0])
    )
    return done


def main() -> None:
    """Train; see the module's docstring."""
    options = read_options(__doc__, int(os.environ["WORLD_SIZE"]))
    dist.init_process_group("gloo")
    trainer = make_trainer(options.job, None)
    # Every rank has built the same weights, so they need not be sent.
    trainer.model = DistributedDataParallel(
        trainer.model, init_sync=False, gradient_as_bucket_view=True
    )
    if options.job.dtype == "bf16" or options.variant == "halved":
        trainer.model.register_comm_hook(None, lambda _, bucket: halved(bucket))
    train(trainer)


if __name__ == "__main__":
    main()
