"""One training on several servers, each a worker of Ray Train.

Ray starts the workers, one after another on the nodes of its cluster, makes torch's process group
for them, and starts all again when one is lost; they go on from the newest checkpoint of the run
folder. What they report, and whether they are to stop, goes through an actor, the `Board`.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cleave.cluster.board import Board
from cleave.cluster.room import bound_tries, fitted
from cleave.energy.run_energy import RunEnergy
from cleave.errors import CleaveError, UsageError
from cleave.fleet.fleet import Fleet
from cleave.training.job import JobSpec
from cleave.training.ranks import WAIT_S, Ranks
from cleave.training.records import NoteRecord, Record, StepRecord
from cleave.training.run_folder import RunFolder

LOOK_S: Final = 0.2
"""Seconds between two looks at what the servers report."""

MOST_STARTS: Final = 3
"""So often do servers start without doing a step before training ends."""

RAYS_OWN: Final = "ray"
"""The folder in the run folder where Ray Train keeps what it needs while servers train."""

_FAILED_S: Final = 5.0
MALLOC: Final = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
"""With these, glibc gives memory back that a server does not use any more."""

FleetOf = Callable[[Ranks], Fleet | None]
"""Opens the fleet of a server, in its worker."""

MeterOf = Callable[[Fleet], Callable[[], RunEnergy]]
"""Begins to meter what such a fleet uses; what it returns says how much that was so far."""


@dataclass(frozen=True, slots=True)
class SharedJob:
    """Holds what each server is started with.

    Attributes:
        job: what to train.
        folder: the run folder, which all servers see under this path.
        at: the folder in which relative paths of the job begin.
        resume, restart: see `cleave.training.trainer.train`.
        fleet_of: opens the server's fleet.
        meter_of: meters it; None where that is done elsewhere.
    """

    job: JobSpec
    folder: Path
    at: Path
    resume: bool
    restart: bool
    fleet_of: FleetOf
    meter_of: MeterOf | None = None


def train_together(
    ray: Any,
    shared: SharedJob,
    servers: int,
    report: Callable[[Record], None],
    stop: Callable[[], bool],
    meanwhile: Callable[[], object] = lambda: None,
) -> list[RunEnergy]:
    """Train on several servers until the last step.

    Args:
        ray: the module, connected to a cluster.
        shared: what to train.
        servers: how many.
        report: called with every record.
        stop: says whether to stop; each server then writes what it has.
        meanwhile: called now and then while they train.

    Returns:
        What each server's meter said, if there were any.

    Raises:
        CleaveError: when training failed.
    """
    cpus = _cpus_of_each(ray, servers)
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    board = ray.remote(num_cpus=0, scheduling_strategy=here)(Board).remote()
    try:
        ray.get(board.stopping.remote())
    except ray.exceptions.RayError as error:
        raise CleaveError(
            "the Ray cluster starts nothing for this machine; start its nodes with "
            "RAY_AUTH_MODE=token, as docs/scale.md says, and with the version of Ray that is here"
        ) from error

    def fit() -> None:
        shutil.rmtree(shared.folder / RAYS_OWN, ignore_errors=True)  # of the try before
        trainer = TorchTrainer(
            _serve_rank,
            train_loop_config={"shared": shared, "board": board},
            torch_config=TorchConfig(backend="gloo", timeout_s=WAIT_S),
            scaling_config=ScalingConfig(
                num_workers=servers,
                resources_per_worker={"CPU": cpus},
                placement_strategy="SPREAD",
            ),
            run_config=RunConfig(
                name=RAYS_OWN,
                storage_path=str(shared.folder),
                # The board counts those in vain; see `fitted`.
                failure_config=FailureConfig(max_failures=-1, controller_failure_limit=0),
                worker_runtime_env={"env_vars": {**MALLOC, "OMP_WAIT_POLICY": "PASSIVE"}},
            ),
        )
        trainer.fit()

    failed: list[BaseException] = []
    stopping, waiting = threading.Event(), threading.Event()

    def fit_in_time() -> None:
        try:
            if not fitted(fit, stopping.is_set, waiting.set):
                ray.get(board.say.remote(NoteRecord("stopped: the servers had no room"), 0))
        except BaseException as error:  # noqa: BLE001 - raised below, in the caller's thread
            failed.append(error)

    bound_tries()
    running = threading.Thread(target=fit_in_time, name="cleave-ray-train", daemon=True)
    running.start()
    told = False
    while running.is_alive():
        running.join(LOOK_S)
        meanwhile()
        for record in ray.get(board.take.remote()):
            told = False
            report(record)
        if waiting.is_set() and not told:
            told = True
            report(NoteRecord(_no_room(ray, servers, cpus)))
        waiting.clear()
        if stop() and not stopping.is_set():
            stopping.set()
            ray.get(board.stop.remote())
    shutil.rmtree(shared.folder / RAYS_OWN, ignore_errors=True)
    for record in ray.get(board.take.remote()):
        report(record)
    if text := ray.get(board.failure.remote()):
        raise CleaveError(text)
    if failed:
        raise CleaveError(f"the servers ended: {str(failed[0]).splitlines()[0]}") from failed[0]
    used: list[RunEnergy] = ray.get(board.energy.remote())
    return used


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
    if ray.get(board.failure.remote()):
        return  # Ray starts all again where one failed and others waited for it
    if ray.get(board.stopping.remote()):
        return  # it was stopped while there was no room, or while all start again
    starts = ray.get(board.started.remote(ranks.rank))
    if starts > MOST_STARTS:
        ray.get(board.fail.remote(f"the servers were lost {MOST_STARTS} times without a step"))
        return

    def report(record: Record) -> None:
        if isinstance(record, NoteRecord) and ranks.count > 1:
            record = NoteRecord(f"server {ranks.rank + 1}: {record.text}")
        # Waited for, so that what a process says before it dies is known.
        ray.get(board.say.remote(record, record.step if isinstance(record, StepRecord) else 0))

    fleet = shared.fleet_of(ranks)
    used = shared.meter_of(fleet) if fleet is not None and shared.meter_of is not None else None
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
        ray.get(board.end.remote())
        if not _all_end(lambda: int(ray.get(board.ended.remote())), ranks.count):
            raise  # Ray ends those that wait for this one
    except Exception as error:
        report(NoteRecord(f"it failed, and all start again: {type(error).__name__}: {error}"))
        raise
    else:
        ray.get(board.end.remote())
    finally:
        if used is not None:
            ray.get(board.used.remote(ranks.rank, used()))
        if fleet is not None:
            fleet.close()


def _no_room(ray: Any, servers: int, cpus: int) -> str:
    cores = sum(int(n["Resources"].get("CPU", 0)) for n in ray.nodes() if n["Alive"])
    return (
        f"Ray has no room for {servers} servers of {cpus} cores each: the cores of its nodes are "
        f"{cores}, some of them in use perhaps; training goes on once there is room (a node joins "
        "with: ray start --address HOST:PORT)"
    )


def _all_end(ended: Callable[[], int], servers: int) -> bool:
    """Wait a little for all servers to end, as this one does; say whether they do."""
    until_s = time.monotonic() + _FAILED_S
    while (count := ended()) < servers and time.monotonic() < until_s:
        time.sleep(LOOK_S)
    return count >= servers


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
