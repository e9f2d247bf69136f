"""Memory allocator settings for processes that often allocate hundreds of megabytes."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Final

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h of glibc
_LARGEST_MMAP_THRESHOLD = 32 * 2**20

IDLE_BYTES: Final = 2 * 2**20  # a device that stores less, and has no runs, is between two steps


def hold_strips_well() -> Callable[[], None]:
    """Make glibc reuse the memory of freed arrays instead of returning it to the kernel.

    By default, glibc adapts its thresholds to the sizes of freed memory blocks. With arrays of many
    sizes, a process would spend much of its time on page faults, and fragmentation would increase
    its memory use.

    Returns:
        A function that returns all free memory to the kernel. Call it when the device is idle.
        Without glibc, the function does nothing.
    """
    if not sys.platform.startswith("linux"):
        return lambda: None
    try:
        libc = ctypes.CDLL(None)
        mallopt, malloc_trim = libc.mallopt, libc.malloc_trim
    except (OSError, AttributeError):  # not glibc
        return lambda: None
    mallopt(_M_ARENA_MAX, 1)
    mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    mallopt(_M_TRIM_THRESHOLD, 8 * _LARGEST_MMAP_THRESHOLD)
    return lambda: malloc_trim(0)
