"""Computing beside a connection: an executor in a thread of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol, TypeAlias

from cleave.machine.backends import MatmulBackend, execute
from cleave.machine.multiplication import Compute
from cleave.protocol import limits

INLINE_FLOPS: Final = 4e6
"""Multiplications below this are over sooner than a thread is woken for them."""

Outcome: TypeAlias = tuple[Any, float] | str
"""Of a computation: its payload and its seconds, or what went wrong."""


class Computer(Protocol):
    """Does the computations of one device, one after another, without holding up its loop."""

    def start(self, order: Compute, done: Callable[[Compute, Outcome], None]) -> None:
        """Begin one; `done` is called in the loop's thread, at once or later."""
        ...

    def close(self) -> None:
        """Forget what is under way."""
        ...


class ComputeThread:
    """Multiplies with an executor, in a thread of its own unless that would take longer.

    Args:
        backend: what multiplies.
        inline_flops: what is over sooner than a thread is woken for it.
    """

    def __init__(self, backend: MatmulBackend, inline_flops: float = INLINE_FLOPS) -> None:
        self._backend = backend
        self._inline_flops = inline_flops
        self._pool = ThreadPoolExecutor(1, "cleave-executor")
        self._computing = 0

    def start(self, order: Compute, done: Callable[[Compute, Outcome], None]) -> None:
        """See `Computer.start`."""
        if order.flops <= self._inline_flops and not self._computing:
            done(order, multiply(self._backend, order))
            return
        loop = asyncio.get_running_loop()
        self._computing += 1

        def finished(outcome: Outcome) -> None:
            self._computing -= 1
            done(order, outcome)

        def work() -> None:
            outcome = multiply(self._backend, order)
            loop.call_soon_threadsafe(finished, outcome)

        self._pool.submit(work)

    def close(self) -> None:
        """See `Computer.close`."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def multiply(backend: MatmulBackend, order: Compute) -> Outcome:
    """Do one computation, and take its time; what goes wrong is for the PS, which reassigns it."""
    began_s = time.perf_counter()
    try:
        payload = execute(backend, order).pack()
    except Exception as error:  # noqa: BLE001 - reported to the PS
        return f"{type(error).__name__}: {error}"[: limits.MAX_TEXT]
    return payload, time.perf_counter() - began_s
