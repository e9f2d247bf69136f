"""Wait until a Ray cluster has enough free cores for the servers, or the user stops the wait.

Ray Train itself would wait forever, so each attempt is a separate run with a time limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from cleave.errors import UsageError

MOST_FAILED: Final = 3
"""Number of consecutive failed starts, despite enough free cores, after which training ends."""

TRY_S: Final = "20"  # maximum time that a Ray Train run waits for free cores, in seconds
_NO_ROOM: Final = "WorkerGroupStartupTimeoutError"
_NOT_STARTED: Final = "WorkerGroupStartupFailedError"
"""Class names of internal Ray Train errors. A public `ControllerError` wraps them."""


def fitted(
    fit: Callable[[], object],
    stops: Callable[[], bool],
    waits: Callable[[], None],
    failed: Callable[[BaseException], None],
) -> bool:
    """Call `fit` to train, and retry while the cluster has too few free cores.

    Also retry a few times if a worker exits before it trains, for example because its node is lost.
    Call `waits` before a retry due to too few cores, and `failed` before any other retry. Return
    True after training, or False if `stops` returned True before the workers started.

    Raises:
        Exception: the error from `fit`, if the workers had started, or after `MOST_FAILED`
            consecutive failed starts.
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
    """Return each live node's number of CPU cores, including cores in use."""
    return [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]


def check_cores(nodes: Sequence[int], servers: int) -> None:
    """Raise UsageError if the nodes together have fewer than `servers` cores."""
    if sum(nodes) < servers:
        raise UsageError(
            f"--servers is {servers} and the cluster has {sum(nodes)} cores; give fewer servers, "
            "or add nodes with: ray start --address HOST:PORT"
        )


def no_room(nodes: Sequence[int], servers: int, cores: int) -> str:
    """Return a message that tells users that too few cores are free for the servers."""
    each = "1 core" if cores == 1 else f"{cores} cores"
    return (
        f"Ray has no room for {servers} servers of {each} each: the cores of its nodes are "
        f"{sum(nodes)}, some of them in use perhaps; training continues once there is room (a node "
        "joins with: ray start --address HOST:PORT)"
    )


def cores_of_each(nodes: Sequence[int], servers: int) -> int:
    """Return the largest number of cores per server that lets all servers fit; at least 1."""
    for cores in range(max(nodes, default=1), 1, -1):
        if sum(node // cores for node in nodes) >= servers:
            return cores
    return 1
