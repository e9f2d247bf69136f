"""A thread that writes to the store, so that the server's event loop never waits for a write."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from cleave.protocol.device_counters import DeviceCounters
from cleave.server.store.store import Store, StoreError

_logger = logging.getLogger(__name__)

WRITE_S: Final = 15.0  # time between two writes of the devices' contributions
RETRY_S: Final = 2.0  # time between retries of failed writes


@dataclass(slots=True, eq=False)
class _Owed:
    what: str
    write: Callable[[], None]
    said: bool = False


class StoreWriter:
    """A background thread that writes to the store.

    A write that is passed to `soon` is dropped if it fails. A write that is passed to `owe` is
    retried every `retry_s` seconds until it succeeds. The contributions of devices are summed, and
    the sums are written at least every `WRITE_S` seconds.
    """

    def __init__(self, store: Store, clock: Callable[[], float], retry_s: float = RETRY_S) -> None:
        self._store = store
        self._clock = clock
        self._retry_s = retry_s
        self._done: dict[int, DeviceCounters] = {}
        self._owed: dict[Hashable, _Owed] = {}
        self._error = ""
        self._lock = threading.Lock()
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._write_on, name="cleave-store-writer", daemon=True
        )
        self._thread.start()

    @property
    def trouble(self) -> str:
        """Return why the store is unwritable and which writes are pending; empty if writable."""
        with self._lock:
            owed = [owed.what for owed in self._owed.values() if owed.what]
            if not self._error:
                return ""
            return f"{self._error}{'; not written yet: ' if owed else ''}{'; '.join(owed)}"

    def add(self, device: int, done: DeviceCounters) -> None:
        """Add `done` to a device's contribution, to be written with the next batch."""
        with self._lock:
            self._done[device] = self._done.get(device, DeviceCounters()) + done

    def flops_by_hour(self) -> list[tuple[int, float]]:
        """Return `Store.flops_by_hour`, with the contributions that are not yet written."""
        hours = dict(self._store.flops_by_hour())
        with self._lock:
            pending = sum(part.flops for part in self._done.values())
        if pending:
            hour = int(self._clock() // 3600)
            hours[hour] = hours.get(hour, 0.0) + pending
        return sorted(hours.items())

    def soon(self, write: Callable[[], None]) -> None:
        """Run `write` once in the writer's thread, after all writes requested earlier."""
        self._orders.put(write)

    def owe(self, key: Hashable, write: Callable[[], None], what: str = "") -> None:
        """Run `write` in the writer's thread and retry it while it raises StoreError.

        The write replaces a pending write with the same key. `what` describes the write in log
        messages; empty to log nothing.
        """
        with self._lock:
            self._owed.pop(key, None)
            self._owed[key] = _Owed(what, write)
        self._orders.put(self._write_owed)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until every requested write has been attempted.

        Return False on timeout, or if the writer is closed.
        """
        tried = threading.Event()
        self._orders.put(self._write_batch)
        self._orders.put(tried.set)
        while not tried.wait(1.0 if timeout_s is None else timeout_s):
            if timeout_s is not None or not self._thread.is_alive():
                return False
        return True

    def close(self) -> None:
        """Attempt all pending writes once more and end the writer's thread."""
        self._orders.put(self._write_batch)
        self._orders.put(self._write_owed)
        self._orders.put(None)
        self._thread.join()
        for owed in self._owed.values():
            if owed.what:
                _logger.error("this change was never written and is lost now: %s", owed.what)

    def _write_on(self) -> None:
        written_s = time.monotonic()
        while True:
            # Requests may arrive without a pause, so due writes must not wait for an empty queue.
            every_s = self._retry_s if self._owed else WRITE_S
            due_s = written_s + every_s - time.monotonic()
            order: Callable[[], None] | None = self._write_all
            if due_s > 0:
                with suppress(queue.Empty):
                    order = self._orders.get(timeout=due_s)
            if order is None:
                return
            try:
                order()
            except StoreError as error:  # a failed write from `soon`, which is dropped
                if not self._error:
                    _logger.error("%s", error)
            if order == self._write_all:  # taken after the writes, so that requests are handled too
                written_s = time.monotonic()

    def _write_all(self) -> None:
        self._write_owed()
        self._write_batch()

    def _write_owed(self) -> None:
        with self._lock:  # writes with a description come first
            waiting = sorted(self._owed.items(), key=lambda item: not item[1].what)
        failure: StoreError | None = None
        for key, owed in waiting:
            try:
                owed.write()
            except StoreError as error:
                failure = error
                if owed.what and not owed.said:
                    owed.said = True
                    _logger.warning(
                        "%s: this is in effect, and will be written as soon as possible", owed.what
                    )
                continue
            with self._lock:
                if self._owed.get(key) is owed:
                    del self._owed[key]
        if failure is not None:
            self._failed(failure)
        elif waiting:
            self._succeeded()

    def _write_batch(self) -> None:
        with self._lock:
            done, self._done = self._done, {}
        if not done:
            return
        try:
            self._store.credit(done, self._clock())
        except StoreError as error:
            for device, part in done.items():  # retry with the next batch
                self.add(device, part)
            self._failed(error)
        else:
            self._succeeded()

    def _failed(self, error: StoreError) -> None:
        with self._lock:
            first, self._error = not self._error, str(error)
        if first:
            _logger.error("%s", error)

    def _succeeded(self) -> None:
        with self._lock:
            if self._owed:
                return
            again, self._error = bool(self._error), ""
        if again:
            _logger.info("the server's store is writable again and up to date")
