"""Select the PS's memory mode for training a job, and refuse jobs that cannot fit."""

from __future__ import annotations

from bisect import bisect_right
from functools import partial
from typing import TYPE_CHECKING, Final

from cleave.errors import UsageError
from cleave.machine.sensors import total_memory_bytes
from cleave.planner.plan import Method, StateMode
from cleave.training.loop.job import JobSpec, MemoryMode, OptimizerKind, Precision
from cleave.training.lora.spec import ALL_LINEAR, LoraSpec
from cleave.workload.build import resolve_model
from cleave.workload.registry import ModelSpec
from cleave.workload.stages import Adapters, Bits, StageSizes, kept_elements, recomputed_elements

if TYPE_CHECKING:
    from torch import nn

# Bytes per parameter.
_WEIGHT_BYTES: Final = 4
_GRADIENT_BYTES: Final = 4
_STATE_BYTES: Final = 8  # two moments of AdamW
_TOKEN_BYTES: Final = 16  # a token and its label, which are read for the whole step
_LOGIT_BYTES: Final = 8  # a logit and its gradient, in fp32
_HERE: Final = (Method.TILES.value, Method.LOCAL.value)
# Maximum fraction of memory for weights, gradients and optimizer state. Activations need the rest.
_MOST: Final = {MemoryMode.PLAIN: 0.5, MemoryMode.RECOMPUTE: 0.75}


def memory_mode(job: JobSpec, model: nn.Module, servers: int = 1) -> MemoryMode:
    """Return the requested memory mode; for `AUTO`, the mode selected for this machine.

    The selected mode is the fastest mode that is estimated to fit in memory, or else the mode that
    needs the least memory. The estimate assumes that several servers shard the optimizer state and,
    without gradient accumulation, the gradients. Raise UsageError if `check_memory` does.
    """
    check_memory(job, servers)
    asked = MemoryMode(job.memory)
    if asked is not MemoryMode.AUTO:
        return asked
    least = MemoryMode.LEAN if servers == 1 else MemoryMode.RECOMPUTE
    if servers > 1 and job.method in _HERE and not job.quantized:
        least = MemoryMode.SHARDED
    memory_bytes = total_memory_bytes()
    if memory_bytes is None:
        return least
    state = 0.0 if job.state_dir else _STATE_BYTES / servers
    # With gradient accumulation, each server stores all gradients until the last micro-batch.
    gradient = _GRADIENT_BYTES / (servers if job.accumulate == 1 else 1)
    needed_bytes = sum(
        p.numel() * (_WEIGHT_BYTES + (gradient + state if p.requires_grad else 0.0))
        for p in model.parameters()
    )
    needed_bytes += sum(b.nbytes for b in model.buffers())  # quantized weights
    fits = (mode for mode, share in _MOST.items() if needed_bytes <= share * memory_bytes)
    return next(fits, least)


def check_memory(job: JobSpec, servers: int, *, alone: bool = False) -> None:
    """Raise UsageError if a job cannot use the memory mode that its settings request.

    The job is also refused if a step needs more memory than this machine has, whichever method its
    settings allow. `LEAN` requires a single server. `SHARDED` requires several servers, and
    supports neither `--method stages` nor quantized weights. `alone`: whether the PS
    computes the activations, because the job has no fleet or cannot train by stages.
    """
    _check_size(job, servers, alone)
    asked = MemoryMode(job.memory)
    if servers > 1 and asked is MemoryMode.LEAN:
        raise UsageError(
            "--memory is 'lean', which updates in the backward pass, but several servers must sum "
            "their gradients first; use sharded, or --state-dir to save memory"
        )
    if asked is not MemoryMode.SHARDED:
        return
    if servers == 1:
        raise UsageError(
            "--memory is 'sharded', but a single server cannot shard weights; add --servers, or "
            "use --memory lean"
        )
    if job.method == Method.STAGES.value:
        raise UsageError(
            "--memory is 'sharded', but by stages each server sends all weights to devices; use "
            "--method tiles or --memory recompute"
        )
    if job.quantized:
        raise UsageError(
            f"--memory is 'sharded', but --lora is {job.lora!r}, whose quantized weights cannot be "
            "sharded; omit bits, or use --memory recompute"
        )


def sizes_of(job: JobSpec, spec: ModelSpec) -> StageSizes:
    """Return the sizes of a job's model, with the job's adapters."""
    adapters, each = None, 4 if job.dtype == Precision.FP32.value else 2
    if job.lora:
        lora = LoraSpec.of(job.lora)
        targets = () if lora.targets == (ALL_LINEAR,) else lora.targets
        adapters = Adapters(lora.rank, targets, Bits(lora.bits) if lora.bits else None)
    return StageSizes(spec, job.seq, each, each, adapters)


def _check_size(job: JobSpec, servers: int, alone: bool) -> None:
    """Raise UsageError if this machine has too little memory for a step of the job."""
    spec, memory_bytes = resolve_model(job.model).spec, total_memory_bytes()
    if memory_bytes is None:
        return
    needs = partial(_least_bytes, job, sizes_of(job, spec), servers, alone)
    if needs(job.batch, job.accumulate) <= memory_bytes:
        return

    def needed(batch: int, accumulate: int) -> str:
        gigabytes = needs(batch, accumulate) / 1e9
        return f"{gigabytes:,.1f} GB of memory, but this machine has {memory_bytes / 1e9:,.1f}"

    sizes = [
        (job.batch, "--batch", lambda batch: needs(batch, job.accumulate)),
        (job.accumulate, "--accumulate", lambda count: needs(job.batch, count)),
    ]
    for value, option, need in sorted(sizes, key=lambda size: -size[0]):
        # The range begins at 1, so the index found is the largest value that fits.
        if most := bisect_right(range(1, value), memory_bytes, key=need):
            has = needed(job.batch, job.accumulate)
            raise UsageError(f"{option} is {value}, but a step needs {has}; use {most} or less")
    raise UsageError(
        f"one sequence of {job.model} with --seq {job.seq} needs {needed(1, 1)}; use a smaller "
        "model or --seq, or add --lora or --state-dir"
    )


def _least_bytes(
    job: JobSpec, sizes: StageSizes, servers: int, alone: bool, batch: int, accumulate: int
) -> int:
    """Return a lower bound of the memory that each server needs for a step, in bytes.

    It counts weights, gradients, optimizer state, the activations that recomputation keeps, and the
    logits. PyTorch needs somewhat more.
    """
    everything = batch * accumulate
    most_rows = -(-everything // servers)  # of one server
    tokens = min(batch, most_rows) * sizes.sequence  # of one micro-batch
    trained, mode = sizes.trained_parameters, MemoryMode(job.memory)
    state = sizes.state_bytes
    if job.state_dir or job.optimizer != OptimizerKind.ADAMW.value:
        state -= _STATE_BYTES * trained
    spec = sizes.spec
    kept = (spec.layers * kept_elements(spec) - recomputed_elements(spec)) * sizes.element_bytes
    here = state + tokens * (kept + _LOGIT_BYTES * spec.vocabulary)
    if mode in (MemoryMode.AUTO, MemoryMode.LEAN) and accumulate == 1:
        here -= _GRADIENT_BYTES * trained
    if servers > 1:  # the servers share some of the state
        here, state = here - state, 0
    # By stages, the PS keeps at least the first stage's inputs and their gradients.
    staged = 2 * most_rows * sizes.sequence * sizes.spec.width * sizes.element_bytes
    staged += 0 if job.state == StateMode.DEVICES.value else state
    method = Method(job.method)
    if alone or job.journal or job.dtype == Precision.FP16.value:
        method = Method.LOCAL
    # With local updates, the PS keeps momentum instead of AdamW's moments, and runs no passes.
    least = {Method.STAGES: staged, Method.DILOCO: state, Method.AUTO: min(here, staged)}.get(
        method, here
    )
    return least + _TOKEN_BYTES * everything * sizes.sequence
