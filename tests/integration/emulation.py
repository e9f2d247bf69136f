"""Real-time emulated devices in this process, which take less time to start than `cleave join`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from cleave.errors import CleaveError
from cleave.fleet.fleet import Fleet
from cleave.fleet.product import GemmFuture
from cleave.machine.backends import NumpyBackend
from cleave.transport.join_url import parse_join_url
from emulator.realtime import RealTimeFleet
from profiles.fleet_device import FleetDevice
from tests.fleet import products
from tests.integration.processes import PATIENCE_S

DEVICE = FleetDevice("test", 1e10, 1e7, 1e7, 0.002, 2**30)


class Emulation:
    """A real-time fleet that runs in a thread of its own."""

    def __init__(self, url: str, devices: Sequence[FleetDevice], **options: Any) -> None:
        self.fleet = RealTimeFleet(devices, parse_join_url(url), NumpyBackend(), **options)
        self.error: CleaveError | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self._task = self._loop.create_task(self.fleet.run())
        try:
            self._loop.run_until_complete(self._task)
        except CleaveError as error:
            self.error = error
        except asyncio.CancelledError:
            pass
        self._loop.run_until_complete(asyncio.sleep(0))
        self.left = asyncio.all_tasks(self._loop)
        self._loop.close()

    def wait(self) -> None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def end(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(lambda: self._task.cancel())
            self.wait()


@contextmanager
def emulation(url: str, devices: Sequence[FleetDevice], **options: Any) -> Iterator[Emulation]:
    running = Emulation(url, devices, **options)
    try:
        yield running
    finally:
        running.end()


def submit(fleet: Fleet, size: int = 200) -> GemmFuture:
    rng = np.random.default_rng(size)
    a, b = rng.integers(-4, 5, (size, size + 7)), rng.integers(-4, 5, (size + 7, size + 3))
    return products.submit(fleet, a, b)


def check(future: GemmFuture) -> None:
    a, b = future.a.operand.buffer.array, future.b.operand.buffer.array
    np.testing.assert_array_equal(future.result().array, a @ b)
