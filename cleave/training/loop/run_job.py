"""Training jobs requested on the command line or by an operator's message."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from cleave.errors import UsageError
from cleave.fleet.fleet import Fleet
from cleave.fleet.local_fallback import AbandonedError
from cleave.training.data.documents import check_source
from cleave.training.loop.job import JobSpec
from cleave.training.loop.ps_memory import check_memory
from cleave.training.loop.records import DoneRecord, Record, StepRecord, to_dict
from cleave.training.loop.run_folder import CHECKPOINTS, RunFolder
from cleave.training.results.compared import check_compared
from cleave.workload.models.build import resolve_model

if TYPE_CHECKING:
    from cleave.training.loop.trainer import TrainContext
    from cleave.training.results.uses import Stop, UseRequest

USE: Final = "use"
"""Key in a request's arguments for using a model instead of training."""


@dataclass(frozen=True, slots=True)
class JobRequest:
    """A request to train a job, or to resume a run folder's job.

    Attributes:
        job: settings of `JobSpec` by name; with `resume`, only those that change.
        resume: an existing run folder, or empty.
        name: the name of a new run folder; empty to derive it from the time.
        restart: with `resume`, whether to start over at step 1 if no checkpoint is intact.
        begin: with `resume`, whether to begin at step 1 if the run never wrote a checkpoint.
        accept_changes: with `resume`, whether to accept changed data, see `trainer.train`.
    """

    job: Mapping[str, Any]
    resume: str = ""
    name: str = ""
    restart: bool = False
    begin: bool = False
    accept_changes: bool = False

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> JobRequest:
        """Parse the arguments of an operator's `submit`.

        Raises:
            UsageError: when they have the wrong form.
        """
        job, resume, name = values.get("job"), values.get("resume", ""), values.get("name", "")
        restart, begin = values.get("restart", False), values.get("begin", False)
        accept = values.get("accept_changes", False)
        texts = isinstance(resume, str) and isinstance(name, str)
        bools = all(isinstance(value, bool) for value in (restart, begin, accept))
        if not isinstance(job, dict) or not texts or not bools:
            raise UsageError(
                "a submitted job is a map with `job`, `resume` or `name` as text, and `restart`, "
                "`begin` and `accept_changes` as true or false"
            )
        if restart and not resume:
            raise UsageError("--restart goes with --resume: which run is to begin again?")
        if accept and not resume:
            raise UsageError("--accept-changes goes with --resume: which run is to go on?")
        return cls(job, resume, name, restart, begin, accept)

    def restarts(self) -> bool:
        """Return whether a resumed run starts over at step 1 if no checkpoint is intact."""
        unwritten = not any((Path(self.resume) / CHECKPOINTS).glob("*"))
        return self.restart or (self.begin and unwritten)

    def spec(self) -> JobSpec:
        """Return the complete job; with `resume`, the folder's saved settings are the defaults.

        Raises:
            UsageError: when the job cannot be run.
        """
        if not self.resume:
            spec = JobSpec.from_dict(self.job)
        else:
            saved = RunFolder(_existing(self.resume)).read_config()
            spec = JobSpec.from_dict({**saved, **self.job})
        spec.check_model(resolve_model(spec.model).spec)
        if self.job.get("against"):  # a resumed run's saved one may be gone
            check_compared(spec)
        return spec


def _existing(path: str) -> Path:
    """Return the path of an existing run folder.

    Raises:
        UsageError: when it is not a run folder.
    """
    folder = Path(path)
    if not (folder / "config.toml").is_file():
        raise UsageError(
            f"{path!r} is no run folder (it has no config.toml); "
            f"give --resume the folder that an earlier run named"
        )
    return folder


def use_model(
    request: UseRequest, fleet: Fleet | None, report: Callable[[Record], None], stop: Stop
) -> None:
    """Load a model and use it, multiplying on the fleet while devices are connected.

    Args:
        request: the model and its use.
        fleet: the fleet; None to use this machine alone.
        report: called with every record.
        stop: returns whether to stop.

    Raises:
        CleaveError: when the model cannot be loaded or used.
    """
    from cleave.training.tiles.offload import restore, send

    request.check()
    trained = request.opened()
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
    """Return the model use that an operator requests.

    Raises:
        UsageError: when it has the wrong form.
    """
    from cleave.training.results.uses import UseRequest

    return UseRequest.from_dict(arguments[USE])


class Meter(Protocol):
    """Measures a job's energy from its creation."""

    def record(self) -> dict[str, Any]:
        """Return the run's energy record up to now."""
        ...

    def close(self) -> None:
        """Stop measuring."""
        ...


@dataclass(frozen=True, slots=True)
class JobRunner:
    """Trains jobs, each in its own run folder below `runs`.

    Attributes:
        runs: the folder for new run folders.
        meter: returns a new meter for a starting job; None to record no energy.
        servers: number of servers that train each job.
    """

    runs: Path
    meter: Callable[[], Meter] | None = None
    servers: int = 1

    def check(self, arguments: Mapping[str, Any]) -> tuple[str, int]:
        """Return the job's model and steps; 0 steps for a model's use.

        Raises:
            UsageError: when the job cannot run, its data does not exist, or its name is taken.
        """
        if USE in arguments:
            use = _use(arguments)
            use.check()
            return use.model, 0
        request = JobRequest.from_dict(arguments)
        spec = request.spec()
        check_memory(spec, self.servers)
        if request.name and not request.resume:
            RunFolder.check_name(self.runs, request.name)
        for source in (spec.data, spec.eval_data):
            if source:  # report a typing error now, not when the job starts
                check_source(source)
        return spec.model, spec.steps

    def check_pause(self, arguments: Mapping[str, Any]) -> None:
        """Refuse to pause a job without checkpoints; see `Runner` of the server."""
        if USE in arguments:
            raise UsageError("a model's use cannot be paused; stop it, and ask again later")
        if not JobRequest.from_dict(arguments).spec().interval:
            raise UsageError(
                "the job keeps no checkpoints (--checkpoint-every 0), so it could not go on where "
                "it was; stop it, or let it end"
            )

    def run(
        self,
        arguments: Mapping[str, Any],
        fleet: Fleet | None,
        report: Callable[[dict[str, Any]], None],
        stop: Callable[[], bool],
    ) -> None:
        """Train or use a model; report records as plain dicts; see `Runner.run` of the server."""
        if USE in arguments:
            use_model(_use(arguments), fleet, lambda record: report(to_dict(record)), stop)
            return
        from cleave.training.loop.trainer import (
            TrainContext,  # imports torch, which an idle server does not need
        )

        request = JobRequest.from_dict(arguments)
        done = 0
        meter = self.meter() if self.meter is not None else None

        def record(record: Record) -> None:
            nonlocal done
            if isinstance(record, StepRecord):
                done = record.step
            if meter is not None and isinstance(record, DoneRecord):  # `done` stays last
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
        """Train in a given context, in a new run folder or the resumed one."""
        from cleave.training.loop.trainer import prepare, train

        spec = request.spec()
        check_memory(spec, self.servers)
        if request.resume:
            folder = RunFolder(Path(request.resume))
            train(
                spec,
                folder,
                context,
                resume=True,
                restart=request.restarts(),
                accept_changes=request.accept_changes,
            )
            return
        dataset = prepare(spec, context)  # a refused job leaves no folder
        patience = context.patience(lambda: 0)
        folder = patience.insist(lambda: RunFolder.create(self.runs, request.name or None))
        try:
            train(spec, folder, context, dataset=dataset)
        finally:
            folder.remove_if_empty()
