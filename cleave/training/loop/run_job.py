"""Execute requests to train or use a model, from a command or an operator's message."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from cleave.errors import UsageError
from cleave.fleet.fleet import Fleet
from cleave.fleet.local_fallback import AbandonedError
from cleave.training.data.documents import check_source
from cleave.training.loop.job import JobSpec
from cleave.training.loop.losses import check_compared
from cleave.training.loop.ps_memory import check_memory
from cleave.training.loop.records import DoneRecord, Record, StepRecord, to_dict
from cleave.training.loop.run_folder import CHECKPOINTS, LAYERS, RunFolder, resumable_step
from cleave.workload.models.build import resolve_model

if TYPE_CHECKING:
    from cleave.training.loop.context import TrainContext
    from cleave.training.results.uses import Stop, UseRequest

USE: Final = "use"  # key of the `UseRequest` in the arguments of a request to use a model


@dataclass(frozen=True, slots=True)
class JobRequest:
    """A request to train a job in a new run, or to resume a run.

    Attributes:
        job: settings of `JobSpec` by name; with `resume`, only the settings that change.
        resume: path of the run folder to resume; empty for a new run.
        name: name of the new run folder; empty to name the folder by the local time.
        restart: with `resume`, whether to start over at step 1 if no checkpoint is intact.
        accept_changes: with `resume`, whether to continue although inputs have changed; see
            `trainer.train`.
        begin: with `resume`, whether to start at step 1 if the run has no checkpoint.
    """

    job: dict[str, Any]
    resume: str = ""
    name: str = ""
    restart: bool = False
    begin: bool = False
    accept_changes: bool = False

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> JobRequest:
        """Parse the arguments of an operator's `submit` message, or raise UsageError."""
        try:
            request = msgspec.convert(values, cls)
        except msgspec.ValidationError:
            raise UsageError(
                "a submitted job is a map with `job`, `resume` or `name` as text, and `restart`, "
                "`begin` and `accept_changes` as true or false"
            ) from None
        if request.restart and not request.resume:
            raise UsageError("--restart needs --resume RUN: which run should start again?")
        if request.name and request.resume:
            raise UsageError(
                f"--name is {request.name!r}, and --resume continues {request.resume!r} in its own "
                f"folder; leave out --name"
            )
        if request.accept_changes and not request.resume:
            raise UsageError("--accept-changes needs --resume RUN: which run should continue?")
        return request

    def restarts(self) -> bool:
        """Return True if the resumed run may start over at step 1 when no checkpoint is intact."""
        run = Path(self.resume)
        unwritten = not any((*run.glob(f"{CHECKPOINTS}/*"), *run.glob(f"{LAYERS}/*")))
        return self.restart or (self.begin and unwritten)

    def check_resumed(self, spec: JobSpec) -> None:
        """Raise CleaveError if the run to resume has no step left, or no checkpoint.

        This check takes no time, because it reads no checkpoint. If the last checkpoint of a
        finished run is damaged, `restart` is needed to resume from an earlier one.
        """
        if not self.resume or self.restarts():
            return
        run = RunFolder(Path(self.resume))
        done = resumable_step(run.path)
        if done is None:
            from cleave.training.loop.inputs import check_start  # imports torch

            check_start(spec, run, ())
        elif done >= spec.steps:
            run.check_unfinished(spec.steps)

    def spec(self) -> JobSpec:
        """Return the requested job. With `resume`, read omitted settings from the run folder.

        Raises:
            UsageError: if a setting is invalid, or `resume` is not a run folder.
        """
        saved: dict[str, Any] = {}
        if self.resume:
            saved = RunFolder(Path(self.resume)).read_config()
        spec = JobSpec.from_dict({**saved, **self.job})
        spec.check_model(resolve_model(spec.model).spec)
        if self.job.get("against"):  # not a saved `against`, whose folder may no longer exist
            check_compared(spec)
        return spec


def use_model(
    request: UseRequest, fleet: Fleet | None, report: Callable[[Record], None], stop: Stop
) -> None:
    """Load the requested model and use it as requested, for example to generate text.

    While devices are connected, the fleet computes the model's matrix multiplications. Otherwise,
    this machine computes them.
    """
    from cleave.training.results.trained import open_trained
    from cleave.training.tiles.offload import restore, send

    request.check()
    trained = open_trained(Path(request.model), request.step)
    with suppress(AbandonedError):
        if fleet is None:
            request.use.run(trained, report, stop)
            return
        send(trained.model, fleet, fallback="local")
        try:
            request.use.run(trained, report, stop)
        finally:
            restore(trained.model)


def _use(arguments: Mapping[str, Any]) -> UseRequest:
    from cleave.training.results.uses import UseRequest

    return UseRequest.from_dict(arguments[USE])


class Meter(Protocol):
    """Measures the energy that a job has consumed since this object was created."""

    def record(self) -> dict[str, Any]: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class JobRunner:
    """Executes requests to train a job or to use a model.

    Attributes:
        runs: parent folder of new run folders.
        meter: called at the start of a job to create its energy meter; None to record no energy.
        servers: number of servers that train each job together.
    """

    runs: Path
    meter: Callable[[], Meter] | None = None
    servers: int = 1

    def check(self, arguments: Mapping[str, Any]) -> tuple[str, int]:
        """Check a request. Return its model name and its number of steps (0 without training).

        Raises:
            UsageError: if a setting is invalid, data is missing, or the run's name is taken.
        """
        if USE in arguments:
            use = _use(arguments)
            use.check()
            return use.model, 0
        request = JobRequest.from_dict(arguments)
        spec = request.spec()
        request.check_resumed(spec)
        check_memory(spec, self.servers)
        if request.name and not request.resume:
            RunFolder.check_name(self.runs, request.name)
        for source in (spec.data, spec.eval_data):
            if source:  # report a wrong path now instead of when the job starts
                check_source(source)
        return spec.model, spec.steps

    def resumes_after(self, run_folder: str) -> int:
        """Return the last step in a run folder that is not repeated; 0 without checkpoints."""
        return resumable_step(Path(run_folder)) or 0

    def check_pause(self, arguments: Mapping[str, Any]) -> None:
        """Raise UsageError if a request only uses a model, or its job writes no checkpoints."""
        if USE in arguments:
            raise UsageError("a model's use cannot be paused; stop it, and ask again later")
        if not JobRequest.from_dict(arguments).spec().interval:
            raise UsageError(
                "the job keeps no checkpoints (--checkpoint-every 0), so it could not continue "
                "where it was; stop it, or let it end"
            )

    def run(
        self,
        arguments: Mapping[str, Any],
        fleet: Fleet | None,
        report: Callable[[dict[str, Any]], None],
        stop: Callable[[], bool],
    ) -> None:
        """Train or use a model.

        Args:
            arguments: arguments of an operator's `submit` message.
            fleet: the fleet that computes; None to compute on this machine alone.
            report: called with every record as a JSON object.
            stop: returns True if the work should end early.
        """
        if USE in arguments:
            use_model(_use(arguments), fleet, lambda record: report(to_dict(record)), stop)
            return
        # This imports torch, which an idle server does not need.
        from cleave.training.loop.context import TrainContext

        request = JobRequest.from_dict(arguments)
        done = 0
        meter = self.meter() if self.meter is not None else None

        def record(record: Record) -> None:
            nonlocal done
            if isinstance(record, StepRecord):
                done = record.step
            # `done` must be the last record of a run, so append the energy record before it.
            if meter is not None and isinstance(record, DoneRecord):
                energy, folder = meter.record(), RunFolder(Path(record.run_folder))
                context.patience(lambda: done).insist(lambda: folder.append(energy))
                report(energy)
            report(to_dict(record))

        context = TrainContext(fleet, record, stop)
        try:
            self.train(request, context)
        finally:
            if meter is not None:
                meter.close()

    def train(self, request: JobRequest, context: TrainContext) -> None:
        """Train the requested job in a new run folder, or resume the requested run."""
        from cleave.training.loop.inputs import prepare
        from cleave.training.loop.start import train

        spec = request.spec()
        check_memory(spec, self.servers, alone=context.fleet is None)
        if request.resume:
            restart, accept = request.restarts(), request.accept_changes
            run = RunFolder(Path(request.resume))
            train(spec, run, context, resume=True, restart=restart, accept_changes=accept)
            return
        # Prepare before the folder is created, so that an invalid job leaves no folder.
        dataset = prepare(spec, context)
        patience = context.patience(lambda: 0)
        folder = patience.insist(lambda: RunFolder.create(self.runs, request.name or None))
        try:
            train(spec, folder, context, dataset=dataset)
        finally:
            folder.remove_if_empty()
