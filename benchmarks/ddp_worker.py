"""One process of `torch.distributed` DDP over gloo: what `stage_links` compares stages with.

Plain PyTorch with Cleave's data, model, optimizer and order of batches, of which each rank takes
its part: losses are those of one machine. `RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT` and
`GLOO_SOCKET_IFNAME` are read from the environment. Rank 0 prints a JSON line for each step. In bf16
multiplications are autocast, and gradients are sums of bf16 numbers on their way.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common import make_trainer
from benchmarks.stage_links import forget_peak, peak_bytes
from cleave.training.data import Batch, BatchLoader
from cleave.training.job import JobSpec


class PartLoader(BatchLoader):
    """Gives one rank its part of each batch, of the batches that one machine has."""

    def next_batch(self) -> Batch:
        """See `BatchLoader.next_batch`."""
        ids, labels, _ = super().next_batch()
        rank, ranks = dist.get_rank(), dist.get_world_size()
        return Batch(ids.tensor_split(ranks)[rank], labels.tensor_split(ranks)[rank])


def halved(bucket: Any) -> torch.futures.Future[Tensor]:
    """Average gradients as bf16, as torch's own hook does, which wants NCCL."""
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True, help="of all ranks together")
    parser.add_argument("--seq", type=int, required=True)
    parser.add_argument("--dtype", required=True)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    if options.batch % dist.get_world_size():
        parser.error(f"--batch {options.batch} cannot be split {dist.get_world_size()} ways")
    job = JobSpec(
        options.model,
        steps=options.steps,
        batch=options.batch,
        seq=options.seq,
        dtype=options.dtype,
        memory="plain",
    )
    trainer = make_trainer(job, None)
    trainer.loader = PartLoader(trainer.corpus.train, batch=job.batch, seq=job.seq, seed=job.seed)
    # Every rank has built the same weights: they need not travel.
    trainer.model = DistributedDataParallel(
        trainer.model, init_sync=False, gradient_as_bucket_view=True
    )
    if options.dtype == "bf16":
        trainer.model.register_comm_hook(None, lambda _, bucket: halved(bucket))
    dist.barrier()
    for step in range(job.steps):
        record = trainer.train_step()
        loss = torch.tensor(record.loss, dtype=torch.float64) / dist.get_world_size()
        dist.all_reduce(loss)
        peak = torch.tensor(peak_bytes("self"))
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            told = {
                "event": "step",
                "step": record.step,
                "loss": float(loss),
                "wall_s": record.wall_s,
                "device_peak_bytes": int(peak),
            }
            print(json.dumps(told), flush=True)
        if step == 0:
            forget_peak("self")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
