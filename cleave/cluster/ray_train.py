"""One training on several servers, each a worker of Ray Train.

Ray starts the workers, one after another on the nodes of its cluster, makes torch's process group
for them, and starts all again when one is lost; they go on from the newest checkpoint of the run
folder. What they report, and whether they are to stop, goes through an actor, the `Board`.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cleave.cluster.balance import Balance
from cleave.cluster.board import Board
from cleave.errors import CleaveError, UsageError, not_installed
from cleave.fleet.fleet import Fleet
from cleave.training.job import JobSpec
from cleave.training.ranks import Ranks
from cleave.training.records import NoteRecord, Record, StartRecord, StepRecord
from cleave.training.run_folder import RunFolder

LOOK_S: Final = 0.2
"""Seconds between two looks at what the servers report."""

BALANCE_S: Final = 5.0
"""Seconds between two looks at which server has too many devices."""

MOST_STARTS: Final = 3
"""So often do servers start without doing a step before training ends."""

RAYS_OWN: Final = "ray"
"""The folder in the run folder where Ray Train keeps what it needs while servers train."""

_KNOCK_S: Final = 5.0
_DOOR_THREADS: Final = 16
_CLOSE_S: Final = 30.0
_FAILED_S: Final = 5.0
_OPENS_S: Final = 120.0
_MALLOC: Final = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
"""With these, glibc gives memory back that a server does not use any more."""

FleetOf = Callable[[Ranks], Fleet | None]
"""Opens the fleet of a server, in its worker."""


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
        """Send devices that do nothing from doors with many to doors with few."""
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
            "max_concurrency": _DOOR_THREADS,
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


@dataclass(frozen=True, slots=True)
class SharedJob:
    """Holds what each server is started with.

    Attributes:
        job: what to train.
        folder: the run folder, which all servers see under this path.
        at: the folder in which relative paths of the job begin.
        resume, restart: see `cleave.training.trainer.train`.
        fleet_of: opens the server's fleet.
    """

    job: JobSpec
    folder: Path
    at: Path
    resume: bool
    restart: bool
    fleet_of: FleetOf


def need_ray() -> None:
    """Refuse to go on without Ray.

    Raises:
        UsageError: when it is not installed.
    """
    if importlib.util.find_spec("ray") is None:
        raise not_installed("--servers", "ray", "ray")


@contextmanager
def cluster(address: str | None, servers: int) -> Iterator[Any]:
    """Connect to a Ray cluster, or start one on this machine; yield the module `ray`.

    Args:
        address: of its head node as Ray writes it, host:port, or "auto" on one of its nodes; None
            for a cluster of this machine, which ends with the block.
        servers: how many will be started.

    Raises:
        UsageError: when Ray is not installed, or no cluster is at the address.
    """
    need_ray()
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    os.environ.setdefault("RAY_AUTH_MODE", "token")  # a cluster without one obeys anybody
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        if address is None:
            cpus = max(servers, os.cpu_count() or 1)
            ray.init(
                num_cpus=cpus, include_dashboard=False, _node_ip_address=_own_address(), **quiet
            )
        else:
            _knock(address)
            ray.init(address, **quiet)
    except (OSError, ValueError) as error:  # ConnectionError is an OSError
        raise UsageError(
            f"no Ray cluster answers at {address!r} ({error}); give host:port of its head node, or "
            "start one with: ray start --head"
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def train_together(
    ray: Any,
    shared: SharedJob,
    servers: int,
    report: Callable[[Record], None],
    stop: Callable[[], bool],
) -> None:
    """Train on several servers until the last step.

    Args:
        ray: the module, connected to a cluster.
        shared: what to train.
        servers: how many.
        report: called with every record.
        stop: says whether to stop; each server then writes what it has.

    Raises:
        CleaveError: when training failed.
    """
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    cpus = _cpus_of_each(ray, servers)
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    board = ray.remote(num_cpus=0, scheduling_strategy=here)(Board).remote()
    trainer = TorchTrainer(
        _serve_rank,
        train_loop_config={"shared": shared, "board": board},
        torch_config=TorchConfig(backend="gloo", timeout_s=7 * 24 * 3600),
        scaling_config=ScalingConfig(
            num_workers=servers,
            resources_per_worker={"CPU": cpus},
            placement_strategy="SPREAD",
        ),
        run_config=RunConfig(
            name=RAYS_OWN,
            storage_path=str(shared.folder),
            failure_config=FailureConfig(max_failures=-1),  # the board counts those in vain
            worker_runtime_env={"env_vars": {**_MALLOC, "OMP_WAIT_POLICY": "PASSIVE"}},
        ),
    )
    failed: list[BaseException] = []

    def fit() -> None:
        try:
            trainer.fit()
        except BaseException as error:  # noqa: BLE001 - raised below, in the caller's thread
            failed.append(error)

    running = threading.Thread(target=fit, name="cleave-ray-train", daemon=True)
    running.start()
    stopping = False
    balance, balanced_s = Balance(), time.monotonic()
    while running.is_alive():
        running.join(LOOK_S)
        if isinstance(shared.fleet_of, Doors) and time.monotonic() - balanced_s > BALANCE_S:
            shared.fleet_of.spread(ray, balance)
            balanced_s = time.monotonic()
        for record in ray.get(board.take.remote()):
            report(record)
        if ray.get(board.failure.remote()):  # others may wait for the server that failed
            running.join(_FAILED_S)
            break
        if stop() and not stopping:
            stopping = True
            ray.get(board.stop.remote())
    shutil.rmtree(shared.folder / RAYS_OWN, ignore_errors=True)
    for record in ray.get(board.take.remote()):
        report(record)
    if text := ray.get(board.failure.remote()):
        raise CleaveError(text)
    if failed:
        raise CleaveError(f"the servers ended: {str(failed[0]).splitlines()[0]}") from failed[0]


def _serve_rank(config: dict[str, Any]) -> None:
    """Train as one of the servers, in a process that Ray started."""
    import ray

    from cleave.training.ranks import LostServerError, TorchRanks
    from cleave.training.trainer import TrainContext, train

    shared: SharedJob = config["shared"]
    board = config["board"]
    if shared.at.is_dir():
        os.chdir(shared.at)  # Ray has given each worker a folder of its own
    ranks = TorchRanks()
    starts = ray.get(board.started.remote(ranks.rank))
    if starts > MOST_STARTS:
        ray.get(board.fail.remote(f"the servers were lost {MOST_STARTS} times without a step"))
        return

    def report(record: Record) -> None:
        if isinstance(record, NoteRecord) and ranks.count > 1:
            record = NoteRecord(f"server {ranks.rank + 1}: {record.text}")
        if isinstance(record, StartRecord) and ranks.rank:
            return
        # Waited for, so that what a process says before it dies is known.
        ray.get(board.say.remote(record, record.step if isinstance(record, StepRecord) else 0))

    fleet = shared.fleet_of(ranks)
    stop = _Stop(lambda: bool(ray.get(board.stopping.remote())))
    context = TrainContext(fleet, report, stop, ranks=ranks)
    again = starts > 1
    try:
        train(
            shared.job,
            RunFolder(shared.folder),
            context,
            resume=shared.resume or again,
            restart=shared.restart or again,
        )
    except LostServerError as error:
        report(NoteRecord(str(error)))
        raise  # Ray starts all again
    except CleaveError as error:
        ray.get(board.fail.remote(str(error)))
    except Exception as error:
        report(NoteRecord(f"it failed, and all start again: {type(error).__name__}: {error}"))
        raise
    finally:
        if fleet is not None:
            fleet.close()


class _Stop:
    """Asks at most every so often whether to stop.

    Args:
        ask: asks.
    """

    def __init__(self, ask: Callable[[], bool]) -> None:
        self._ask = ask
        self._asked_s = -LOOK_S
        self._stops = False

    def __call__(self) -> bool:
        """Say whether to stop."""
        now_s = time.monotonic()
        if not self._stops and now_s - self._asked_s >= LOOK_S:
            self._stops, self._asked_s = self._ask(), now_s
        return self._stops


def _cpus_of_each(ray: Any, servers: int) -> int:
    """Return the cores of each server: as many as there are, spread evenly over the nodes.

    Raises:
        UsageError: when there are fewer cores than servers.
    """
    nodes = sorted(int(n["Resources"].get("CPU", 0)) for n in ray.nodes() if n["Alive"])
    if sum(nodes) < servers:
        raise UsageError(
            f"--servers is {servers} and the cluster has {sum(nodes)} cores; give fewer servers, "
            "or add nodes with: ray start --address HOST:PORT"
        )
    for cpus in range(max(nodes), 1, -1):
        if sum(node // cpus for node in nodes) >= servers:
            return cpus
    return 1


def _own_address() -> str:
    """Return an address of this machine that others could reach; on loopback Ray hangs."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: it looks up the way
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def _knock(address: str) -> None:
    """Find out whether somebody listens there: Ray itself takes minutes to give up.

    Raises:
        OSError, ValueError: when nobody does, or it is no address.
    """
    if address == "auto":
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    socket.create_connection((host, int(port)), _KNOCK_S).close()
