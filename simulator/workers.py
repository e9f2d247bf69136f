"""Run a simulation's independent tasks in this process or in several processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from cleave.errors import CleaveError

Task = TypeVar("Task")
Result = TypeVar("Result")


def run_tasks(
    work: Callable[[Task], Result], tasks: Sequence[Task], processes: int = 1
) -> Iterator[tuple[int, Result]]:
    """Call `work` with each task and yield the task's index and result when it completes.

    Tasks start in list order, so put the longest first. With 1 process, they run in this one. With
    several processes, `work` and the tasks are pickled, so `work` must be a module-level function.

    Raises:
        CleaveError: if a process is killed, for example because memory ran out.
    """
    if processes == 1:
        yield from enumerate(map(work, tasks))
        return
    # Do not fork: a progress bar's thread may hold a lock, which would stay locked in a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        futures = {pool.submit(work, task): index for index, task in enumerate(tasks)}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BrokenProcessPool:
            raise CleaveError(
                f"one of {processes} simulating processes was ended from outside, most often "
                "because memory ran out; try again with fewer --jobs"
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
