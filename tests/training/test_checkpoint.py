"""Checkpoints: exact, whole or absent, and honest about damage."""

from __future__ import annotations

import errno
import json
import os
import resource
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from benchmarks.crash import kill_while_writing
from cleave.errors import CleaveError
from cleave.training.loop.checkpoint import (
    DamagedCheckpointError,
    load_checkpoint,
    load_latest,
    save_checkpoint,
    set_aside,
)

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


def save(folder: Path, step: int, value: float = 0.0, keep: int = 2) -> Path:
    tensors = {"weight": torch.full((4, 3), value)}
    return save_checkpoint(folder, step=step, tensors=tensors, meta={"value": value}, keep=keep)


def latest(folder: Path) -> int | None:
    found = load_latest(folder)
    return found.step if found is not None else None


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@contextmanager
def full_disk(limit_bytes: int) -> Iterator[None]:
    """No file may grow beyond the limit: the system refuses the write, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@settings(deadline=None)  # files take as long as they take
@given(
    shapes=st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)), max_size=6
    ),
    transpose=st.booleans(),
)
def test_what_is_saved_is_loaded_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory,
    shapes: list[tuple[torch.dtype, list[int]]],
    transpose: bool,
) -> None:
    folder = tmp_path_factory.mktemp("checkpoints")
    tensors = {}
    for index, (dtype, shape) in enumerate(shapes):
        tensor = (torch.randn(shape) * 100).to(dtype)
        tensors[f"tensor.{index}"] = tensor.mT if transpose and tensor.ndim >= 2 else tensor
    meta = {"loader": {"epoch": 1, "position": 2}, "losses": [0.1, 1e300], "name": "é"}

    path = save_checkpoint(folder, step=7, tensors=tensors, meta=meta)
    loaded = load_checkpoint(path)

    assert (loaded.step, loaded.meta) == (7, meta)
    assert loaded.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded.tensors[name].dtype == tensor.dtype
        torch.testing.assert_close(loaded.tensors[name], tensor, rtol=0, atol=0, equal_nan=True)
    assert load_file(path / "tensors.safetensors").keys() == tensors.keys()


def test_tied_tensors_are_stored_once_and_tied_again(tmp_path: Path) -> None:
    embedding = torch.nn.Parameter(torch.randn(100, 10))
    tensors = {"embed": embedding, "head": embedding, "row": embedding[3]}
    path = save_checkpoint(tmp_path, step=1, tensors=tensors, meta={})
    assert (path / "tensors.safetensors").stat().st_size < 1.5 * 4000
    loaded = load_checkpoint(path).tensors
    assert loaded["head"].data_ptr() == loaded["embed"].data_ptr()
    assert torch.equal(loaded["head"], embedding)
    assert torch.equal(loaded["row"], embedding[3])


def test_only_the_last_ones_are_kept_and_the_last_is_found(tmp_path: Path) -> None:
    assert latest(tmp_path / "missing") is None
    assert latest(tmp_path) is None
    for step in (0, 5, 100, 1_000_000):
        save(tmp_path, step)
    assert names(tmp_path) == ["step-000100", "step-1000000"]
    assert latest(tmp_path) == 1_000_000
    save(tmp_path, 1_000_001, keep=1)
    assert names(tmp_path) == ["step-1000001"]


def test_later_checkpoints_of_a_run_that_was_wound_back_are_left_alone(tmp_path: Path) -> None:
    for step in (1, 9):
        save(tmp_path, step)
    save(tmp_path, 3, value=1.0, keep=1)
    save(tmp_path, 3, value=2.0, keep=1)  # the same step again
    assert names(tmp_path) == ["step-000003", "step-000009"]
    assert load_checkpoint(tmp_path / "step-000003").meta == {"value": 2.0}


def test_a_crash_while_replacing_loses_nothing(tmp_path: Path) -> None:
    save(tmp_path, 4)
    save(tmp_path, 5, value=1.0).rename(tmp_path / "step-000005.replaced")
    found = load_latest(tmp_path)
    assert found is not None
    assert found.meta == {"value": 1.0}
    save(tmp_path, 5, value=2.0)
    assert names(tmp_path) == ["step-000004", "step-000005"]


@pytest.mark.parametrize("limit_bytes", [10, 2000])
def test_a_full_disk_is_one_sentence_and_spoils_nothing(tmp_path: Path, limit_bytes: int) -> None:
    earlier = save(tmp_path, 1, value=1.0)
    with full_disk(limit_bytes), pytest.raises(CleaveError, match=r"step-000002.*free some space"):
        save_checkpoint(tmp_path, step=2, tensors={"w": torch.zeros(1000)}, meta={}, keep=1)
    assert names(tmp_path) == ["step-000001"]
    assert latest(tmp_path) == 1
    assert load_checkpoint(earlier).meta == {"value": 1.0}


@pytest.mark.parametrize("failing_call", [1, 2, 3])
@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()])
def test_a_failure_at_any_time_before_the_rename_spoils_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing_call: int, failure: BaseException
) -> None:
    save(tmp_path, 1, value=1.0)
    real, calls = os.fsync, 0

    def fsync(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == failing_call:
            raise failure
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises((CleaveError, KeyboardInterrupt)):
        save(tmp_path, 1, value=2.0)
    assert names(tmp_path) == ["step-000001"]
    assert load_checkpoint(tmp_path / "step-000001").meta == {"value": 1.0}


def test_what_crashed_runs_left_is_never_found_and_is_removed(tmp_path: Path) -> None:
    save(tmp_path, 1).rename(tmp_path / ".tmp-step-000002-abcd")
    assert latest(tmp_path) is None
    save(tmp_path, 3)
    assert names(tmp_path) == ["step-000003"]


def test_what_cannot_be_stored_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    with pytest.raises(TypeError):
        save_checkpoint(folder, step=1, tensors={}, meta={"bad": object()})
    tensors = {"w": torch.zeros(2, dtype=torch.complex64)}
    with pytest.raises(TypeError, match="complex64"):
        save_checkpoint(folder, step=1, tensors=tensors, meta={})
    assert not folder.exists()


@settings(deadline=None)  # files take as long as they take
@given(position=st.integers(0, 10_000), bit=st.integers(0, 7), data=st.booleans())
def test_any_damage_to_the_tensors_is_noticed(
    tmp_path_factory: pytest.TempPathFactory, position: int, bit: int, data: bool
) -> None:
    """A flipped bit anywhere, or a file cut short anywhere."""
    folder = tmp_path_factory.mktemp("checkpoints")
    save(folder, 1)
    bad = save(folder, 2)
    file = bad / "tensors.safetensors"
    content = bytearray(file.read_bytes())
    position %= len(content)
    if data:
        content[position] ^= 1 << bit
    else:
        del content[position:]
    file.write_bytes(content)

    with pytest.raises(CleaveError, match=r"step-000002.*damaged.*older checkpoint"):
        load_checkpoint(bad)
    with pytest.warns(UserWarning, match=r"step-000002.*damaged"):
        assert latest(folder) == 1


@pytest.mark.parametrize("name", ["tensors.safetensors", "meta.json"])
def test_what_cannot_be_read_is_not_damaged_and_nothing_older_is_taken(
    tmp_path: Path, name: str
) -> None:
    """A link that leads to itself: the system refuses to open it, whoever asks."""
    save(tmp_path, 1)
    file = save(tmp_path, 2) / name
    file.rename(file.with_suffix(".kept"))
    file.symlink_to(file)
    with pytest.raises(CleaveError, match=r"cannot be read.*may be intact.*move") as failed:
        load_latest(tmp_path)
    assert not isinstance(failed.value, DamagedCheckpointError)
    file.unlink()
    file.with_suffix(".kept").rename(file)
    assert latest(tmp_path) == 2


def test_what_is_set_aside_is_kept_and_neither_found_nor_counted(tmp_path: Path) -> None:
    for _ in range(2):
        assert set_aside(save(tmp_path, 5, value=5.0)).name.startswith("step-000005.damaged")
    for step in (6, 7, 8):
        save(tmp_path, step)
    assert names(tmp_path) == [
        "step-000005.damaged", "step-000005.damaged-2", "step-000007", "step-000008",
    ]  # fmt: skip
    assert load_checkpoint(tmp_path / "step-000005.damaged-2").meta == {"value": 5.0}


def test_a_damaged_or_newer_meta_is_one_sentence(tmp_path: Path) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    header = json.loads((path / "meta.json").read_text())
    for content, message in (
        ("", "not JSON"),
        ("[]", "no valid format version"),
        ('{"format": 1, "step": 1}', "no valid 'tensors_sha256'"),
        (json.dumps(header | {"aliases": {"head": "embed"}}), "damaged"),
    ):
        (path / "meta.json").write_text(content)
        with pytest.raises(DamagedCheckpointError, match=message):
            load_checkpoint(path)
    (path / "meta.json").write_text('{"format": 99}')
    with pytest.raises(CleaveError, match="update Cleave"):  # it is not passed over
        load_latest(tmp_path)


def test_a_foreign_folder_is_not_a_checkpoint(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(CleaveError, match="not a checkpoint"):
            load_checkpoint(path)
    (tmp_path / "tensors.safetensors").touch()
    (tmp_path / "step-12").mkdir()
    (tmp_path / "notes.txt").touch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert latest(tmp_path) is None
    with pytest.raises(CleaveError, match="cannot be listed"):
        load_latest(tmp_path / "notes.txt")


@pytest.mark.nightly
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system forks no processes")
def test_a_writer_that_is_killed_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    kill_while_writing(tmp_path, quick=True, seed=0)
