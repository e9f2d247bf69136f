"""Starts or resumes a run: locks its folder, builds the model, and loads a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from torch import nn

from cleave.errors import CleaveError
from cleave.graphs.calls import decoder_layers
from cleave.planner.plan import StateMode
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
from cleave.training.loop.ps_memory import memory_mode
from cleave.training.loop.records import (
    DoneRecord,
)
from cleave.training.loop.resident_files import load_resident
from cleave.training.loop.run_folder import (
    CHECKPOINTS,
    RESIDENT,
    RunFolder,
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
from cleave.workload.models.build import load_model

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
                    context.note(f"{run.path} is not locked ({why}); use it once")
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
        context.note(f"passed over: {fault} It is kept as {aside}.")
    spec = dataset.source.spec
    weights = "" if dataset.source.folder else ", with new random weights"
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
        context.note(f"training {trained:,} parameters of adapters")
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
            context.note("no checkpoint found: starting from the beginning")
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

    Return the files, which also take the layers' optimizer state; None without them.
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
