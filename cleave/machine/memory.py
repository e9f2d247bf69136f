"""Memory allocator settings for processes that often allocate hundreds of megabytes."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Final

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h of glibc
_LARGEST_MMAP_THRESHOLD = 32 * 2**20

IDLE_BYTES: Final = 2 * 2**20  # a device that stores less, and has no runs, is between two steps


def return_free_memory() -> None:
    """Return all free memory to the kernel, if the allocator is glibc's."""
    if sys.platform.startswith("linux"):
        with suppress(OSError, AttributeError):  # not glibc
            ctypes.CDLL(None).malloc_trim(0)


def hold_strips_well() -> Callable[[], None]:
    """Make glibc reuse the memory of freed arrays instead of returning it to the kernel.

    By default, glibc adapts its thresholds to the sizes of freed memory blocks. With arrays of many
    sizes, a process would spend much of its time on page faults, and fragmentation would increase
    its memory use.

    Returns:
        `return_free_memory`. Call it when the device is idle.
    """
    if sys.platform.startswith("linux"):
        with suppress(OSError, AttributeError):  # not glibc
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(_M_ARENA_MAX, 1)
            mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
            mallopt(_M_TRIM_THRESHOLD, 8 * _LARGEST_MMAP_THRESHOLD)
    return return_free_memory
