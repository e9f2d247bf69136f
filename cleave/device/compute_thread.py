"""Runs computations in a separate thread, so that the connection's loop is not blocked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol, TypeAlias

from cleave.device.core import Order
from cleave.device.graph_check import check_graph
from cleave.machine.backends import MatmulBackend, execute
from cleave.machine.graph_memory import GraphMemory
from cleave.machine.graph_run import FetchRun, GraphRun, MakeSession, fetch, open_on_cpu, run_graph
from cleave.machine.multiplication import Compute
from cleave.protocol import limits

INLINE_FLOPS: Final = 4e6
"""Products with fewer FLOPs take less time than waking a thread."""

Outcome: TypeAlias = tuple[Any, float] | str
"""A computation's payload and its seconds, or an error message."""


class Computer(Protocol):
    """Runs the computations of one device, one after another, without blocking its loop."""

    def start(self, order: Order, done: Callable[[Order, Outcome], None]) -> None:
        """Start a computation; `done` is called in the loop's thread, immediately or later."""
        ...

    def close(self) -> None:
        """Cancel computations that have not begun, and return without waiting."""
        ...


class ComputeThread:
    """Executes orders (products, graphs, fetches) in one thread; small products immediately.

    Args:
        backend: multiplies matrices.
        inline_flops: products with at most this many FLOPs run in the caller's thread.
        make_session: opens sessions for graphs.
    """

    def __init__(
        self,
        backend: MatmulBackend,
        inline_flops: float = INLINE_FLOPS,
        make_session: MakeSession = open_on_cpu,
    ) -> None:
        self._backend = backend
        self._inline_flops = inline_flops
        self._make_session = make_session
        self._pool = ThreadPoolExecutor(1, "cleave-executor")
        self._computing = 0

    def start(self, order: Order, done: Callable[[Order, Outcome], None]) -> None:
        """Start a computation; `done` is called in the loop's thread, immediately or later."""
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
        """Cancel computations that have not begun, and return without waiting."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def compute(
    backend: MatmulBackend, order: Order, make_session: MakeSession = open_on_cpu
) -> Outcome:
    """Execute and time one order; return an error as text, so that the PS can reassign the work.

    A graph is checked before anything else reads it.
    """

    def make_memory(model: bytes | memoryview) -> GraphMemory:
        check_graph(model)
        return GraphMemory(model)

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
