"""Save checkpoints, and load them to resume a run after a crash.

    folder/step-000123/tensors.safetensors    parameters, optimizer state
    folder/step-000123/meta.json              step, checksum, the caller's metadata

A checkpoint is written to a temporary folder, which is renamed once all its data is on disk. A
folder with the final name is therefore complete. Only one process at a time may write.

Loading skips a damaged checkpoint but does not delete it, because it may be the only checkpoint. If
the operating system cannot read a checkpoint file (OSError), loading raises an error instead of
using an older checkpoint, because the newer one may be intact.
"""

import hashlib
import json
import os
import secrets
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BufferedWriter
from pathlib import Path
from typing import Any, BinaryIO

import torch

from cleave.errors import CleaveError
from cleave.files import new_file, new_folder, own_folder, sync_folder
from cleave.training.loop.disk import DiskFullError, is_full, remedy
from cleave.training.loop.finite import first_not_finite
from cleave.training.loop.run_folder import newest_first, step_of

_FORMAT = 1
_TENSORS = "tensors.safetensors"
_META = "meta.json"
WEIGHTS = "model."  # prefix of the names of model parameters among a checkpoint's tensors
_TEMPORARY = ".tmp-"
# ".replaced" marks an old checkpoint while a new checkpoint of the same step takes its place.
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


class DamagedCheckpointError(CleaveError):
    """Raised when a checkpoint is incomplete, has a wrong checksum, or contains NaN or infinity."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            f"the checkpoint {str(path)!r} is damaged ({reason}); replace it with a copy, continue "
            "from an older checkpoint, or start over"
        )
        self.path = path
        self.reason = reason


@dataclass(frozen=True, eq=False)
class LoadedCheckpoint:
    """A checkpoint after `step` completed steps, with its tensors on the CPU."""

    step: int
    tensors: dict[str, torch.Tensor]
    meta: dict[str, Any]


@dataclass(frozen=True)
class _Header:
    """Contents of meta.json. `aliases` maps the names of tied duplicates to the stored names."""

    step: int
    tensors_sha256: str
    aliases: dict[str, str]
    meta: dict[str, Any]


def save_checkpoint(
    folder: Path,
    *,
    step: int,
    tensors: Mapping[str, torch.Tensor],
    meta: Mapping[str, Any],
    keep: int = 2,
    sound_before: int | None = None,
    fetch: Callable[[str], torch.Tensor] | None = None,
) -> Path:
    """Write a checkpoint, remove old checkpoints, and return the new checkpoint's path.

    Tensors are written one at a time, and contiguous CPU tensors are not copied. Tied tensors
    (several names for the same memory) are stored once, and are tied again when loaded.

    Args:
        folder: the parent folder of checkpoints.
        step: number of completed steps.
        tensors: tensors by name. The values of a tensor on the device `meta` are on another server.
        meta: the caller's metadata, which must be JSON-serializable.
        keep: number of latest checkpoints to keep. Checkpoints of steps after `step`, which an
            earlier process may have left, do not count and are not removed.
            sound_before: also keep the latest checkpoint before this step, because the run may have
            diverged since; None to keep no additional checkpoint.
        fetch: called with the name of a tensor on the device `meta`; returns the tensor's values.
            Each retry of a failed write calls `fetch` again.

    Raises:
        CleaveError: if the checkpoint cannot be written (DiskFullError if the disk is full).
            Earlier checkpoints are unchanged.
        TypeError: if `meta` or a tensor's dtype cannot be stored. Nothing is written.
        ValueError: if `step` or `keep` is too small. Nothing is written.
    """
    if step < 0 or keep < 1:
        raise ValueError(f"step {step} must be at least 0 and keep {keep} at least 1")
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise TypeError(f"tensor {name!r} has dtype {tensor.dtype}, which cannot be stored")
    stored, aliases = _untie(tensors)
    json.dumps(dict(meta))  # raise TypeError before gigabytes are written

    final = folder / f"step-{step:06d}"
    temporary = folder / f"{_TEMPORARY}{final.name}-{secrets.token_hex(4)}"
    try:
        own_folder(folder)
        for leftover in folder.glob(f"{_TEMPORARY}*"):  # from a crash during an earlier write
            shutil.rmtree(leftover, ignore_errors=True)
        new_folder(temporary)
        with BufferedWriter(new_file(temporary / _TENSORS)) as file:
            sha256 = _write_tensors(file, stored, fetch)
            _sync(file)
        with BufferedWriter(new_file(temporary / _META)) as file:
            header = {
                "format": _FORMAT,
                "step": step,
                "tensors_sha256": sha256,
                "aliases": aliases,
                "meta": dict(meta),
            }
            file.write(json.dumps(header, indent=1).encode())
            _sync(file)
        sync_folder(temporary)
        _put_in_place(temporary, final)
        sync_folder(folder)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        kind = DiskFullError if is_full(error) else CleaveError
        raise kind(
            f"The checkpoint {str(final)!r} cannot be written ({error.strerror or error}): "
            f"{remedy(error)}, or choose another folder; earlier checkpoints are unchanged."
        ) from error
    except BaseException:  # including KeyboardInterrupt
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _remove_older(folder, step, keep, sound_before)
    return final


def load_checkpoint(path: Path) -> LoadedCheckpoint:
    """Load the checkpoint in the folder `path` and verify the checksum of its tensors.

    The tensors may be memory-mapped. Copy them before you delete the checkpoint's files.

    Raises:
        DamagedCheckpointError: if the checkpoint is damaged or contains NaN or infinity.
        CleaveError: if the checkpoint cannot be read, or was written by a newer version.
    """
    header = _read_header(path)
    try:
        with (path / _TENSORS).open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError as error:
        raise DamagedCheckpointError(path, f"{_TENSORS} is missing") from error
    except OSError as error:
        raise _unreadable(path, _TENSORS, error) from error
    if sha256 != header.tensors_sha256:
        raise DamagedCheckpointError(path, f"the checksum of {_TENSORS} is wrong")
    tensors = _read_tensors(path, header)
    if name := first_not_finite(tensors):  # earlier versions wrote checkpoints of diverged runs
        raise DamagedCheckpointError(path, f"{name!r} is not finite, because the run had diverged")
    return LoadedCheckpoint(header.step, tensors, header.meta)


def load_latest(
    folder: Path, passed_over: Callable[[DamagedCheckpointError], None] | None = None
) -> LoadedCheckpoint | None:
    """Load the newest intact checkpoint in `folder`. Return None if no checkpoint is intact.

    Args:
        passed_over: called with the error of each damaged checkpoint that is newer than the loaded
            checkpoint; None to issue warnings instead.

    Raises:
        CleaveError: if a checkpoint that may be intact cannot be read.
    """
    while True:
        faults: list[DamagedCheckpointError] = []
        found, removed = None, False
        for path in newest_first(folder):
            try:
                found = load_checkpoint(path)
                break
            except DamagedCheckpointError as error:
                removed = removed or not path.exists()
                faults.append(error)
        if not removed:
            break
        # Try again: a training process has just replaced a checkpoint with a newer one.
    for fault in faults:
        if passed_over is None:
            warnings.warn(str(fault), stacklevel=2)
        else:
            passed_over(fault)
    return found


def remove_checkpoints(folder: Path, unwanted: Callable[[int], bool]) -> None:
    """Remove the checkpoints of steps for which `unwanted` returns True. Warn about failures."""
    for path in newest_first(folder):
        if unwanted(step_of(path)):
            _remove(path)


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint so that later runs ignore it, and return its new path."""
    aside, number = path.with_name(f"{path.name}.damaged"), 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}.damaged-{number}")
    try:
        path.rename(aside)
    except OSError as error:
        raise CleaveError(
            f"the damaged checkpoint {str(path)!r} cannot be renamed to {aside.name!r} "
            f"({error.strerror}); check that you may write there, or move it away"
        ) from error
    return aside


def _untie(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors to store, and a map from each duplicate's name to the stored name."""
    stored: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[object, ...], str] = {}
    for name, tensor in tensors.items():
        view = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() > 0 and not tensor.is_meta and view in seen:
            aliases[name] = seen[view]
        else:
            seen[view] = name
            stored[name] = tensor
    return stored, aliases


def _write_tensors(
    file: BinaryIO, tensors: Mapping[str, torch.Tensor], fetch: Callable[[str], torch.Tensor] | None
) -> str:
    """Write tensors to `file` in safetensors format and return the SHA-256 of the file in hex.

    The safetensors library is not used, because its errors do not say whether the disk is full, and
    because the checksum would then require a second pass over the file.
    """
    # Write the dtypes with the largest elements first, so that every tensor is aligned.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header = {}
    offset = 0
    for name in order:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    digest = hashlib.sha256(head)
    file.write(head)
    for name in order:
        tensor = tensors[name]
        part = bytes_of(fetch(name) if tensor.is_meta and fetch is not None else tensor)
        digest.update(part)
        file.write(part)
    return digest.hexdigest()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's bytes in row-major order. A contiguous CPU tensor is not copied."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _put_in_place(temporary: Path, final: Path) -> None:
    """Rename a checkpoint's folder from `temporary` to `final`.

    An existing `final` is renamed first, so that a complete checkpoint of the step always exists.
    """
    if not final.exists():
        temporary.rename(final)
        return
    replaced = final.with_name(f"{final.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    final.rename(replaced)
    try:
        temporary.rename(final)
    except BaseException:
        replaced.rename(final)
        raise
    _remove(replaced)


def _remove_older(folder: Path, step: int, keep: int, sound_before: int | None) -> None:
    older = [path for path in newest_first(folder) if step_of(path) <= step]
    # A crash can leave both the new and the replaced checkpoint of a step. Count the step once.
    distinct = [path for path in older if not path.suffix or path.with_suffix("") not in older]
    sound = [path for path in distinct if sound_before is not None and step_of(path) < sound_before]
    for path in older:
        if path not in distinct[:keep] + sound[:1]:
            _remove(path)


def _remove(path: Path) -> None:
    """Delete a checkpoint; warn if it cannot be deleted.

    The folder is renamed first, so that a crash leaves no incomplete checkpoint.
    """
    doomed = path.with_name(f"{_TEMPORARY}{path.name}-{secrets.token_hex(4)}")
    try:
        path.rename(doomed)
        shutil.rmtree(doomed)
    except OSError as error:
        warnings.warn(
            f"the old checkpoint {str(path)!r} cannot be removed ({error.strerror}); remove it by "
            "hand to free its space",
            stacklevel=3,
        )


def _read_header(path: Path) -> _Header:
    try:
        text = (path / _META).read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DamagedCheckpointError(
            path, f"it has no {_META}, so it is not a checkpoint"
        ) from error
    except OSError as error:
        raise _unreadable(path, _META, error) from error
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise DamagedCheckpointError(path, f"{_META} is not JSON") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("format"), int):
        raise DamagedCheckpointError(path, f"{_META} has no valid format version")
    if fields["format"] > _FORMAT:
        raise CleaveError(
            f"the checkpoint {str(path)!r} has format {fields['format']}, but this version of "
            f"Cleave reads only formats up to {_FORMAT}; update Cleave"
        )
    kinds = {"step": int, "tensors_sha256": str, "aliases": dict, "meta": dict}
    for field, kind in kinds.items():
        if not isinstance(fields.get(field), kind):
            raise DamagedCheckpointError(path, f"{_META} has no valid {field!r}")
    return _Header(**{field: fields[field] for field in kinds})


def _read_tensors(path: Path, header: _Header) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path / _TENSORS)
        return tensors | {name: tensors[kept] for name, kept in header.aliases.items()}
    except (SafetensorError, KeyError) as error:
        reason = f"{_TENSORS} does not match {_META}"
        raise DamagedCheckpointError(path, reason) from error
    except OSError as error:
        raise _unreadable(path, _TENSORS, error) from error


def _unreadable(path: Path, name: str, error: OSError) -> CleaveError:
    return CleaveError(
        f"the checkpoint {str(path)!r} cannot be read ({name}: {error.strerror or error}), but it "
        "may be intact; fix the problem and try again, or move its folder away to continue from an "
        "older checkpoint"
    )
