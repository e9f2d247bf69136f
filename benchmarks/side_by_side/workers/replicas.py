"""Steps of workers that each train a part of the batch, with the mean of their losses."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.side_by_side.workers.worker import PartLoader, tell
from cleave.training.loop.trainer import Trainer


def train(trainer: Trainer) -> None:
    """Run all steps of a job with batches split between the ranks; rank 0 prints them."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    trainer.loader = PartLoader(trainer.loader, trainer.job, rank, ranks)
    dist.barrier()
    for _ in range(trainer.job.steps):
        record = trainer.train_step()
        loss = torch.tensor(record.loss, dtype=torch.float64) / ranks
        dist.all_reduce(loss)
        if rank == 0:
            tell(record.step, float(loss), record.wall_s)
    dist.barrier()
    dist.destroy_process_group()
