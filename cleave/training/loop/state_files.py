"""Optimizer state in memory-mapped files, so that the state may be larger than memory.

The operating system writes mapped pages to disk when memory is short, and reads them again when the
optimizer accesses them. Training results are unchanged.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from cleave.files import writable_folder, write_all
from cleave.machine.sensors import return_free_memory
from cleave.scheduler.stages.arrays import packed
from cleave.training.loop.checkpoint import bytes_of
from cleave.training.loop.disk import Patience, cannot_write

LEAST_BYTES: Final = 2**20  # smaller tensors stay in memory


class StateFiles:
    """Memory-mapped files for optimizer state, in a folder that is created if missing.

    Each file is deleted as soon as it is mapped. The operating system frees the disk space when the
    process exits. On Windows, mapped files cannot be deleted and remain in the folder.
    """

    def __init__(self, folder: Path, patience: Patience) -> None:
        check_folder(folder)
        self._folder = folder
        self._patience = patience

    def pieces(self) -> PieceFile:
        """Return a new file for payloads."""
        return PieceFile(self._folder)

    def move(self, state: dict[str, Any]) -> None:
        """Replace the large tensors of a parameter's optimizer state with memory-mapped copies.

        Raises:
            CleaveError: if a file cannot be written. The tensor then remains in memory.
        """
        large = (k for k, v in state.items() if isinstance(v, Tensor) and v.nbytes >= LEAST_BYTES)
        if moved := [key for key in large if not is_mapped(state[key])]:
            for key in moved:
                state[key] = self._patience.insist(partial(self._mapped, state[key]))
            return_free_memory()

    def move_parameters(self, modules: Iterable[nn.Module]) -> None:
        """Move the trained parameters of modules to files, in fp32.

        Parameters on the meta device become zeros in files. So the whole of a new or mapped model
        is never in memory.
        """
        for module in (each for layer in modules for each in layer.modules()):
            for name, parameter in [*module.named_parameters(recurse=False)]:
                if not parameter.requires_grad or 4 * parameter.numel() < LEAST_BYTES:
                    continue
                if parameter.is_meta:
                    moved = self._patience.insist(partial(self._mapped, parameter.detach()))
                    setattr(module, name, nn.Parameter(moved))
                elif not is_mapped(parameter):
                    values = parameter.detach().float()
                    parameter.data = self._patience.insist(partial(self._mapped, values))
        return_free_memory()

    def _mapped(self, tensor: Tensor) -> Tensor:
        try:
            with tempfile.NamedTemporaryFile(
                buffering=0,
                prefix="cleave-state-",
                dir=self._folder,
                delete=sys.platform != "win32",
            ) as file:
                # Write the bytes instead of only extending the file: a full disk then raises an
                # error here, rather than killing the process at a later write to a mapped page.
                if tensor.is_meta:
                    for first in range(0, tensor.nbytes, LEAST_BYTES):
                        write_all(file.file, bytes(min(LEAST_BYTES, tensor.nbytes - first)))
                else:
                    write_all(file.file, bytes_of(tensor))
                mapped = torch.from_file(
                    file.name, shared=True, size=tensor.numel(), dtype=tensor.dtype
                )
        except OSError as error:
            raise cannot_write(self._folder, error) from error
        return mapped.view(tensor.shape)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes in a `PieceFile`. This is a `Packable`."""

    file: PieceFile
    first: int
    nbytes: int

    def pack(self) -> memoryview:
        """Return the bytes."""
        return self.file.read(self.first, self.nbytes)


class PieceFile:
    """A temporary file for payloads that are soon read once, but do not fit in memory.

    Raises:
        CleaveError: if the file cannot be created.
    """

    def __init__(self, folder: Path) -> None:
        check_folder(folder)
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - it is open for long
        weakref.finalize(self, self._file.close)
        self._lock = threading.Lock()  # one thread writes, and another one reads

    def keep(self, payload: Any) -> Any:
        """Write a payload to the file, and return an object that reads it from the file.

        A payload that cannot be written, for example because the disk is full, stays in memory.
        """
        held = packed(payload)
        with self._lock:
            first = self._file.seek(0, os.SEEK_END)
            try:
                write_all(self._file, held)
                self._file.flush()
            except OSError:
                return payload
        return _Piece(self, first, held.nbytes)

    def read(self, first: int, nbytes: int) -> memoryview:
        """Return `nbytes` bytes of the file, from offset `first`."""
        with self._lock:
            self._file.seek(first)
            return memoryview(self._file.read(nbytes))

    def clear(self) -> None:
        """Remove all payloads, because none is needed any more."""
        with self._lock:
            self._file.truncate(0)


def is_mapped(tensor: Tensor) -> bool:
    return tensor.untyped_storage().filename is not None


def check_folder(folder: Path) -> None:
    """Create a folder if it is missing. Raise CleaveError if the folder is not writable."""
    try:
        writable_folder(folder)
    except OSError as error:
        raise cannot_write(folder, error) from error
