"""How a training run uses the memory of the PS: what it keeps, and what it computes again."""

from __future__ import annotations

from typing import Final

from torch import nn

from cleave.machine.sensors import total_memory_bytes
from cleave.training.job import JobSpec, MemoryMode

_WEIGHT_AND_GRADIENT_BYTES: Final = 8  # of a parameter that is trained, both in fp32
_STATE_BYTES: Final = 8  # of it: two moments
_FROZEN_BYTES: Final = 4
_MOST: Final = {MemoryMode.PLAIN: 0.5, MemoryMode.RECOMPUTE: 0.75}
"""The share of the memory that these may take, without activations."""


def memory_mode(job: JobSpec, model: nn.Module) -> MemoryMode:
    """Return how memory is used: what the job says, or the fastest way that fits.

    Args:
        job: the job.
        model: the model, with the parameters that are trained marked so.

    Returns:
        Any mode but `AUTO`.
    """
    asked = MemoryMode(job.memory)
    if asked is not MemoryMode.AUTO:
        return asked
    memory_bytes = total_memory_bytes()
    if memory_bytes is None:  # the system does not tell: spare it
        return MemoryMode.LEAN
    trained = _WEIGHT_AND_GRADIENT_BYTES + (0 if job.state_dir else _STATE_BYTES)
    needed_bytes = sum(
        p.numel() * (trained if p.requires_grad else _FROZEN_BYTES) for p in model.parameters()
    )
    needed_bytes += sum(b.nbytes for b in model.buffers())  # codes of quantized weights
    fits = (mode for mode, share in _MOST.items() if needed_bytes <= share * memory_bytes)
    return next(fits, MemoryMode.LEAN)
