"""Copies of earlier trained state, for comparisons and rollbacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cleave.arrays import Array
from cleave.files import mapped_copy
from cleave.scheduler.stages.resident import Lineage
from cleave.training.loop.checkpoint import bytes_of
from cleave.training.stages.stored_steps import cut


class SavedTensors:
    """Copies of tensors in an unnamed temporary file; see `mapped_copy`.

    Args:
        folder: folder of the file; None to keep the copies in memory.
        note: called with a message if the copies stay in memory because the disk is full.
    """

    def __init__(
        self, folder: Path | None, tensors: Mapping[Any, Tensor], note: Callable[[str], None]
    ) -> None:
        parts = [bytes_of(tensor) for tensor in tensors.values()]
        held: memoryview | None = None
        if folder is not None:
            try:
                held = mapped_copy(folder, parts)
            except OSError as error:
                note(
                    f"keeping a copy of the trained state in memory, because it cannot be written "
                    f"to {folder}: {error}"
                )
        if held is None:
            held = memoryview(b"".join(parts))
        sizes = (part.nbytes for part in parts)
        self._held = dict(zip(tensors, cut(held, sizes), strict=True))

    def __contains__(self, key: Any) -> bool:
        return key in self._held

    def floats(self, key: Any) -> Array:
        """Return the copy of an fp32 tensor as a flat array."""
        return np.frombuffer(self._held[key], np.float32)

    def copy_to(self, key: Any, tensor: Tensor) -> None:
        """Overwrite a tensor with its copy."""
        # torch warns about memory that is not writable.
        values = torch.frombuffer(bytearray(self._held[key]), dtype=tensor.dtype)
        with torch.no_grad():
            tensor.copy_(values.reshape(tensor.shape))


@dataclass(slots=True)
class SavedState:
    """The state of a run after a certain step.

    Attributes:
        position: number of updates of the layers on devices up to that step.
        layers: weights and moments on devices, by `StageArray`.
        own: all other trained parameters and their optimizer state; see `own_tensors`.
        lineages: lineages of all state that devices returned for this copy.
        sound: layers whose state the server has recomputed for this copy and all earlier ones.
    """

    position: int
    layers: SavedTensors
    own: SavedTensors
    lineages: Set[Lineage] = frozenset()
    sound: set[int] = field(default_factory=set)
