"""Wait until Ray's nodes have room for the servers, in a way that can be stopped.

Ray Train tries to place its workers forever, and cannot be stopped before they run. Here each
attempt is a separate Ray Train run, and this module decides whether to make another.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Final

from cleave.errors import UsageError

MOST_FAILED: Final = 3
"""Number of failed starts in a row, despite enough room, after which training ends."""

_TRY_S: Final = "20"
_NO_ROOM: Final = "WorkerGroupStartupTimeoutError"
_NOT_STARTED: Final = "WorkerGroupStartupFailedError"
"""Names of Ray Train's internal errors, which its public `ControllerError` holds."""


def bound_tries() -> None:
    """Limit the time in which Ray Train tries to place its workers; see `fitted`."""
    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", _TRY_S)


def fitted(
    fit: Callable[[], object],
    stops: Callable[[], bool],
    waits: Callable[[], None],
    failed: Callable[[BaseException], None],
) -> bool:
    """Train; retry as long as the nodes have no room for the workers.

    Also retry a few times if a worker ends before it trains, for example because its node is lost.

    Args:
        fit: trains with Ray Train, whose own retries are disabled.
        stops: returns whether to stop.
        waits: called before each retry for lack of room.
        failed: called before each retry for another failure to start.

    Returns:
        True if the training ran; False if it was stopped before.

    Raises:
        Exception: from `fit`, for any other reason or after `MOST_FAILED` failed starts in a row.
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
    """Raise an error if the cluster has fewer cores than servers.

    Args:
        nodes: cores of each node.
        servers: number of servers.

    Raises:
        UsageError: when there are fewer cores.
    """
    if sum(nodes) < servers:
        raise UsageError(
            f"--servers is {servers} and the cluster has {sum(nodes)} cores; give fewer servers, "
            "or add nodes with: ray start --address HOST:PORT"
        )


def no_room(nodes: Sequence[int], servers: int, cores: int) -> str:
    """Return a sentence that says there is no room for servers with this many cores each."""
    each = "1 core" if cores == 1 else f"{cores} cores"
    return (
        f"Ray has no room for {servers} servers of {each} each: the cores of its nodes are "
        f"{sum(nodes)}, some of them in use perhaps; training goes on once there is room (a node "
        "joins with: ray start --address HOST:PORT)"
    )


def cores_of_each(nodes: Sequence[int], servers: int) -> int:
    """Return the number of cores per server: the largest that fits all servers on the nodes.

    Args:
        nodes: cores of each node; may be too few after a loss.
        servers: number of servers.
    """
    for cores in range(max(nodes, default=1), 1, -1):
        if sum(node // cores for node in nodes) >= servers:
            return cores
    return 1
