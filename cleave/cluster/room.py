"""Waiting until Ray's nodes have room for the servers, in a way that can be stopped.

Ray Train by itself tries to place its workers for ever, and does not hear that it is to stop before
they run. Here each try is one of Ray Train's, and we decide whether there is another.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Final

from cleave.errors import UsageError

MOST_FAILED: Final = 3
"""So often in succession do servers that have room fail to start before training ends."""

_TRY_S: Final = "20"
_NO_ROOM: Final = "WorkerGroupStartupTimeoutError"
_NOT_STARTED: Final = "WorkerGroupStartupFailedError"
"""Names of Ray Train's internal errors, which its public `ControllerError` holds."""


def bound_tries() -> None:
    """Have Ray Train give up a try to place its workers after some seconds; see `fitted`."""
    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", _TRY_S)


def fitted(
    fit: Callable[[], object],
    stops: Callable[[], bool],
    waits: Callable[[], None],
    failed: Callable[[BaseException], None],
) -> bool:
    """Train, and try again for as long as no node has room for the workers.

    Where there is room and a worker ends before it trains, as where its node is lost at that
    moment, it is tried again as well, a few times.

    Args:
        fit: trains with Ray Train, whose own number of further tries is 0.
        stops: says whether to stop.
        waits: called when there is no room, before each further try.
        failed: called when workers did not start though there is room, before each further try.

    Returns:
        Whether it was trained; else it was stopped before.

    Raises:
        Exception: what `fit` raises for another reason, or in each of `MOST_FAILED` tries.
    """
    failures = 0
    while True:
        try:
            fit()
        except Exception as error:
            why = getattr(error, "controller_failure", None)
            failures = failures + 1 if type(why).__name__ == _NOT_STARTED else 0
            if type(why).__name__ not in (_NO_ROOM, _NOT_STARTED) or failures == MOST_FAILED:
                raise
            if stops():
                return False
            if failures:
                failed(error)
            else:
                waits()
        else:
            return True


def cores_of_nodes(ray: Any) -> list[int]:
    """Return the cores of each node of the cluster."""
    return [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]


def check_cores(nodes: Sequence[int], servers: int) -> None:
    """Refuse to begin with more servers than a cluster has cores.

    Args:
        nodes: the cores of each of its nodes.
        servers: how many there are to be.

    Raises:
        UsageError: when there are fewer cores.
    """
    if sum(nodes) < servers:
        raise UsageError(
            f"--servers is {servers} and the cluster has {sum(nodes)} cores; give fewer servers, "
            "or add nodes with: ray start --address HOST:PORT"
        )


def no_room(nodes: Sequence[int], servers: int, cores: int) -> str:
    """Return the sentence that says so of servers that are to have so many cores each."""
    each = "1 core" if cores == 1 else f"{cores} cores"
    return (
        f"Ray has no room for {servers} servers of {each} each: the cores of its nodes are "
        f"{sum(nodes)}, some of them in use perhaps; training goes on once there is room (a node "
        "joins with: ray start --address HOST:PORT)"
    )


def cores_of_each(nodes: Sequence[int], servers: int) -> int:
    """Return the cores of each server: as many as there are, spread evenly over the nodes.

    Args:
        nodes: the cores of each node; too few where one is lost just now.
        servers: how many there are to be.
    """
    for cores in range(max(nodes, default=1), 1, -1):
        if sum(node // cores for node in nodes) >= servers:
            return cores
    return 1
