"""Execute a device's tasks (products, graph runs, fetches) in a separate thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol, TypeAlias

from cleave.device.core import Order
from cleave.device.graph_check import check_graph
from cleave.machine.backends import Compute, MatmulBackend, execute
from cleave.machine.graph_choice import MakeGraph, open_on_cpu
from cleave.machine.graph_memory import GraphMemory
from cleave.machine.graph_run import FetchRun, GraphRun, MakeMemory, fetch, run_graph
from cleave.protocol import limits

INLINE_FLOPS: Final = 4e6  # takes about as long as waking a thread
Outcome: TypeAlias = tuple[Any, float] | str  # result and seconds, or an error message


class Computer(Protocol):
    """Executes the tasks of one device, one after another, without blocking the event loop."""

    def start(self, order: Order, done: Callable[[Order, Outcome], None]) -> None:
        """Start a task. Call `done` in the event loop's thread, immediately or later."""

    def close(self) -> None:
        """Cancel the tasks that have not started. Do not wait for the running task."""


class ComputeThread:
    """Execute tasks in one thread.

    Matrix multiplications of up to `inline_flops` FLOPs run in the caller's thread if no other
    task is running. `make_session` opens a graph.
    """

    def __init__(
        self,
        backend: MatmulBackend,
        inline_flops: float = INLINE_FLOPS,
        make_session: MakeGraph = open_on_cpu,
    ) -> None:
        self._backend = backend
        self._inline_flops = inline_flops
        self._make_session = make_session
        self._pool = ThreadPoolExecutor(1, "cleave-executor")
        self._computing = 0

    def start(self, order: Order, done: Callable[[Order, Outcome], None]) -> None:
        small = isinstance(order, Compute) and order.flops <= self._inline_flops
        if small and not self._computing:
            done(order, compute(self._backend, order, self._make_session))
            return
        loop = asyncio.get_running_loop()
        self._computing += 1

        def finished(outcome: Outcome) -> None:
            self._computing -= 1
            done(order, outcome)

        def work() -> None:
            outcome = compute(self._backend, order, self._make_session)
            loop.call_soon_threadsafe(finished, outcome)

        self._pool.submit(work)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def checked_memory(model: bytes | memoryview) -> GraphMemory:
    """Check a graph and parse it to compute its working memory."""
    check_graph(model)
    return GraphMemory(model)


def compute(
    backend: MatmulBackend,
    order: Order,
    make_session: MakeGraph = open_on_cpu,
    make_memory: MakeMemory = checked_memory,
) -> Outcome:
    """Execute one task. Return its result and compute time in seconds, or an error message."""
    began_s = time.perf_counter()
    try:
        match order:
            case Compute():
                payload = execute(backend, order).pack()
            case GraphRun():
                return b"", run_graph(order, make_session, make_memory)
            case FetchRun():
                payload = fetch(order)
    except Exception as error:  # noqa: BLE001 - reported to the PS
        return f"{type(error).__name__}: {error}"[: limits.MAX_TEXT]
    return payload, time.perf_counter() - began_s
