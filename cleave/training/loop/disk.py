"""Pause training while the disk that holds the run folder is full.

Data stays in memory. A failed write is retried until it succeeds or, once the run is stopping, for
a limited time. A failed write leaves the previous contents of the file unchanged.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

from cleave.errors import CleaveError

FIRST_RETRY_S: Final = 1.0  # delay of the first retry; each retry doubles it
# Longest delay: each retry may write gigabytes of a checkpoint before it fails.
MOST_RETRY_S: Final = 60.0
STOPPING_S: Final = 60.0  # time after which a stopping run no longer retries a write
_SLICE_S: Final = 0.5
# EFBIG: the file would exceed a size limit of the file system or the user.
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

_T = TypeVar("_T")


class DiskFullError(CleaveError):
    """Raised when the disk is too full for a write. The file's previous contents are unchanged."""


def is_full(error: OSError) -> bool:
    """Return True if an error means that the disk is full or a quota or size limit is reached."""
    return error.errno in _FULL


def cannot_write(path: Path, error: OSError) -> CleaveError:
    """Return the error to raise for a failed write, with advice in its message."""
    kind = DiskFullError if is_full(error) else CleaveError
    return kind(
        f"{str(path)!r} cannot be written ({error.strerror or error}): "
        f"{remedy(error)}, or choose another folder."
    )


def remedy(error: OSError) -> str:
    """Return advice for the user about a failed write, such as "free some space there"."""
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


@dataclass(eq=False)
class Patience:
    """A retry policy for writes to a full disk. Not thread-safe.

    Args:
        tell: called with True and a message when the disk is full, and with False and a message
            when the disk has space again.
        stop: returns True if the run is stopping. A write is then retried for at most `STOPPING_S`.
        sleep: sleeps for a number of seconds.

    Attributes:
        waited_s: total time spent waiting for disk space, in seconds.
    """

    tell: Callable[[bool, str], None]
    stop: Callable[[], bool]
    sleep: Callable[[float], None]
    waited_s: float = field(init=False, default=0.0)

    def insist(self, write: Callable[[], _T]) -> _T:
        """Call `write` until it no longer raises DiskFullError, and return its result.

        Raises:
            DiskFullError: if the disk is still full `STOPPING_S` after the run was asked to stop.
        """
        pause_s, stopping_s, told = FIRST_RETRY_S, 0.0, False
        while True:
            try:
                done = write()
            except DiskFullError as error:
                if not told:
                    self.tell(True, f"the disk is full, so training waits for space: {error}")
                    told = True
                if stopping_s >= STOPPING_S:
                    raise
            else:
                if told:
                    self.tell(False, "the disk has space again; training continues")
                return done
            stopping_s += self._pause(pause_s)
            pause_s = min(2 * pause_s, MOST_RETRY_S)

    def _pause(self, pause_s: float) -> float:
        """Wait for `pause_s` seconds, but for at most `FIRST_RETRY_S` after a stop request.

        Return the number of seconds that followed the stop request.
        """
        stopping_s = 0.0
        while pause_s > 0:
            if self.stop():
                stopping_s += _SLICE_S
                pause_s = min(pause_s, FIRST_RETRY_S)
            self.sleep(_SLICE_S)
            self.waited_s += _SLICE_S
            pause_s -= _SLICE_S
        return stopping_s
