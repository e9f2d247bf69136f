"""Writes what devices did to the store, in batches and in a thread of its own: no block waits."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Final

from cleave.fleet.admission import Contribution
from cleave.server.store import Store, StoreError

WRITE_S: Final = 15.0
"""How often contributions are written."""


class Ledger:
    """A thread that writes.

    Args:
        store: where to.
        clock: Unix time, in seconds.
        complain: told when the store cannot be written.
    """

    def __init__(
        self, store: Store, clock: Callable[[], float], complain: Callable[[str], None]
    ) -> None:
        self._store = store
        self._clock = clock
        self._complain = complain
        self._done: dict[int, Contribution] = {}
        self._lock = threading.Lock()
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_on, name="cleave-ledger", daemon=True)
        self._thread.start()

    def add(self, device: int, done: Contribution) -> None:
        """A device did this; it is written with the next batch."""
        with self._lock:
            self._done[device] = self._done.get(device, Contribution()) + done

    def soon(self, write: Callable[[], None]) -> None:
        """Do this write next, in the ledger's thread, after those asked for before."""
        self._orders.put(write)

    def flush(self) -> None:
        """Wait until everything so far is written."""
        written = threading.Event()
        self._orders.put(self._write_batch)
        self._orders.put(written.set)
        while not written.wait(1.0):
            if not self._thread.is_alive():
                return

    def close(self) -> None:
        """Write what is left, and end the thread."""
        self._orders.put(self._write_batch)
        self._orders.put(None)
        self._thread.join()

    def _write_on(self) -> None:
        while True:
            try:
                order = self._orders.get(timeout=WRITE_S)
            except queue.Empty:
                order = self._write_batch
            if order is None:
                return
            try:
                order()
            except StoreError as error:
                self._complain(str(error))

    def _write_batch(self) -> None:
        with self._lock:
            done, self._done = self._done, {}
        if not done:
            return
        try:
            self._store.credit(done, self._clock())
        except StoreError:
            for device, part in done.items():  # for the next batch
                self.add(device, part)
            raise
