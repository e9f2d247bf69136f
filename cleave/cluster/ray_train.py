"""Train one model on several servers. Each server is a Ray Train worker.

When a worker is lost, Ray restarts all workers, and training resumes from the newest checkpoint in
the run folder. Through a `Board` actor, the workers send training records to the process that
started the training, and receive its stop requests.
"""

from __future__ import annotations

import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cleave.cluster.endpoint_calls import EndpointLostError
from cleave.cluster.room import (
    TRY_S,
    Board,
    Ending,
    cores_of_each,
    cores_of_nodes,
    ending,
    fitted,
    lost_servers,
    no_room,
)
from cleave.energy.run_energy import RunEnergy
from cleave.errors import CleaveError
from cleave.fleet.fleet import Fleet
from cleave.training.loop.job import JobSpec
from cleave.training.loop.ps_memory import check_memory
from cleave.training.loop.records import NoteRecord, Record, ServersRecord, StepRecord
from cleave.training.loop.run_folder import RunFolder
from cleave.training.loop.start import JobRequest, JobRunner
from cleave.training.servers.ranks import WAIT_S, Ranks

if TYPE_CHECKING:
    from cleave.training.loop.context import TrainContext


LOOK_S: Final = 0.2  # time between two polls of the board for new training records

MOST_STARTS: Final = 3
"""Maximum number of starts of a server without a new step. The next start ends the training."""

RAYS_OWN: Final = "ray"
"""Name of the subfolder of the run folder in which Ray Train stores its data during training."""

_FAILED_S: Final = 5.0
MALLOC: Final = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
"""Environment variables that make glibc return a server's unused memory to the operating system."""

FleetOf = Callable[[Ranks], Fleet | None]
"""Function that returns the fleet for the server `ranks.rank`; None to train in plain PyTorch.

Each server calls the function in its worker process.
"""

MeterOf = Callable[[Fleet], Callable[[], RunEnergy]]
"""Function that starts to meter a fleet's energy, and returns a function that reads the meter."""


@dataclass(frozen=True, slots=True)
class SharedJob:
    """A training job and its options. Each server receives them when it starts."""

    job: JobSpec
    folder: Path  # run folder, the same path on all servers
    at: Path  # working folder of the servers, for relative paths in `job`
    resume: bool
    restart: bool
    fleet_of: FleetOf
    meter_of: MeterOf | None = None  # None if other code measures the energy
    accept_changes: bool = False


def train_together(
    ray: Any,
    shared: SharedJob,
    servers: int,
    report: Callable[[Record], None],
    stop: Callable[[], bool],
    meanwhile: Callable[[], object] = lambda: None,
) -> list[RunEnergy]:
    """Train a model on several servers. Return once the training has finished or been stopped.

    Args:
        ray: the `ray` module, connected to a cluster.
        stop: returns whether to stop the training early, with a checkpoint.
        meanwhile: called every `LOOK_S` seconds during training.

    Returns:
        The energy that each server's devices used; empty if `shared.meter_of` is None.

    Raises:
        CleaveError: if training fails.
    """
    return _Training(ray, shared, servers, report, stop).train(meanwhile)


class _Training:
    """The state of one call to `train_together`, including all attempts to start the servers."""

    def __init__(
        self,
        ray: Any,
        shared: SharedJob,
        servers: int,
        report: Callable[[Record], None],
        stop: Callable[[], bool],
    ) -> None:
        self._ray, self._shared, self._servers = ray, shared, servers
        self._report, self._stop = report, stop
        self._board = _board_of(ray)
        self._rays_own = shared.folder / RAYS_OWN
        self._cores = 1
        self._began = False
        self._waits = False
        self._stopping = threading.Event()
        self._said: queue.SimpleQueue[Record] = queue.SimpleQueue()  # from Ray Train's thread
        self._failed: BaseException | None = None

    def train(self, meanwhile: Callable[[], object]) -> list[RunEnergy]:
        os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", TRY_S)
        running = threading.Thread(target=self._fit_in_time, name="cleave-ray-train", daemon=True)
        running.start()
        try:
            while running.is_alive():
                running.join(LOOK_S)
                meanwhile()
                self._pass_on()
                if self._stop() and not self._stopping.is_set():
                    self._stopping.set()
                    self._ray.get(self._board.stop.remote())
            shutil.rmtree(self._rays_own, ignore_errors=True)
            self._pass_on()
            failure = self._ray.get(self._board.failure.remote())
            used: list[RunEnergy] = self._ray.get(self._board.energy.remote())
        except self._ray.exceptions.RayError as lost:  # the servers then exit by themselves
            why = f"the process that collects the servers' reports was lost: {ending(str(lost))}"
            raise CleaveError(why) from lost
        if failure:
            raise CleaveError(failure)
        if self._failed is not None:
            raise CleaveError(f"the servers ended: {ending(str(self._failed))}") from self._failed
        return used

    def _pass_on(self) -> None:
        """Report new records from the servers, and the start and end of a wait for free cores."""
        for record in self._ray.get(self._board.take.remote()):
            self._began = True
            if self._waits:
                self._waits = False
                self._report(
                    ServersRecord("running", "the cluster has enough free cores for the servers")
                )
            self._report(record)
        while not self._said.empty():
            record = self._said.get()
            if isinstance(record, ServersRecord):
                waited, self._waits = self._waits, record.state == "waiting"
                if waited and self._waits:
                    continue  # already reported
            self._report(record)

    # --- in the thread that runs Ray Train ---

    def _fit_in_time(self) -> None:
        try:
            if not fitted(self._fit, self._stopping.is_set, self._wait, self._start_again):
                self._said.put(NoteRecord("stopped: the servers had not started"))
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            self._failed = error

    def _wait(self) -> None:
        nodes = cores_of_nodes(self._ray)
        self._said.put(ServersRecord("waiting", no_room(nodes, self._servers, self._cores)))

    def _start_again(self, error: BaseException) -> None:
        why = ending(str(error)).why
        text = f"the servers did not start, and are restarted: {why}"
        self._said.put(ServersRecord("running", text))

    def _fit(self) -> None:
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer

        shutil.rmtree(self._rays_own, ignore_errors=True)  # from the previous attempt
        if not self._began:  # restarted servers keep their number of cores
            self._cores = cores_of_each(cores_of_nodes(self._ray), self._servers)
        trainer = TorchTrainer(
            _serve_rank,
            train_loop_config={"shared": self._shared, "board": self._board},
            torch_config=TorchConfig(backend="gloo", timeout_s=WAIT_S),
            scaling_config=ScalingConfig(
                num_workers=self._servers,
                resources_per_worker={"CPU": self._cores},
                placement_strategy="SPREAD",
            ),
            run_config=RunConfig(
                name=RAYS_OWN,
                storage_path=str(self._shared.folder),
                # The board limits failures without progress, and `fitted` limits failed starts.
                failure_config=FailureConfig(max_failures=-1, controller_failure_limit=0),
                worker_runtime_env={"env_vars": {**MALLOC, "OMP_WAIT_POLICY": "PASSIVE"}},
                callbacks=[_telling_losses(self._board)],
            ),
        )
        trainer.fit()


def _board_of(ray: Any) -> Any:
    """Start a `Board` actor on this node. Raise CleaveError if the actor does not start."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    board = ray.remote(num_cpus=0, scheduling_strategy=here)(Board).remote()
    try:
        ray.get(board.stopping.remote())
    except ray.exceptions.RayError as error:
        raise CleaveError(
            "the Ray cluster does not start processes for this machine; start its nodes with "
            "RAY_AUTH_MODE=token (see docs/scale.md) and with this machine's version of Ray"
        ) from error
    return board


def _telling_losses(board: Any) -> Any:
    """Return a Ray Train callback that tells the board why server processes were lost."""
    from ray.train import UserCallback

    class TellingLosses(UserCallback):  # type: ignore[misc,unused-ignore]
        def after_exception(
            self, run_context: Any, worker_exceptions: dict[int, Exception]
        ) -> None:
            """Report to the board why servers were lost. Ray Train calls this when workers fail."""
            for rank, why in lost_servers(worker_exceptions).items():
                board.lost.remote(rank, why)

    return TellingLosses()


def _serve_rank(config: dict[str, Any]) -> None:
    """Run one server's part of the training, in a worker process of Ray Train."""
    import ray

    from cleave.training.loop.context import TrainContext
    from cleave.training.loop.start import train
    from cleave.training.servers.ranks import LostServerError, TorchRanks

    shared: SharedJob = config["shared"]
    board = config["board"]
    if shared.at.is_dir():
        os.chdir(shared.at)  # Ray gives each worker its own working folder
    ranks = TorchRanks()
    try:
        if ray.get(board.failure.remote()):
            return  # Ray restarts all servers if one fails while others wait
        if ray.get(board.stopping.remote()):
            return  # the user stopped the training before this start
        starts = ray.get(board.started.remote(ranks.rank))
    except ray.exceptions.RayActorError:
        return  # the process that started the training has exited
    if starts > MOST_STARTS:
        ray.get(board.give_up.remote(MOST_STARTS))
        return

    def report(record: Record) -> None:
        if isinstance(record, NoteRecord) and ranks.count > 1:
            record = NoteRecord(f"server {ranks.rank + 1}: {record.text}")
        # Wait for the call, so that no record is lost if this process exits soon.
        ray.get(board.say.remote(record, record.step if isinstance(record, StepRecord) else 0))

    with _telling(board, ranks.rank):
        fleet = shared.fleet_of(ranks)
    used = shared.meter_of(fleet) if fleet is not None and shared.meter_of is not None else None
    stop = _Stop(lambda: bool(ray.get(board.stopping.remote())))
    context = TrainContext(fleet, report, stop, ranks=ranks)
    again = starts > 1
    try:
        with _telling(board, ranks.rank):
            train(
                shared.job,
                RunFolder(shared.folder),
                context,
                resume=shared.resume or again,
                restart=shared.restart or again,
                accept_changes=shared.accept_changes,
            )
    except LostServerError as error:
        report(NoteRecord(str(error)))
        raise  # Ray restarts all servers
    except CleaveError as error:
        ray.get(board.fail.remote(str(error)))
        ray.get(board.end.remote())
        if not _all_end(lambda: int(ray.get(board.ended.remote())), ranks.count):
            raise  # Ray stops the servers that wait for this one
    else:
        ray.get(board.end.remote())
    finally:
        if used is not None:
            ray.get(board.used.remote(ranks.rank, used()))
        if fleet is not None:
            fleet.close()


@contextmanager
def _telling(board: Any, rank: int) -> Iterator[None]:
    """Report an unexpected error in the `with` block to the board, then re-raise the error."""
    import ray

    try:
        yield
    except CleaveError:
        raise
    except Exception as error:
        kind = "" if isinstance(error, EndpointLostError) else f"{type(error).__name__}: "
        ray.get(board.lost.remote(rank, Ending(f"{kind}{error}")))
        raise


def _all_end(ended: Callable[[], int], servers: int) -> bool:
    """Wait up to `_FAILED_S` seconds for all servers to finish. Return whether they have."""
    until_s = time.monotonic() + _FAILED_S
    while (count := ended()) < servers and time.monotonic() < until_s:
        time.sleep(LOOK_S)
    return count >= servers


class _Stop:
    """A stop condition that queries the board at most once per `LOOK_S` seconds."""

    def __init__(self, ask: Callable[[], bool]) -> None:
        self._ask = ask
        self._asked_s = -LOOK_S
        self._stops = False

    def __call__(self) -> bool:
        now_s = time.monotonic()
        if not self._stops and now_s - self._asked_s >= LOOK_S:
            self._stops, self._asked_s = self._ask(), now_s
        return self._stops


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRunner(JobRunner):
    """A job runner that trains on several servers. Inference uses the first server's devices."""

    ray: Any
    fleet_of: FleetOf

    def train(self, request: JobRequest, context: TrainContext) -> None:
        """Train a job on all servers, in a new run folder or in the folder of the resumed run."""
        from cleave.training.loop.context import TrainContext
        from cleave.training.loop.inputs import prepare

        spec = request.spec()
        request.check_resumed(spec)
        check_memory(spec, self.servers)
        if request.resume:
            folder = RunFolder(Path(request.resume).resolve())
        else:
            prepare(spec, TrainContext(None, lambda record: None))  # rejected jobs leave no folder
            patience = context.patience(lambda: 0)
            folder = patience.insist(lambda: RunFolder.create(self.runs, request.name or None))
        shared = SharedJob(
            spec,
            folder.path,
            Path.cwd(),
            bool(request.resume),
            bool(request.resume) and request.restarts(),
            self.fleet_of,
            accept_changes=request.accept_changes,
        )
        try:
            with folder.lock():  # fail early if locked; the first server locks the folder later
                pass
            train_together(self.ray, shared, self.servers, context.report, context.stop)
        finally:
            folder.remove_if_empty()
