"""Memory settings for a device process that allocates and frees strips of hundreds of megabytes."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Final

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h of glibc
_LARGEST_MMAP_THRESHOLD = 32 * 2**20

IDLE_BYTES: Final = 2 * 2**20
"""A device that holds less than this, and has nothing to do, is between two steps."""


def hold_strips_well() -> Callable[[], None]:
    """Make glibc reuse the memory of freed strips instead of returning it to the system.

    By default glibc adapts its thresholds to freed blocks. A process with strips of many sizes then
    spends its time in the kernel on page faults, and grows by fragmentation.

    Returns:
        A function that returns all free memory to the system, to be called when the device is
            idle. It does nothing without glibc.
    """
    if not sys.platform.startswith("linux"):
        return _nothing
    try:
        libc = ctypes.CDLL(None)
        mallopt, malloc_trim = libc.mallopt, libc.malloc_trim
    except (OSError, AttributeError):  # not glibc
        return _nothing
    mallopt(_M_ARENA_MAX, 1)
    mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    mallopt(_M_TRIM_THRESHOLD, 8 * _LARGEST_MMAP_THRESHOLD)
    return lambda: malloc_trim(0)


def _nothing() -> None:
    return None
