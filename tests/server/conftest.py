"""What several tests of the server share."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from cleave.server.store.job_history import JobHistory
from cleave.server.store.store import Store
from cleave.server.store.writer import StoreWriter
from tests.server.clocks import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def history() -> Iterator[JobHistory]:
    """The history of a server's jobs, in memory."""
    store = Store(None)
    writer = StoreWriter(store, time.time)
    yield JobHistory(store, writer, time.time)
    writer.close()
    store.close()
