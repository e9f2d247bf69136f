"""Job runner of a server that trains each job together with other servers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cleave.cluster.ray_train import FleetOf, SharedJob, train_together
from cleave.training.loop.ps_memory import check_memory
from cleave.training.loop.run_folder import RunFolder
from cleave.training.loop.run_job import JobRequest, JobRunner

if TYPE_CHECKING:
    from cleave.training.loop.trainer import TrainContext


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRunner(JobRunner):
    """A job runner that trains each job on several servers.

    Jobs that only use a trained model run on the first server's devices.

    Attributes:
        ray: the `ray` module, connected to a cluster.
        fleet_of: returns a server's fleet; called in the server's worker process.
    """

    ray: Any
    fleet_of: FleetOf

    def train(self, request: JobRequest, context: TrainContext) -> None:
        """Train a job on all servers, in a new run folder or in the folder of the resumed run."""
        from cleave.training.loop.trainer import TrainContext, prepare

        spec = request.spec()
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
