"""The doors of all servers: opened on the nodes of a Ray cluster, and found by the workers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from cleave.cluster.balance import Balance
from cleave.errors import CleaveError, UsageError
from cleave.fleet.fleet import Fleet
from cleave.training.ranks import Ranks

_THREADS: Final = 16  # of a door: a call may wait for devices
_CLOSE_S: Final = 30.0
_OPENS_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Doors:
    """The doors of all servers, as their actors.

    Attributes:
        actors: in the order of their URLs.
        nodes: of each, the node of Ray that it is on.
    """

    actors: list[Any]
    nodes: list[str]

    def __call__(self, ranks: Ranks) -> Fleet:
        """Return the fleet behind the door of a server, in its worker."""
        import ray
        from ray.exceptions import RayTaskError

        from cleave.cluster.door_runtime import DoorRuntime

        here = ray.get_runtime_context().get_node_id()
        actor = self.actors[chosen_doors(self.nodes, ranks.agree(here))[ranks.rank]]

        def call(name: str, *arguments: Any) -> Any:
            try:
                return ray.get(getattr(actor, name).remote(*arguments))
            except RayTaskError as error:
                cause = error.cause
                raise cause if isinstance(cause, CleaveError) else error from None

        def tell(name: str, *arguments: Any) -> None:
            getattr(actor, name).remote(*arguments)

        return Fleet(DoorRuntime(call, tell))

    def spread(self, ray: Any, balance: Balance) -> None:
        """Send devices that do nothing from doors with many to doors with few, if it is time.

        Args:
            ray: the module, connected to a cluster.
            balance: decides.
        """
        if not balance.is_due(time.monotonic()):
            return
        with suppress(ray.exceptions.RayError):  # a door that starts again: the next time, then
            loads = ray.get([actor.load.remote() for actor in self.actors], timeout=_CLOSE_S)
            for move in balance.next(loads, time.monotonic()):
                address = ray.get(self.actors[move.target].address.remote(), timeout=_CLOSE_S)
                self.actors[move.source].send.remote(move.devices, address)

    def close(self, ray: Any) -> None:
        """End the sessions of all devices."""
        with suppress(ray.exceptions.RayError):  # one that is lost has none
            ray.get([actor.close.remote() for actor in self.actors], timeout=_CLOSE_S)


def chosen_doors(doors: Sequence[str], servers: Sequence[str]) -> list[int]:
    """Return the number of the door that each server takes: one on its own node, if any is left.

    Args:
        doors: the node of each.
        servers: likewise, no more than doors.
    """
    free = list(range(len(doors)))
    chosen: dict[int, int] = {}
    for near in (True, False):
        for server, node in enumerate(servers):
            found = [door for door in free if not near or doors[door] == node]
            if server not in chosen and found:
                chosen[server] = found[0]
                free.remove(found[0])
    return [chosen[server] for server in range(len(servers))]


def open_doors(ray: Any, servers: int, host: str, port: int, credential: str) -> Doors:
    """Start a door for each server, spread evenly over the nodes.

    Args:
        ray: the module, connected to a cluster.
        servers: how many.
        host: the address to listen on, on each node.
        port: of the first on each machine, others take the next ones; 0 for any free ones.
        credential: what devices must show, the same at all.

    Raises:
        UsageError: when a node cannot listen there.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from cleave.cluster.door import Door

    alive = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    nodes = sorted(alive)
    hosts: list[str] = []  # a machine may be several nodes
    actors: list[Any] = []
    at: list[str] = []
    for number in range(servers):
        node = nodes[number % len(nodes)]
        where = host, port + hosts.count(alive[node]) if port else 0, credential
        options = {
            "num_cpus": 0,
            "max_concurrency": _THREADS,
            "max_restarts": -1,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=True),
        }
        actors.append(ray.remote(**options)(Door).remote(*where))
        at.append(node)
        hosts.append(alive[node])
    try:
        ray.get([actor.urls.remote() for actor in actors], timeout=_OPENS_S)
    except ray.exceptions.RayError as error:
        why = next((line for line in str(error).splitlines() if "cannot listen" in line), "")
        why = why.partition(": ")[2].partition(";")[0] or f"a door at {host}:{port} did not open"
        raise UsageError(f"{why}; give another --listen, or stop what uses it") from error
    return Doors(actors, at)
