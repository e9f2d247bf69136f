"""Processes that are the ranks of one training, kept for all tests of a module."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cleave.errors import CleaveError
from cleave.fleet.fleet import Fleet
from cleave.training.loop.context import TrainContext
from cleave.training.loop.job import JobSpec
from cleave.training.loop.records import EvalRecord, Record, StepRecord
from cleave.training.loop.run_folder import RunFolder
from cleave.training.loop.start import train
from cleave.training.servers import gradient_sums
from cleave.training.servers.ranks import Alone, Ranks, TorchRanks
from emulator.virtual import emulated
from profiles.fleets import paper_fleet

WAIT_S = 120.0

Work = Callable[..., Any]


def _serve(rank: int, tasks: Connection) -> None:
    """Do what comes, as one rank, until the pipe is closed."""
    torch.set_num_threads(1)
    # So that tiny models send in the backward pass, too.
    setattr(gradient_sums, "BUCKET_BYTES", 4096)  # noqa: B010 - it is final
    while True:
        try:
            work, count, store, arguments = tasks.recv()
        except EOFError:
            return
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
        try:
            answer = work(TorchRanks(), *arguments)
        except CleaveError as error:
            answer = error
        dist.destroy_process_group()
        tasks.send(answer)


class Servers:
    """Several processes that do the same work together."""

    def __init__(self, most: int) -> None:
        # What they need is imported once, which takes seconds.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "transformers.models.opt.modeling_opt"])
        self._pipes = []
        self.processes = []
        for rank in range(most):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def do(self, count: int, store: Path, work: Work, *arguments: Any) -> list[Any]:
        """Have the first `count` do some work; return what each returned, or raised.

        Args:
            count: how many.
            store: a file that does not exist yet, by which they find each other.
            work: called with the ranks and the arguments.
        """
        for pipe in self._pipes[:count]:
            pipe.send((work, count, str(store), arguments))
        return [self._answer(pipe) for pipe in self._pipes[:count]]

    def _answer(self, pipe: Connection) -> Any:
        assert pipe.poll(WAIT_S), "a rank does not answer"
        try:
            return pipe.recv()
        except EOFError:
            return None  # it was killed

    def close(self) -> None:
        """End all processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.join(10.0)
            process.kill()  # where it waits for a rank that failed


def losses_of(
    ranks: Ranks,
    job: JobSpec,
    folder: Path,
    devices: Sequence[int],
    resume: bool = False,
    killed: tuple[int, int] | None = None,
) -> list[float]:
    """Train; return the losses of all steps and evaluations, on the first rank.

    Args:
        ranks: of this process.
        job: what.
        folder: the run folder.
        devices: of each rank's virtual fleet; 0 for none.
        resume: whether to go on.
        killed: a rank that is killed by SIGKILL when a step is done, and that step.
    """
    fleet: Fleet | None = None
    if devices[ranks.rank]:
        fleet = emulated(paper_fleet(devices[ranks.rank]))
    found: list[float] = []

    def report(record: Record) -> None:
        match record:
            case StepRecord():
                found.append(record.loss)
            case EvalRecord():
                found.append(record.eval_loss)

    def stop() -> bool:
        done = folder / "metrics.jsonl"
        rank, step = killed or (-1, 0)
        if rank == ranks.rank and done.exists() and f'"step": {step}' in done.read_text():
            os.kill(os.getpid(), 9)
        return False

    folder.mkdir(exist_ok=True)
    train(job, RunFolder(folder), TrainContext(fleet, report, stop, ranks=ranks), resume=resume)
    if fleet is not None:
        fleet.close()
    return found


def alone(job: JobSpec, folder: Path, devices: int = 0, *, resume: bool = False) -> list[float]:
    """Train on one server, in this process."""
    return losses_of(Alone(), job, folder, [devices], resume)
