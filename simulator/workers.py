"""Runs the independent tasks of a simulation in this process, in several, or on a Ray cluster.

Results do not depend on this choice. Each result is a function of the task's arguments alone, and
searches depend on seeds, not on clocks.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Protocol, TypeVar

from cleave.errors import CleaveError, UsageError
from cleave.ray_cluster import need_ray, ray_cluster

Task = TypeVar("Task")
Result = TypeVar("Result")


class Workers(Protocol):
    """Calls a function once for each of several tasks, possibly in other processes."""

    def run(
        self, work: Callable[[Task], Result], tasks: Sequence[Task]
    ) -> Iterator[tuple[int, Result]]:
        """Call `work` with each task, and yield each task's index and result upon completion.

        Tasks start in the given order. Put the longest tasks first to finish early.

        Args:
            work: module-level function, which is pickled for other processes.
            tasks: arguments of `work`, one per call, which are pickled as well.
        """
        ...


class ThisProcess:
    """Workers that run one task after another in this process."""

    def run(
        self, work: Callable[[Task], Result], tasks: Sequence[Task]
    ) -> Iterator[tuple[int, Result]]:
        """Yield each task's index and result, in the order of the tasks."""
        for index, task in enumerate(tasks):
            yield index, work(task)


@dataclass(frozen=True, slots=True)
class Processes:
    """Workers that run tasks in several processes on this machine.

    Attributes:
        count: maximum number of concurrent processes.
    """

    count: int

    def run(
        self, work: Callable[[Task], Result], tasks: Sequence[Task]
    ) -> Iterator[tuple[int, Result]]:
        """Yield each task's index and result upon completion.

        Raises:
            CleaveError: when a process is killed, for example because memory ran out.
        """
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
    """Workers that run tasks on the nodes of a Ray cluster. Each node must have Cleave installed.

    Attributes:
        address: address of the head node (host:port), or "auto" if this machine is a node of the
            cluster.
    """

    address: str

    def run(
        self, work: Callable[[Task], Result], tasks: Sequence[Task]
    ) -> Iterator[tuple[int, Result]]:
        """Yield each task's index and result upon completion.

        Raises:
            UsageError: when no cluster is running at the address.
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


def workers(jobs: int, ray_address: str | None) -> Workers:
    """Return the workers that the options `--jobs` and `--ray` select.

    Args:
        jobs: number of processes on this machine; 1 means this process.
        ray_address: address of a Ray cluster; None means this machine.

    Raises:
        UsageError: when `jobs` is above 1 and `ray_address` is given, or Ray is not installed.
    """
    if ray_address is None:
        return Processes(jobs) if jobs > 1 else ThisProcess()
    if jobs > 1:
        raise UsageError("--jobs is for this machine, --ray for a cluster; give one of them")
    need_ray("--ray")
    return RayCluster(ray_address)
