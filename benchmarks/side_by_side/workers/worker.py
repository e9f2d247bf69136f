"""What all workers share: the job, their part of each batch, a line of JSON for each step."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.side_by_side.setting import SCHEDULE, WARMUP_STEPS
from cleave.training.data.batches import Batch, BatchLoader
from cleave.training.loop.job import JobSpec


@dataclass(frozen=True)
class Options:
    """What a worker is told.

    Attributes:
        job: what to train; its batch is that of all workers together.
        variant: of its method.
    """

    job: JobSpec
    variant: str


def read_options(description: str | None, workers: int) -> Options:
    """Read the command line; end with a message where the batch cannot be split."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True, help="of all workers together")
    parser.add_argument("--seq", type=int, required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--rank", type=int, required=True, help="of adapters; 0 for none")
    parser.add_argument("--variant", required=True)
    given = parser.parse_args()
    if given.batch % workers:
        parser.error(f"--batch {given.batch} cannot be split {workers} ways")
    job = JobSpec(
        given.model,
        steps=given.steps,
        batch=given.batch,
        seq=given.seq,
        dtype=given.dtype,
        lora=f"r={given.rank}" if given.rank else "",
        memory="plain",
        schedule=SCHEDULE,
        warmup_steps=WARMUP_STEPS,
    )
    return Options(job, given.variant)


class PartLoader(BatchLoader):
    """Gives one worker its part of each batch, of the batches that one machine has.

    Args:
        whole: the loader whose batches are split.
        job: what is trained.
        worker, workers: which part, of how many.
    """

    def __init__(self, whole: BatchLoader, job: JobSpec, worker: int, workers: int) -> None:
        super().__init__(whole._tokens, batch=job.batch, seq=job.seq, seed=job.seed)
        self._worker, self._workers = worker, workers

    def next_batch(self) -> Batch:
        """See `BatchLoader.next_batch`."""
        ids, labels, _ = super().next_batch()
        parts = ids.tensor_split(self._workers), labels.tensor_split(self._workers)
        return Batch(parts[0][self._worker], parts[1][self._worker])


def tell(step: int, loss: float, wall_s: float) -> None:
    """Print a step that has ended, of which the first is 1."""
    print(json.dumps({"event": "step", "step": step, "loss": loss, "wall_s": wall_s}), flush=True)


def timed(step: Callable[[], float]) -> tuple[float, float]:
    """Do a step; return its loss and its seconds."""
    began_s = time.perf_counter()
    loss = step()
    return loss, time.perf_counter() - began_s
