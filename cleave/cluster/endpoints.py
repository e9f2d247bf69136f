"""Start servers' endpoints on the nodes of a Ray cluster and assign them to workers.

A worker's fleet runtime talks to its endpoint, which is in another process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar

from cleave.cluster.endpoint import EndpointSetup, FleetView, Product
from cleave.cluster.endpoint_calls import ActorCalls, EndpointCalls, EndpointLostError, ask_all
from cleave.cluster.message_packing import Packer
from cleave.errors import UsageError
from cleave.fleet.fleet import Fleet
from cleave.fleet.fleet_runtime import FleetRuntime
from cleave.fleet.product import GemmFuture
from cleave.planner.plan import DeviceRates
from cleave.scheduler.counters import FleetCounters, StepProgress
from cleave.scheduler.stages.arrays import StageArray
from cleave.scheduler.stages.outcomes import StageOutcome
from cleave.scheduler.stages.work import StepWork
from cleave.server.jobs.energy import SessionWork
from cleave.training.servers.ranks import Ranks

_FRESH_S: Final = 0.1  # lifetime of the cached `FleetView`, in seconds
_CALL_S: Final = 60.0  # maximum time that one remote call waits, in seconds

Call = Callable[..., Any]
"""Function that takes a method's name and arguments, calls the endpoint, and returns the result."""


class EndpointRuntime(FleetRuntime):
    """A fleet runtime that calls an endpoint. `call` waits for the result, but `tell` need not."""

    clock = "wall"
    keeps_state = False  # each array is sent only once, so a snapshot could not be updated

    def __init__(self, call: Call, tell: Call) -> None:
        self._call = call
        self._tell = tell
        call("attach")
        self._before = call("of_runtime", "counters")
        self._sent: set[int] = set()
        self._unbound: set[int] = set()  # operands whose matrices the endpoint has freed
        self._packer = Packer()
        self._view: FleetView = call("view")
        self._seen_s = time.monotonic()

    # --- GEMMs ---

    def start(self, future: GemmFuture) -> None:
        """Send a GEMM's operands to the endpoint if it lacks them, and start the GEMM."""
        for operand in (future.a.operand, future.b.operand):
            if operand.id not in self._sent:
                self._sent.add(operand.id)
                self._unbound.discard(operand.id)
                self._call("operand", operand.id, operand.buffer.array, operand.buffer.dtype)
        rows, columns = future.out.shape
        self._call(
            "start",
            Product(
                future.job.id,
                (future.a.operand.id, future.a.transposed),
                (future.b.operand.id, future.b.transposed),
                rows,
                columns,
                future.out.dtype,
            ),
        )

    def wait(self, future: GemmFuture, timeout_s: float | None = None) -> bool:
        """Wait for a GEMM and copy its result into `future.out`. Return False on timeout."""
        if future.done:
            return True
        for wait_s in _within(timeout_s):
            answer = self._call("wait", future.job.id, wait_s)
            if answer is not None:
                product, future.error = answer
                if product is not None:
                    future.out.array[...] = product
                future.done = True
                return True
        return False

    def withdraw(self, future: GemmFuture) -> None:
        """Withdraw a GEMM and wait until it has ended."""
        self._call("withdraw", future.job.id)
        self.wait(future)

    def release(self, operand: int) -> None:
        if operand in self._sent or operand in self._unbound:
            self._sent.discard(operand)
            self._unbound.discard(operand)
            self._tell("release", operand)

    def unbind(self, operand: int) -> None:
        if operand in self._sent:
            self._sent.discard(operand)
            self._unbound.add(operand)
            self._call("unbind", operand)

    # --- steps by stages ---

    def begin_step(self, work: StepWork) -> None:
        forgotten = self._packer.forget_others(work)
        self._call("begin_step", self._packer.pack(work), forgotten)

    def give(self, batch: int, made: StageArray, after: int | None = None) -> None:
        self._call("give", batch, self._packer.pack(made), after)

    def resolve(self, right: bool, reason: str) -> None:
        self._call("of_runtime", "resolve", right, reason)

    def next_outcome(self, timeout_s: float | None = None) -> StageOutcome | None:
        for wait_s in _within(timeout_s):
            outcome = self._call("next_outcome", wait_s)
            if outcome is not None:
                found: StageOutcome = self._packer.received_back(outcome)
                return found
        return None

    def quarantine(self, device: int, reason: str) -> None:
        """Quarantine a device, and invalidate the cached `FleetView`."""
        self._call("of_runtime", "quarantine", device, reason)
        self._seen_s = float("-inf")

    def withdraw_step(self) -> None:
        self._call("of_runtime", "withdraw_step")

    def end_steps(self) -> None:
        self._call("of_runtime", "end_steps")

    def close(self) -> None:
        """Do nothing, so that the devices stay connected for the next worker."""

    # --- state of the fleet ---

    def counters(self) -> FleetCounters:
        """Return the fleet's counters for the time since this worker attached to the endpoint."""
        now: FleetCounters = self._call("of_runtime", "counters")
        before: FleetCounters = self._before
        return now - before

    @contextmanager
    def counting_tasks(self) -> Iterator[None]:
        """In the `with` block, make the endpoint count a training step's tasks for operators."""
        self._call("count_tasks", True)
        try:
            yield
        finally:
            self._call("count_tasks", False)

    def progress(self) -> StepProgress | None:
        """Return None, because operators get the progress from the endpoint."""
        return None

    def device_count(self) -> int:
        return self._now().device_count

    def stuck(self, future: GemmFuture) -> str:
        text: str = self._call("stuck", future.job.id)
        return text

    def stage_devices(self) -> dict[int, DeviceRates]:
        return self._now().stage_devices

    def why_no_stages(self) -> str:
        return self._now().why_no_stages

    def fleet_rates(self) -> tuple[int, list[DeviceRates]]:
        view = self._now()
        return view.epoch, view.rates

    def _now(self) -> FleetView:
        now_s = time.monotonic()
        if now_s - self._seen_s > _FRESH_S:
            self._view, self._seen_s = self._call("view"), now_s
        return self._view


def _within(timeout_s: float | None) -> Iterator[float]:
    """Yield the maximum wait of each remote call, in seconds, until `timeout_s` has passed."""
    until_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
    wait_s = min(_CALL_S, until_s - time.monotonic())
    yield max(0.0, wait_s)
    while (left_s := until_s - time.monotonic()) > 0:
        yield min(_CALL_S, left_s)


ANSWERS_S: Final = 30.0  # timeout in seconds for calls that do not wait for devices
FREED_S: Final = 20.0  # maximum time to wait until a port is free, in seconds
_OPENS_S: Final = 120.0
_PAUSE_S: Final = 1.0
_THREADS: Final = 16  # threads per endpoint; several are needed because calls may wait for devices

_Result = TypeVar("_Result")


class PortInUseError(UsageError):
    """Raised when the port is in use, perhaps by a previous run that is shutting down."""


def retried(
    action: Callable[[], _Result],
    error: type[Exception],
    for_s: float,
    say: Callable[[str], object] = lambda why: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> _Result:
    """Return the result of `action`. If `action` raises `error`, retry for up to `for_s` seconds.

    `say` is called with the message of the first error.
    """
    until_s, said = clock() + for_s, False
    while True:
        try:
            return action()
        except error as failed:
            if clock() >= until_s:
                raise
            if not said:
                said = True
                say(str(failed))
            sleep(_PAUSE_S)


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The endpoints of all servers."""

    calls: list[EndpointCalls]  # client for each endpoint
    nodes: list[str]  # id of the Ray node on which each endpoint runs
    on_one_machine: bool  # whether all nodes are on this machine

    def __call__(self, ranks: Ranks) -> Fleet:
        """Return a fleet that uses the endpoint chosen for the worker of rank `ranks.rank`."""
        import ray

        here = ray.get_runtime_context().get_node_id()
        endpoint = self.calls[chosen_endpoints(self.nodes, ranks.agree(here))[ranks.rank]]
        return Fleet(
            retried(  # Ray may be restarting the endpoint
                lambda: EndpointRuntime(endpoint.call, endpoint.tell), EndpointLostError, _OPENS_S
            )
        )

    def close(self) -> None:
        """Close all endpoints and end the sessions of all devices."""
        ask_all(self.calls, "close", timeout_s=ANSWERS_S)  # a lost endpoint has no sessions


def chosen_endpoints(endpoints: Sequence[str], servers: Sequence[str]) -> list[int]:
    """For each server, return the index of an endpoint, preferably on the server's node.

    Both arguments are lists of node ids. No two servers get the same endpoint.
    """
    free = list(range(len(endpoints)))
    chosen: dict[int, int] = {}
    for near in (True, False):
        for server, node in enumerate(servers):
            found = [endpoint for endpoint in free if not near or endpoints[endpoint] == node]
            if server not in chosen and found:
                chosen[server] = found[0]
                free.remove(found[0])
    return [chosen[server] for server in range(len(servers))]


def open_endpoints(
    ray: Any,
    setups: Sequence[EndpointSetup],
    say: Callable[[str], object],
    taken: Sequence[str] = (),
) -> Endpoints:
    """Start endpoints in separate processes, spread evenly over the nodes of the cluster.

    Args:
        ray: the `ray` module, connected to a cluster.
        setups: the setup of each endpoint. Endpoints on the same machine use successive ports,
            starting at the port in the setup. Port 0 means any free port.
        say: called with a message for the user if this function must wait for a free port.
        taken: node ids of the endpoints that already exist.

    Raises:
        UsageError: if an endpoint cannot listen on its port.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from cleave.cluster.endpoint import OwnEndpoint

    class ActorEndpoint(OwnEndpoint):
        """An endpoint in a Ray actor. Ray restarts the actor if its process is lost."""

        def __init__(self, setup: EndpointSetup) -> None:
            import ray

            again = ray.get_runtime_context().was_current_actor_reconstructed
            super().__init__(setup, again=again)

    alive = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    hosts = [alive[node] for node in taken]  # several nodes may share a machine
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
        starts.append(partial(ray.remote(**options)(ActorEndpoint).remote, here))
        at.append(node)
        hosts.append(alive[node])
    started = [_Starting(ray, start) for start in starts]  # endpoints start in parallel

    def say_waiting(why: str) -> None:
        say(f"waiting up to {FREED_S:.0f} s for servers that may be shutting down: {why}")

    calls: list[EndpointCalls] = [
        ActorCalls(retried(each.opened, PortInUseError, FREED_S, say_waiting)) for each in started
    ]
    machines = machines_of(ray, {ray.get_runtime_context().get_node_id(), *taken, *at})
    return Endpoints(calls, at, len(machines) == 1)


class _Starting:
    """An endpoint that is starting. If the start fails, the next call to `opened` retries it."""

    def __init__(self, ray: Any, start: Callable[[], Any]) -> None:
        self._ray, self._start = ray, start
        self._actor: Any = start()

    def opened(self) -> Any:
        """Wait until the endpoint listens, and return its actor. To retry, call this again."""
        actor = self._actor or self._start()
        self._actor = None
        try:
            self._ray.get(actor.urls.remote(), timeout=_OPENS_S)
        except self._ray.exceptions.RayError as error:
            why = next((line for line in str(error).splitlines() if "cannot listen" in line), "")
            why = (
                why.partition(": ")[2].partition(";")[0] or "the endpoint of a server did not start"
            )
            kind = PortInUseError if "in use" in why else UsageError
            raise kind(f"{why}; use another port, or stop the program that uses it") from error
        return actor


def machines_of(ray: Any, nodes: Container[str] | None = None) -> set[str]:
    """Return the IP addresses of the live Ray nodes. If given, `nodes` selects nodes by ID."""
    return {
        node["NodeManagerAddress"]
        for node in ray.nodes()
        if node["Alive"] and (nodes is None or node["NodeID"] in nodes)
    }


class EndpointLogs:
    """A `WorkLog` of the sessions at several endpoints. It skips lost endpoints."""

    def __init__(self, endpoints: Sequence[EndpointCalls]) -> None:
        self._endpoints = endpoints

    def begin(self) -> None:
        ask_all(self._endpoints, "begin_log", timeout_s=ANSWERS_S)

    def did(self) -> list[SessionWork]:
        answers = ask_all(self._endpoints, "did", timeout_s=ANSWERS_S)
        return [work for answer in answers if answer is not None for work in answer]

    def end(self) -> None:
        ask_all(self._endpoints, "end_log", timeout_s=ANSWERS_S)
