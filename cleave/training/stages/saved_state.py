"""States of a run after earlier steps, in files: to compare with, and to roll back to.

The files have no names, so the operating system deletes them when nothing refers to them, also if
the process is killed.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cleave.arrays import Array
from cleave.files import make_folder, write_all
from cleave.scheduler.stages.resident import Lineage


class SavedBytes:
    """Copies of arrays in a file without a name.

    Args:
        folder: where the file is; None to keep the copies in memory.
        note: called with a message if the copies stay in memory, because the disk is full.
    """

    def __init__(
        self,
        folder: Path | None,
        arrays: Iterable[tuple[Any, memoryview]],
        note: Callable[[str], None],
    ) -> None:
        found = dict(arrays)
        self._held: Mapping[Any, memoryview] | None = None
        if folder is not None:
            try:
                self._held = _in_file(folder, found)
            except OSError as error:
                note(
                    f"a copy of the trained state stays in memory, because it cannot be written "
                    f"to {folder}: {error}"
                )
        if self._held is None:
            self._held = {key: memoryview(bytearray(each)) for key, each in found.items()}

    def __getitem__(self, key: Any) -> memoryview:
        assert self._held is not None
        return self._held[key]

    @classmethod
    def of_tensors(
        cls, folder: Path | None, tensors: Mapping[Any, Tensor], note: Callable[[str], None]
    ) -> SavedBytes:
        """Copy tensors."""
        return cls(folder, ((key, _bytes(tensor)) for key, tensor in tensors.items()), note)

    def floats(self, key: Any) -> Array:
        """Return a copied fp32 array, without its shape."""
        return np.frombuffer(self[key], np.float32)

    def copy_to(self, key: Any, tensor: Tensor) -> None:
        """Overwrite a tensor with its copy."""
        values = torch.frombuffer(self[key], dtype=tensor.dtype)
        with torch.no_grad():
            tensor.copy_(values.reshape(tensor.shape))


@dataclass(slots=True)
class SavedState:
    """The state of a run after one step.

    Attributes:
        position: number of updates of the layers on devices until then.
        layers: weights and moments on devices, by `StageArray`.
        own: the other trained parameters and their optimizer state; see `own_tensors`.
        own_names: the keys of `own`.
        lineages: lineages of the state of all devices that returned a part of it.
        sound: layers whose state was repeated by the server, as was all earlier state of theirs.
    """

    position: int
    layers: SavedBytes
    own: SavedBytes
    own_names: Set[str]
    lineages: Set[Lineage] = frozenset()
    sound: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class ReturnedStep:
    """What devices returned in a logged step, except for what the log has as well.

    Attributes:
        y, dx: outputs and input gradients that no other stage got, by stage and micro-batch.
        forward_by, backward_by: the devices that returned outputs and input gradients, likewise.
        squares: sums of squared gradients, by stage.
    """

    y: Mapping[tuple[int, int], memoryview]
    dx: Mapping[tuple[int, int], memoryview]
    forward_by: Mapping[tuple[int, int], int]
    backward_by: Mapping[tuple[int, int], int]
    squares: Mapping[int, float]


def _bytes(tensor: Tensor) -> memoryview:
    held = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return held.data


def _in_file(folder: Path, arrays: Mapping[Any, memoryview]) -> dict[Any, memoryview]:
    make_folder(folder)
    with tempfile.TemporaryFile(dir=folder) as file:
        for each in arrays.values():
            write_all(file, each.cast("B"))
        if not file.tell():
            return {key: memoryview(bytearray()) for key in arrays}
        file.flush()
        # Copy on write: torch reads only from writable memory without a warning.
        held = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    found, at = {}, 0
    for key, each in arrays.items():
        found[key] = held[at : at + each.nbytes]
        at += each.nbytes
    return found
