"""A full disk: whoever writes into a run folder waits until there is space, and says so.

Nothing of a run is lost by a disk that is full for an hour, if only it stays in memory meanwhile.
So a write that finds no space is tried again, as it was, until it is done; every write leaves what
was there before as it was.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from cleave.errors import CleaveError

FIRST_RETRY_S: Final = 1.0
"""After a write that found no space; each further one waits twice as long."""

MOST_RETRY_S: Final = 60.0
"""But no longer than this: a checkpoint is gigabytes, written up to where the space ends."""

STOPPING_S: Final = 60.0
"""How long a run that is to stop tries to write what is left."""

_SLICE_S: Final = 0.5
# The last is a limit on the size of a file, which the system or an administrator sets.
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

_T = TypeVar("_T")


class DiskFullError(CleaveError):
    """There is no space for what is to be written; what was there before is as it was."""


def is_full(error: OSError) -> bool:
    """Whether an error says that there is no space left."""
    return error.errno in _FULL


def cannot_write(path: Path, error: OSError) -> CleaveError:
    """What a user is told of a write that failed."""
    kind = DiskFullError if is_full(error) else CleaveError
    return kind(
        f"{str(path)!r} cannot be written ({error.strerror or error}): "
        "free some space there, or choose another folder."
    )


class Patience:
    """Tries writes again for as long as the disk is full. One thread at a time uses it.

    Args:
        tell: told when the disk is full, and when there is space again (True for full).
        stop: whether the run is to stop; what is left is then tried for `STOPPING_S` more.
        sleep: waits for some seconds.

    Attributes:
        waited_s: seconds that were waited so far.
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
        """Do a write, once there is space.

        Raises:
            DiskFullError: when the run is to stop and there still is none.
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
        """Wait; returns how much of it after the run was asked to stop."""
        stopping_s = 0.0
        while pause_s > 0:
            if self._stop():
                stopping_s += _SLICE_S
                pause_s = min(pause_s, FIRST_RETRY_S)  # it is waited for
            self._sleep(_SLICE_S)
            self.waited_s += _SLICE_S
            pause_s -= _SLICE_S
        return stopping_s
