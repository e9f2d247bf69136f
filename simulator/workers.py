"""Workers for the independent parts of a simulation: this process, several, or a Ray cluster.

Results do not depend on the choice: they are functions of the arguments alone, and searches use
seeds, not clocks.
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
    """Calls a function for each of several tasks."""

    def run(
        self, work: Callable[[Task], Result], tasks: Sequence[Task]
    ) -> Iterator[tuple[int, Result]]:
        """Yield each task's index and result in order of completion.

        Tasks start in the given order, so put the longest first.

        Args:
            work: a module-level function; it and the tasks are sent to other processes.
        """
        ...


class ThisProcess:
    """Runs one task after another in this process."""

    def run(
        self, work: Callable[[Task], Result], tasks: Sequence[Task]
    ) -> Iterator[tuple[int, Result]]:
        """See `Workers.run`."""
        for index, task in enumerate(tasks):
            yield index, work(task)


@dataclass(frozen=True, slots=True)
class Processes:
    """Several processes on this machine.

    Attributes:
        count: number of concurrent processes.
    """

    count: int

    def run(
        self, work: Callable[[Task], Result], tasks: Sequence[Task]
    ) -> Iterator[tuple[int, Result]]:
        """See `Workers.run`.

        Raises:
            CleaveError: when the system ends one of the processes.
        """
        # Not forked: a progress bar's thread may hold a lock at that moment.
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
    """The nodes of a running Ray cluster, each with Cleave installed.

    Attributes:
        address: the head node's address as Ray writes it, host:port, or "auto" on a node.
    """

    address: str

    def run(
        self, work: Callable[[Task], Result], tasks: Sequence[Task]
    ) -> Iterator[tuple[int, Result]]:
        """See `Workers.run`.

        Raises:
            UsageError: when there is no cluster at the address.
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
    """Return the workers that `--jobs` and `--ray` select.

    Raises:
        UsageError: when both are given, or Ray is not installed.
    """
    if ray_address is None:
        return Processes(jobs) if jobs > 1 else ThisProcess()
    if jobs > 1:
        raise UsageError("--jobs is for this machine, --ray for a cluster; give one of them")
    need_ray("--ray")
    return RayCluster(ray_address)
