"""Waiting until Ray's nodes have room for the servers, in a way that can be stopped.

Ray Train by itself tries to place its workers for ever, and does not hear that it is to stop before
they run. Here each try is one of Ray Train's, and we decide whether there is another.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

_TRY_S: Final = "20"
_NO_ROOM: Final = ("WorkerGroupStartupTimeoutError", "WorkerGroupStartupFailedError")
"""Names of Ray Train's internal errors, which its public `ControllerError` holds."""


def bound_tries() -> None:
    """Have Ray Train give up a try to place its workers after some seconds; see `fitted`."""
    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", _TRY_S)


def fitted(fit: Callable[[], object], stops: Callable[[], bool], waits: Callable[[], None]) -> bool:
    """Train, and try again for as long as no node has room for the workers.

    Args:
        fit: trains with Ray Train, whose own number of further tries is 0.
        stops: says whether to stop.
        waits: called when there is no room, before each further try.

    Returns:
        Whether it was trained; else it was stopped while there was no room.

    Raises:
        Exception: what `fit` raises for another reason.
    """
    while True:
        try:
            fit()
        except Exception as error:
            if type(getattr(error, "controller_failure", None)).__name__ not in _NO_ROOM:
                raise
        else:
            return True
        if stops():
            return False
        waits()
