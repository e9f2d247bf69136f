"""Waiting for disk space: when the disk of a run folder is full, training waits and reports it.

A full disk loses nothing while the data stays in memory, so a write is retried until it succeeds.
A failed write leaves the previous contents unchanged.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from cleave.errors import CleaveError

FIRST_RETRY_S: Final = 1.0
"""Delay after the first failed write; it doubles with each further one."""

MOST_RETRY_S: Final = 60.0
"""Longest delay: a retry may write gigabytes of a checkpoint before space ends."""

STOPPING_S: Final = 60.0
"""How long a stopping run retries its remaining writes."""

_SLICE_S: Final = 0.5
# EFBIG: the system or an administrator limits file sizes.
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

_T = TypeVar("_T")


class DiskFullError(CleaveError):
    """A write found no disk space; the previous contents are unchanged."""


def is_full(error: OSError) -> bool:
    """Return whether an error means that no disk space is left."""
    return error.errno in _FULL


def cannot_write(path: Path, error: OSError) -> CleaveError:
    """Return the error that tells a user why a write failed, and what to do."""
    kind = DiskFullError if is_full(error) else CleaveError
    return kind(
        f"{str(path)!r} cannot be written ({error.strerror or error}): "
        f"{remedy(error)}, or choose another folder."
    )


def remedy(error: OSError) -> str:
    """Return advice for a failed write."""
    match error.errno:
        case number if number in _FULL:
            return "free some space there"
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return "allow this user to write there"
        case errno.ELOOP:
            return "remove the link"
        case errno.EEXIST:
            return "move it away"
        case _:
            return "check the path and the disk"


class Patience:
    """Retries writes while the disk is full. Used by one thread at a time.

    Args:
        tell: called with True and a text when the disk is full, with False and a text when it has
            space again.
        stop: returns whether the run is stopping; writes are then retried for `STOPPING_S` more.
        sleep: sleeps for the given seconds.

    Attributes:
        waited_s: seconds waited so far.
    """

    def __init__(
        self,
        tell: Callable[[bool, str], None],
        stop: Callable[[], bool],
        sleep: Callable[[float], None],
    ) -> None:
        self.waited_s = 0.0
        self._tell = tell
        self._stop = stop
        self._sleep = sleep

    def insist(self, write: Callable[[], _T]) -> _T:
        """Retry a write until the disk has space; return its result.

        Raises:
            DiskFullError: when the run is stopping and the disk still has no space.
        """
        pause_s, stopping_s, told = FIRST_RETRY_S, 0.0, False
        while True:
            try:
                done = write()
            except DiskFullError as error:
                if not told:
                    self._tell(True, f"the disk is full, training waits for space: {error}")
                    told = True
                if stopping_s >= STOPPING_S:
                    raise
            else:
                if told:
                    self._tell(False, "there is space on the disk again; training goes on")
                return done
            stopping_s += self._pause(pause_s)
            pause_s = min(2 * pause_s, MOST_RETRY_S)

    def _pause(self, pause_s: float) -> float:
        """Wait; return the number of seconds waited after the run was asked to stop."""
        stopping_s = 0.0
        while pause_s > 0:
            if self._stop():
                stopping_s += _SLICE_S
                pause_s = min(pause_s, FIRST_RETRY_S)  # a user is waiting for the run to stop
            self._sleep(_SLICE_S)
            self.waited_s += _SLICE_S
            pause_s -= _SLICE_S
        return stopping_s
