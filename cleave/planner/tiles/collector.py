"""Code that makes millions of objects without reference cycles runs with the collector paused."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause Python's collector of reference cycles; it runs more often the more objects are made.

    It otherwise takes a third of the time of large plans and of the emulator's event heap.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
