"""Select the memory mode with which the PS trains a job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cleave.errors import UsageError
from cleave.machine.sensors import total_memory_bytes
from cleave.planner.plan import Method
from cleave.training.loop.job import JobSpec, MemoryMode

if TYPE_CHECKING:
    from torch import nn

# Bytes per parameter.
_WEIGHT_BYTES: Final = 4
_GRADIENT_BYTES: Final = 4
_STATE_BYTES: Final = 8  # two moments of AdamW
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


def check_memory(job: JobSpec, servers: int) -> None:
    """Raise UsageError if a job cannot use the memory mode that its settings request.

    `LEAN` requires a single server. `SHARDED` requires several servers, and supports neither
    `--method stages` nor quantized weights.
    """
    asked = MemoryMode(job.memory)
    if servers > 1 and asked is MemoryMode.LEAN:
        raise UsageError(
            "--memory is 'lean', which updates in the backward pass, and several servers add up "
            "their gradients first; use sharded, or --state-dir to have more room"
        )
    if asked is not MemoryMode.SHARDED:
        return
    if servers == 1:
        raise UsageError(
            "--memory is 'sharded', and one server has nobody to share weights with; give "
            "--servers, or --memory lean"
        )
    if job.method == Method.STAGES.value:
        raise UsageError(
            "--memory is 'sharded', and by stages every server sends its devices all weights; give "
            "--method tiles, or --memory recompute"
        )
    if job.quantized:
        raise UsageError(
            f"--memory is 'sharded', and --lora is {job.lora!r}, whose quantized weights are not "
            "shared; leave bits out, or give --memory recompute"
        )
