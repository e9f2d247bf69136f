"""The doors of all servers: opened on the nodes of a Ray cluster, and found by the workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar

from cleave.cluster.door_calls import ActorCalls, DoorCalls, DoorLostError, ask_all
from cleave.cluster.own_door import DoorSetup
from cleave.cluster.ports import PortInUseError, opened_in_time
from cleave.errors import UsageError
from cleave.fleet.fleet import Fleet
from cleave.training.servers.ranks import Ranks

_THREADS: Final = 16  # of a door: a call may wait for devices
_OPENS_S: Final = 120.0
_PAUSE_S: Final = 1.0
ANSWERS_S: Final = 30.0
"""A door that does not answer so long is lost, for what does not wait for devices."""


_Attached = TypeVar("_Attached")


@dataclass(frozen=True, slots=True)
class Doors:
    """The doors of all servers.

    Attributes:
        calls: what calls each of them.
        nodes: of each, the node of Ray that it is on.
        on_one_machine: whether all are on this machine, which may be several nodes.
    """

    calls: list[DoorCalls]
    nodes: list[str]
    on_one_machine: bool

    def __call__(self, ranks: Ranks) -> Fleet:
        """Return the fleet behind the door of a server, in its worker."""
        import ray

        from cleave.cluster.door_runtime import DoorRuntime

        here = ray.get_runtime_context().get_node_id()
        door = self.calls[chosen_doors(self.nodes, ranks.agree(here))[ranks.rank]]
        return Fleet(once_there(lambda: DoorRuntime(door.call, door.tell)))

    def close(self) -> None:
        """End the sessions of all devices."""
        ask_all(self.calls, "close", timeout_s=ANSWERS_S)  # one that is lost has none


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


def once_there(
    attach: Callable[[], _Attached],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> _Attached:
    """Attach to a door; where it is lost, wait for some time until Ray has started it again.

    Args:
        attach: does so.
        clock: in seconds.
        sleep: waits so many seconds.

    Raises:
        DoorLostError: when it is lost still.
    """
    until_s = clock() + _OPENS_S
    while True:
        try:
            return attach()
        except DoorLostError:
            if clock() >= until_s:
                raise
            sleep(_PAUSE_S)


def open_doors(
    ray: Any,
    setups: Sequence[DoorSetup],
    say: Callable[[str], object],
    taken: Sequence[str] = (),
) -> Doors:
    """Start doors in processes of their own, spread evenly over the nodes.

    Args:
        ray: the module, connected to a cluster.
        setups: of each. Ports are those of the first on each machine, and others take the next
            ones; 0 is for any free ones.
        say: called with a sentence for the user where a port is in use, and waited for.
        taken: nodes that have a door already, each as often as it has.

    Raises:
        UsageError: when a node cannot listen there.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from cleave.cluster.own_door import OwnDoor

    class ActorDoor(OwnDoor):
        """A door whose process Ray starts, again where it is lost."""

        def __init__(self, setup: DoorSetup) -> None:
            import ray

            again = ray.get_runtime_context().was_current_actor_reconstructed
            super().__init__(setup, again=again)

    alive = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    hosts = [alive[node] for node in taken]  # a machine may be several nodes
    starts: list[Callable[[], Any]] = []
    at: list[str] = []
    for setup in setups:
        node = min(sorted(alive), key=[*taken, *at].count)
        port = setup.config.port
        port = port + hosts.count(alive[node]) if port else 0
        options = {
            "num_cpus": 0,
            "max_concurrency": _THREADS,
            "max_restarts": -1,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=True),
        }
        here = replace(setup, config=replace(setup.config, port=port))
        starts.append(partial(ray.remote(**options)(ActorDoor).remote, here))
        at.append(node)
        hosts.append(alive[node])
    started = [_Starting(ray, start) for start in starts]  # all at the same time
    calls: list[DoorCalls] = [ActorCalls(opened_in_time(each.opened, say)) for each in started]
    machines = machines_of(ray, {ray.get_runtime_context().get_node_id(), *taken, *at})
    return Doors(calls, at, len(machines) == 1)


class _Starting:
    """A door that starts, and is started again where it could not listen.

    Args:
        ray: the module, connected to a cluster.
        start: starts its actor.
    """

    def __init__(self, ray: Any, start: Callable[[], Any]) -> None:
        self._ray, self._start = ray, start
        self._actor: Any = start()

    def opened(self) -> Any:
        """Wait for the door, and return its actor.

        Raises:
            PortInUseError: when somebody else listens there.
            UsageError: when it cannot listen for another reason, or does not start.
        """
        actor = self._actor or self._start()
        self._actor = None
        try:
            self._ray.get(actor.urls.remote(), timeout=_OPENS_S)
        except self._ray.exceptions.RayError as error:
            why = next((line for line in str(error).splitlines() if "cannot listen" in line), "")
            why = why.partition(": ")[2].partition(";")[0] or "the door of a server did not open"
            kind = PortInUseError if "in use" in why else UsageError
            raise kind(f"{why}; give another port, or stop what uses it") from error
        return actor


def machines_of(ray: Any, nodes: Container[str] | None = None) -> set[str]:
    """Return the addresses of the machines that some nodes of the cluster are on; or all nodes."""
    return {
        node["NodeManagerAddress"]
        for node in ray.nodes()
        if node["Alive"] and (nodes is None or node["NodeID"] in nodes)
    }
