"""Shared code of all workers: the job, their part of each batch, a line of JSON per step."""

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
    """The options of a worker.

    Attributes:
        job: the job, with the batch of all workers together.
        variant: variant of the method.
    """

    job: JobSpec
    variant: str


def read_options(description: str | None, workers: int) -> Options:
    """Read the command line; exit with a message if the batch cannot be split."""
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
    """Gives one worker its part of each batch of a single machine's loader.

    Args:
        whole: loader whose batches are split.
        job: the job.
        worker, workers: index of the part, and number of parts.
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
    """Print a finished step, counted from 1."""
    print(json.dumps({"event": "step", "step": step, "loss": loss, "wall_s": wall_s}), flush=True)


def timed(step: Callable[[], float]) -> tuple[float, float]:
    """Run a step; return its loss and its seconds."""
    began_s = time.perf_counter()
    loss = step()
    return loss, time.perf_counter() - began_s
