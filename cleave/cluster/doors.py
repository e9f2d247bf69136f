"""The endpoints of all servers: started on the nodes of a Ray cluster, and found by workers."""

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

_THREADS: Final = 16  # threads of an endpoint: calls may wait for devices
_OPENS_S: Final = 120.0
_PAUSE_S: Final = 1.0
ANSWERS_S: Final = 30.0
"""Seconds after which a silent endpoint counts as lost, for calls that do not wait for devices."""


_Attached = TypeVar("_Attached")


@dataclass(frozen=True, slots=True)
class Doors:
    """The endpoints of all servers.

    Attributes:
        calls: calls to each endpoint.
        nodes: Ray node of each endpoint.
        on_one_machine: whether all endpoints are on this machine, which may have several nodes.
    """

    calls: list[DoorCalls]
    nodes: list[str]
    on_one_machine: bool

    def __call__(self, ranks: Ranks) -> Fleet:
        """Return the fleet at a server's endpoint; called in its worker."""
        import ray

        from cleave.cluster.door_runtime import DoorRuntime

        here = ray.get_runtime_context().get_node_id()
        door = self.calls[chosen_doors(self.nodes, ranks.agree(here))[ranks.rank]]
        return Fleet(once_there(lambda: DoorRuntime(door.call, door.tell)))

    def close(self) -> None:
        """End the sessions of all devices."""
        ask_all(self.calls, "close", timeout_s=ANSWERS_S)  # a lost endpoint has none


def chosen_doors(doors: Sequence[str], servers: Sequence[str]) -> list[int]:
    """Return the number of each server's endpoint, preferably one on its own node.

    Args:
        doors: node of each endpoint.
        servers: node of each server; no more servers than endpoints.
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
    """Attach to an endpoint; if it is lost, retry until Ray has restarted it.

    Args:
        attach: attaches to the endpoint.
        clock: returns seconds.
        sleep: waits for a number of seconds.

    Raises:
        DoorLostError: when the endpoint stays lost.
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
    """Start endpoints in separate processes, spread evenly over the nodes.

    Args:
        ray: the `ray` module, connected to a cluster.
        setups: setup of each endpoint. The port is for the first endpoint on each machine; further
            ones take the next ports. Port 0 means any free port.
        say: called with a sentence for the user while a port in use is awaited.
        taken: nodes of existing endpoints, one entry per endpoint.

    Raises:
        UsageError: when a node cannot listen on its port.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from cleave.cluster.own_door import OwnDoor

    class ActorDoor(OwnDoor):
        """An endpoint whose process Ray starts, and restarts after a loss."""

        def __init__(self, setup: DoorSetup) -> None:
            import ray

            again = ray.get_runtime_context().was_current_actor_reconstructed
            super().__init__(setup, again=again)

    alive = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    hosts = [alive[node] for node in taken]  # a machine may have several nodes
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
    started = [_Starting(ray, start) for start in starts]  # all start in parallel
    calls: list[DoorCalls] = [ActorCalls(opened_in_time(each.opened, say)) for each in started]
    machines = machines_of(ray, {ray.get_runtime_context().get_node_id(), *taken, *at})
    return Doors(calls, at, len(machines) == 1)


class _Starting:
    """A starting endpoint, restarted if it could not listen.

    Args:
        ray: the `ray` module, connected to a cluster.
        start: starts the endpoint's actor.
    """

    def __init__(self, ray: Any, start: Callable[[], Any]) -> None:
        self._ray, self._start = ray, start
        self._actor: Any = start()

    def opened(self) -> Any:
        """Wait for the endpoint and return its actor.

        Raises:
            PortInUseError: when its port is in use.
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
    """Return the addresses of the machines of some nodes, or of all nodes if None."""
    return {
        node["NodeManagerAddress"]
        for node in ray.nodes()
        if node["Alive"] and (nodes is None or node["NodeID"] in nodes)
    }
