"""Workers that run a simulation's tasks in this process, in several processes, or on Ray.

The workers do not affect the results, because tasks are independent and deterministic.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import TypeVar

from cleave.errors import CleaveError, UsageError
from cleave.ray_cluster import need_ray, ray_cluster

Task = TypeVar("Task")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Processes:
    """Workers that run tasks in `count` processes on this machine; 1 means this process only."""

    count: int = 1

    def run(
        self, work: Callable[[Task], Result], tasks: Sequence[Task]
    ) -> Iterator[tuple[int, Result]]:
        """Call `work` with each task and yield the task's index and result when it completes.

        Tasks start in list order, so put the longest first. With several processes, `work` and the
        tasks are pickled, so `work` must be a module-level function.

        Raises:
            CleaveError: if a process is killed, for example because memory ran out.
        """
        if self.count == 1:
            yield from enumerate(map(work, tasks))
            return
        # Do not fork: a progress bar's thread may hold a lock, which would stay locked in a fork.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(self.count, mp_context=context) as pool:
            futures = {pool.submit(work, task): index for index, task in enumerate(tasks)}
            try:
                for future in as_completed(futures):
                    yield futures[future], future.result()
            except BrokenProcessPool:
                raise CleaveError(
                    f"one of {self.count} simulating processes was ended from outside, most often "
                    "because memory ran out; try again with fewer --jobs"
                ) from None
            finally:
                pool.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class RayCluster:
    """Workers that run tasks on the nodes of a Ray cluster. Cleave must be installed on all nodes.

    `address` is the head node's host:port, or "auto" on a node of the cluster.
    """

    address: str

    def run(
        self, work: Callable[[Task], Result], tasks: Sequence[Task]
    ) -> Iterator[tuple[int, Result]]:
        """Call `work` with each task and yield the task's index and result when it completes.

        Raises:
            UsageError: if no cluster is running at the address.
        """
        with ray_cluster(self.address) as ray:
            remote = ray.remote(work)
            waiting = {remote.remote(task): index for index, task in enumerate(tasks)}
            while waiting:
                (done,), _ = ray.wait(list(waiting), num_returns=1)
                try:
                    result = ray.get(done)
                except ray.exceptions.RayTaskError as error:
                    raise error.cause from None
                yield waiting.pop(done), result


Workers = Processes | RayCluster


def workers(jobs: int, ray_address: str | None) -> Workers:
    """Return the workers that the options `--jobs` and `--ray` select.

    Args:
        jobs: number of processes on this machine; 1 means this process.
        ray_address: address of a Ray cluster; None means this machine.

    Raises:
        UsageError: if `jobs` is above 1 and `ray_address` is not None, or Ray is not installed.
    """
    if ray_address is None:
        return Processes(jobs)
    if jobs > 1:
        raise UsageError("--jobs is for this machine, --ray for a cluster; give one of them")
    need_ray("--ray")
    return RayCluster(ray_address)
