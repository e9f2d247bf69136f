"""The optimizer's state in files mapped into memory, so that it may be larger than memory.

The system writes such pages to disk and drops them where memory is short, and reads them again when
the optimizer needs them. What is computed is the same.
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
"""Smaller tensors stay in memory: a file for each costs more than it saves."""


class StateFiles:
    """Moves tensors to files of a folder.

    A file is deleted as soon as it is mapped, so that nothing is left of a run that is killed; its
    space is free when the process ends. Windows cannot do that: there the files stay.

    Args:
        folder: where; it is made if it is not there.
        patience: what waits for space when the disk is full.

    Raises:
        CleaveError: when the folder cannot be written.
    """

    def __init__(self, folder: Path, patience: Patience) -> None:
        check_folder(folder)
        self._folder = folder
        self._patience = patience

    def move(self, state: dict[str, Any]) -> None:
        """Replace the large tensors in a parameter's state by mapped ones of the same values.

        Raises:
            CleaveError: when a file cannot be written; that tensor is still in memory then.
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
                # Written, not only made longer: a full disk is found now, and not when a page of
                # the map is written, which would kill the process.
                write_all(file.file, bytes_of(tensor))
                mapped = torch.from_file(
                    file.name, shared=True, size=tensor.numel(), dtype=tensor.dtype
                )
        except OSError as error:
            raise cannot_write(self._folder, error) from error
        return mapped.view(tensor.shape)


def is_mapped(tensor: Tensor) -> bool:
    """Return whether a tensor lies in a file."""
    return tensor.untyped_storage().filename is not None


def check_folder(folder: Path) -> None:
    """Make a folder, if it is not there, and write to it.

    Raises:
        CleaveError: when that is not possible.
    """
    try:
        writable_folder(folder)
    except OSError as error:
        raise cannot_write(folder, error) from error
