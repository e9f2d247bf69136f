"""The optimizer's state in memory-mapped files, so that it may exceed memory.

The system writes mapped pages to disk when memory is short, and reads them again when the optimizer
needs them. The results are the same.
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from cleave.files import writable_folder, write_all
from cleave.training.loop.checkpoint import bytes_of
from cleave.training.loop.disk import Patience, cannot_write

LEAST_BYTES: Final = 2**20
"""Smaller tensors stay in memory: a file costs more than it saves."""


class StateFiles:
    """Moves tensors to files of a folder.

    A file is deleted once it is mapped, so that a killed run leaves nothing behind. Its space is
    free when the process ends. Windows cannot delete mapped files; they stay there.

    Args:
        folder: the folder, made if missing.
        patience: retries writes while the disk is full.

    Raises:
        CleaveError: when the folder cannot be written.
    """

    def __init__(self, folder: Path, patience: Patience) -> None:
        check_folder(folder)
        self._folder = folder
        self._patience = patience

    def move(self, state: dict[str, Any]) -> None:
        """Replace a parameter's large state tensors by mapped ones with the same values.

        Raises:
            CleaveError: when a file cannot be written; that tensor then stays in memory.
        """
        for key, value in state.items():
            if not isinstance(value, Tensor) or value.nbytes < LEAST_BYTES or is_mapped(value):
                continue
            state[key] = self._patience.insist(partial(self._mapped, value))

    def _mapped(self, tensor: Tensor) -> Tensor:
        try:
            with tempfile.NamedTemporaryFile(
                buffering=0,
                prefix="cleave-state-",
                dir=self._folder,
                delete=sys.platform != "win32",
            ) as file:
                # Write the bytes rather than only extend the file: a full disk raises an error now,
                # while a later write to a mapped page would kill the process.
                write_all(file.file, bytes_of(tensor))
                mapped = torch.from_file(
                    file.name, shared=True, size=tensor.numel(), dtype=tensor.dtype
                )
        except OSError as error:
            raise cannot_write(self._folder, error) from error
        return mapped.view(tensor.shape)


def is_mapped(tensor: Tensor) -> bool:
    """Return whether a tensor is mapped to a file."""
    return tensor.untyped_storage().filename is not None


def check_folder(folder: Path) -> None:
    """Make a folder if it is missing, and check that it is writable.

    Raises:
        CleaveError: when either fails.
    """
    try:
        writable_folder(folder)
    except OSError as error:
        raise cannot_write(folder, error) from error
