"""Work that makes millions of objects and no reference cycles, without the search for them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Python looks for reference cycles the more often the more objects are made.

    A third of the time of large plans and of the emulator's event heap otherwise goes into that.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
