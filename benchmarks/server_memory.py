"""Measure the memory of one of several servers: its peak above that for a tiny model.

    python -m benchmarks.server_memory [--model opt-350m] [--servers 1,2,4] [--memory plain]

Each server trains on its own CPU, in a separate process, over gloo. Gradients and the optimizer's
moments are sharded (ZeRO, stage 2), weights are not: 4 + 12 / N bytes per parameter. With `--memory
sharded` weights are sharded, too: 16 / N bytes; a single server then also recomputes activations.
Swapped-out memory counts, so that servers may together need more than this machine has (Linux).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import threading
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from cleave.cluster.ray_train import MALLOC

_LOOK_S: Final = 0.02


def serve(
    rank: int, count: int, store: str, model: str, memory: str, folder: str, out: Connection
) -> None:
    """Train two steps as one of the servers; send the peak above the base in bytes."""
    import torch
    import torch.distributed as dist

    # Import before a group exists: default arguments in this module keep the current group. That
    # group and its threads would outlive Python, which ends some processes with "terminate called
    # without an active exception".
    import torch.distributed.nn

    from cleave.training.loop.context import TrainContext
    from cleave.training.loop.inputs import prepare
    from cleave.training.loop.job import JobSpec
    from cleave.training.loop.run_folder import RunFolder
    from cleave.training.loop.start import train
    from cleave.training.servers.ranks import Alone, Ranks, TorchRanks

    torch.set_num_threads(1)
    ranks: Ranks = Alone()
    if count > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
        ranks = TorchRanks()
    job = JobSpec(
        model, steps=2, batch=count, seq=64, method="local", memory=memory, checkpoint_every=0
    )
    context = TrainContext(None, lambda record: None, ranks=ranks)
    tiny = replace(job, model="opt-nano")  # loads everything that training needs
    train(tiny, RunFolder(Path(folder, "tiny")), context, dataset=prepare(tiny, context))
    dataset = prepare(job, context)
    base = held()
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    with Peak() as peak:
        train(job, RunFolder(Path(folder, "run")), context, dataset=dataset)
    # The system records the resident peak exactly; memory with swap is only sampled.
    out.send(max(status("VmHWM"), peak.most) - base)
    if count > 1:
        dist.destroy_process_group()


def held() -> int:
    """Return this process's resident and swapped-out memory in bytes."""
    return status("VmRSS") + status("VmSwap")


class Peak:
    """Context manager that samples this process's memory until the block ends.

    Attributes:
        most: peak memory in bytes.
    """

    def __init__(self) -> None:
        self.most = 0
        self._ends = threading.Event()
        self._looks = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Peak:
        self._looks.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._looks.join()

    def _look(self) -> None:
        while not self._ends.wait(_LOOK_S):
            self.most = max(self.most, held())


def status(name: str) -> int:
    """Return a memory figure of this process from the system, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"this system does not tell {name}")


def peaks(count: int, model: str, memory: str) -> list[int]:
    """Return the peak of each of `count` servers."""
    context = multiprocessing.get_context("spawn")
    found, processes = [], []
    with tempfile.TemporaryDirectory(prefix="cleave-benchmark-") as folder:
        for name in ("tiny", "run"):
            Path(folder, name).mkdir()
        for rank in range(count):
            ours, theirs = context.Pipe()
            arguments = rank, count, f"{folder}/store", model, memory, folder, theirs
            process = context.Process(target=serve, args=arguments)
            process.start()
            theirs.close()
            found.append(ours)
            processes.append(process)
        sizes = [pipe.recv() for pipe in found]
        for process in processes:
            process.join()
    return sizes


def main() -> None:
    """Print a row for each number of servers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="opt-350m")
    parser.add_argument("--servers", default="1,2,4")
    parser.add_argument("--memory", default="plain")
    given = parser.parse_args()
    print(f"{given.model}, --memory {given.memory}: peak of the server that needs most")
    print(f"{'servers':>7}{'MB':>9}{'of one':>9}")
    first = 0
    os.environ.update(MALLOC)  # as in Ray's workers
    for count in map(int, given.servers.split(",")):
        sharded = count == 1 and given.memory == "sharded"
        most = max(peaks(count, given.model, "recompute" if sharded else given.memory))
        first = first or most
        print(f"{count:>7}{most / 1e6:>9.0f}{most / first:>9.2f}", flush=True)


if __name__ == "__main__":
    main()
