"""Train or use a model on request: lock the run's folder, build the model, load a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

import msgspec
from torch import nn

from cleave.errors import CleaveError, UsageError
from cleave.fleet.fleet import Fleet
from cleave.fleet.local_fallback import AbandonedError
from cleave.graphs.calls import decoder_layers
from cleave.planner.plan import StateMode
from cleave.training.data.documents import check_source
from cleave.training.loop.checkpoint import (
    DamagedCheckpointError,
    LoadedCheckpoint,
    load_latest,
    set_aside,
)
from cleave.training.loop.context import TrainContext
from cleave.training.loop.inputs import (
    Dataset,
    changes_since,
    check_alike,
    check_start,
    losses_comparable,
    prepare,
)
from cleave.training.loop.job import JobSpec, MemoryMode
from cleave.training.loop.losses import check_compared
from cleave.training.loop.ps_memory import check_memory, memory_mode
from cleave.training.loop.records import (
    DoneRecord,
    Record,
    StepRecord,
    to_dict,
)
from cleave.training.loop.resident_files import load_resident
from cleave.training.loop.run_folder import (
    CHECKPOINTS,
    LAYERS,
    RESIDENT,
    RunFolder,
    resumable_step,
)
from cleave.training.loop.state_files import StateFiles
from cleave.training.loop.trainer import Trainer
from cleave.training.lora.adapters import (
    load_adapted,
)
from cleave.training.lora.quantized import QuantizedLinear
from cleave.training.lora.spec import LoraSpec
from cleave.training.results.export import keep_description
from cleave.training.tiles.offload import restore
from cleave.workload.build import load_model, resolve_model

if TYPE_CHECKING:
    from cleave.training.loop.context import TrainContext
    from cleave.training.results.uses import Stop, UseRequest

_LEAVES_S: Final = 60.0  # maximum wait for the processes of an earlier start to exit


def train(
    job: JobSpec,
    run: RunFolder,
    context: TrainContext,
    *,
    resume: bool = False,
    restart: bool = False,
    accept_changes: bool = False,
    dataset: Dataset | None = None,
) -> DoneRecord:
    """Train a job's model while holding the lock of its run folder.

    Args:
        run: the folder for configuration, metrics, checkpoints and the loss plot.
        context: the fleet and the callbacks.
        resume: whether to resume from the newest intact checkpoint in `run`.
        restart: with `resume`, whether to start over at step 1 if no checkpoint is intact.
        accept_changes: with `resume`, whether to continue although data, tokenizer, chat template,
            model configuration or frozen weights have changed.
        dataset: the result of `prepare` for this job; None to call `prepare`.

    Returns:
        The last record of the run.

    Raises:
        CleaveError: if training fails for a reason that the user can resolve.
    """
    with _locked(run, context):
        start = _Start()
        if resume:
            start = _Start.of(run, restart=restart)
            if context.ranks.count == 1:  # encoding the data may take long
                start.check(job, run)
        dataset = dataset or prepare(job, context)
        return _train(job, run, context, dataset, start, accept_changes)


@dataclass(frozen=True, slots=True)
class _Start:
    """Where a run starts.

    Attributes:
        resumes: whether the run is resumed.
        restart: whether a resumed run may start over at step 1.
        checkpoint: the newest intact checkpoint; None to start at step 1.
        resident: the newest intact checkpoint of the state that devices hold; None without one.
        damaged: faults of damaged checkpoints.
    """

    resumes: bool = False
    restart: bool = False
    checkpoint: LoadedCheckpoint | None = None
    resident: LoadedCheckpoint | None = None
    damaged: Sequence[DamagedCheckpointError] = ()

    @classmethod
    def of(cls, run: RunFolder, *, restart: bool) -> Self:
        """Return where a resumed run starts."""
        damaged: list[DamagedCheckpointError] = []
        checkpoint = load_latest(run.path / CHECKPOINTS, damaged.append)
        resident = load_resident(run.path, damaged.append)
        if resident and (checkpoint is None or resident.step > checkpoint.step):
            checkpoint = resident
        return cls(True, restart, checkpoint, resident, damaged)

    def check(self, job: JobSpec, run: RunFolder) -> None:
        """Raise CleaveError if a resumed run has no step left, or must not start at step 1."""
        if self.checkpoint is not None:
            if self.checkpoint.step >= job.steps:
                run.check_unfinished(job.steps)
        elif self.resumes and not self.restart:
            check_start(job, run, self.damaged)


@contextmanager
def _locked(run: RunFolder, context: TrainContext) -> Iterator[None]:
    """Lock a run folder on rank 0. If the lock fails, raise CleaveError on every server."""
    ranks, refused = context.ranks, ""
    wait_s = _LEAVES_S if ranks.count > 1 else 0.0
    with ExitStack() as held:
        if not ranks.rank:
            patience = context.patience(lambda: 0)
            try:
                why = patience.insist(lambda: held.enter_context(run.lock(wait_s)))
            except CleaveError as error:
                refused = str(error)
            else:
                if why:
                    context.note(f"{run.path} cannot be locked ({why}); use it in one process only")
        if refused := ranks.agree(refused)[0]:
            raise CleaveError(refused)
        yield


def _train(
    job: JobSpec,
    run: RunFolder,
    context: TrainContext,
    dataset: Dataset,
    start: _Start,
    accept_changes: bool,
) -> DoneRecord:
    checkpoint, resume = start.checkpoint, start.resumes
    check_alike(context.ranks, checkpoint, dataset)
    start.check(job, run)
    changed: list[str] = []
    if checkpoint is not None:
        changed = changes_since(checkpoint, job, dataset, context, accepted=accept_changes)
    for fault in start.damaged if not context.ranks.rank else ():
        aside = set_aside(fault.path).name
        context.note(f"skipped a checkpoint: {fault} (it is kept as {aside})")
    spec = dataset.source.spec
    weights = "" if dataset.source.folder or checkpoint else ", with new random weights"
    context.note(f"building {spec.name} ({spec.parameters / 1e6:.1f}M parameters){weights}")
    files: StateFiles | None = None

    def place(model: nn.Module) -> None:
        nonlocal files
        files = _place_layers(job, model, run, context)

    if job.lora:
        adapted, spec = load_adapted(dataset.source, LoraSpec.of(job.lora), seed=job.seed)
        model = adapted.get_base_model()
        place(model)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        context.note(f"training {trained:,} adapter parameters")
        coded = [m for m in model.modules() if isinstance(m, QuantizedLinear)]
        if coded:
            elements = sum(m.in_features * m.out_features for m in coded)
            frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad) + elements
            width = f"in {int(coded[0].bits)} bits"
            context.note(f"{elements:,} of {frozen:,} frozen weights are {width}")
    else:
        model, spec = load_model(dataset.source, seed=job.seed, place=place)
    # Broadcast the weights: with different PyTorch versions, initial weights could differ.
    context.ranks.spread([p.detach() for p in model.parameters()], [0] * len([*model.parameters()]))
    base = checkpoint.step if checkpoint else None
    trainer = Trainer(job, spec, model, dataset, run, context, base, files)
    try:
        if checkpoint is not None:
            changed += trainer.restore(checkpoint, changed, accept_changes=accept_changes)
            trainer.in_checkpoints = checkpoint is not start.resident
            context.note(f"resuming after step {checkpoint.step}")
        elif resume:
            context.note("no checkpoint found; starting from the beginning")
        if resume:
            comparable = losses_comparable(checkpoint, job, changed)
            trainer.wind_back(comparable=comparable, log=checkpoint is not None and not changed)
        trainer.write(lambda: run.write_config(job.to_dict(), job.comments()))
        anew = bool(changed) or (resume and not base)
        described = run.path, model, dataset.source, dataset.tokenizer
        trainer.write(lambda: keep_description(*described, anew=anew))
        return trainer.run()
    finally:
        trainer.close()
        restore(model)


def _place_layers(
    job: JobSpec, model: nn.Module, run: RunFolder, context: TrainContext
) -> StateFiles | None:
    """Move layers that devices will train to files, if `--state-dir` is given or memory is short.

    Return the files, which will also hold the layers' optimizer state; None without files.
    """
    if context.fleet is None or job.state == StateMode.SERVER.value:
        return None
    if job.state_dir:
        folder = Path(job.state_dir)
    elif memory_mode(job, model, context.ranks.count) is MemoryMode.PLAIN:
        return None
    else:
        folder = run.path / RESIDENT
    files = StateFiles(folder, context.patience(lambda: 0))
    if job.state == StateMode.DEVICES.value:
        files.move_parameters(decoder_layers(model))
    return files


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
            `train`.
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
                "a submitted job must be a map with `job` as a map, `resume` and `name` as text, "
                "and `restart`, `begin` and `accept_changes` as true or false"
            ) from None
        if request.restart and not request.resume:
            raise UsageError("--restart needs --resume RUN, the run to start over")
        if request.name and request.resume:
            raise UsageError(
                f"--name is {request.name!r}, but --resume continues {request.resume!r} in its own "
                "folder; omit --name"
            )
        if request.accept_changes and not request.resume:
            raise UsageError("--accept-changes needs --resume RUN, the run to continue")
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

    def resumes_after(self, run_folder: str) -> tuple[int, int]:
        """Return a run's last step that is not repeated, and its last step. 0 for none."""
        return resumable_step(Path(run_folder)) or 0, RunFolder(Path(run_folder)).last_step

    def check_pause(self, arguments: Mapping[str, Any]) -> None:
        """Raise UsageError if a request only uses a model, or its job writes no checkpoints."""
        if USE in arguments:
            raise UsageError(
                "a job that uses a trained model cannot be paused; stop the job, and submit it "
                "again later"
            )
        if not JobRequest.from_dict(arguments).spec().interval:
            raise UsageError(
                "the job writes no checkpoints (--checkpoint-every 0), so it could not continue "
                "after a pause; stop it, or let it finish"
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
