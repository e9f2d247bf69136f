"""The optimizer's state in files: the same numbers, nothing left behind, and a full disk waits."""

from __future__ import annotations

import copy
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cleave.errors import CleaveError
from cleave.graphs.calls import decoder_layers
from cleave.training.loop import state_files
from cleave.training.loop.context import TrainContext
from cleave.training.loop.disk import Patience
from cleave.training.loop.inputs import prepare
from cleave.training.loop.job import JobSpec, OptimizerKind
from cleave.training.loop.optimizer import Optimizer, UpdateRule
from cleave.training.loop.records import DiskRecord, Record
from cleave.training.loop.run_folder import RunFolder
from cleave.training.loop.start import train
from cleave.training.loop.state_files import StateFiles, check_folder, is_mapped
from cleave.workload.build import ModelSource, build_model, load_model
from cleave.workload.registry import find_model
from tests.disks import small_disk
from tests.training.runs import losses_of
from tests.training.test_optimizer import Small, backward

RULE = UpdateRule(weight_decay=0.1)
SMALL_BYTES = 16


def at_once(path: Path) -> StateFiles:
    """Files of a disk that nobody waits for."""
    return StateFiles(path, Patience(lambda full, text: None, lambda: True, lambda seconds: None))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_files, "LEAST_BYTES", SMALL_BYTES)


def large(optimizer: Optimizer) -> list[torch.Tensor]:
    return [each for each in optimizer.tensors().values() if each.nbytes >= SMALL_BYTES]


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("kind", OptimizerKind)
def test_updates_are_the_same_to_the_bit(
    tmp_path: Path, kind: OptimizerKind, in_backward: bool
) -> None:
    rule = replace(RULE, kind=kind)
    model = Small()
    other = copy.deepcopy(model)
    usual = Optimizer(model, rule, clip=0.2, in_backward=in_backward)
    mapped = Optimizer(
        other, rule, clip=0.2, in_backward=in_backward, files=at_once(tmp_path / "state")
    )
    for step in range(4):
        usual.step(0.01, backward(model, step))
        mapped.step(0.01, backward(other, step))
        assert large(mapped)
        assert all(is_mapped(tensor) for tensor in large(mapped))
        if step == 1:  # it goes on from a checkpoint
            saved = {name: tensor.clone() for name, tensor in mapped.tensors().items()}
            mapped = Optimizer(
                other, rule, clip=0.2, in_backward=in_backward, files=at_once(tmp_path / "state")
            )
            mapped.load_tensors(saved)
            assert all(is_mapped(tensor) for tensor in large(mapped))
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    states = usual.tensors(), mapped.tensors()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.skipif(sys.platform == "win32", reason="a mapped file cannot be deleted there")
def test_a_killed_run_would_leave_nothing(tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "moment": torch.randn(8, 16), "step": torch.tensor(3.0), "name": "x",
    }  # fmt: skip
    before = state["moment"]
    at_once(tmp_path).move(state)
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(state["moment"], before)
    assert is_mapped(state["moment"])
    assert not is_mapped(state["step"])


def test_bf16_and_other_strides_keep_their_values(tmp_path: Path) -> None:
    tensors = [torch.randn(16, 8).bfloat16(), torch.randn(8, 16).t()]
    for tensor in tensors:
        state = {"moment": tensor}
        at_once(tmp_path).move(state)
        assert torch.equal(state["moment"], tensor)
        assert state["moment"].dtype == tensor.dtype


def test_a_folder_that_cannot_be_is_refused_before_anything_begins(
    tmp_path: Path, corpus_file: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CleaveError, match=r"'.*/file/state' cannot be written \(Not a directory"):
        check_folder(tmp_path / "file" / "state")
    job = JobSpec("opt-nano", str(corpus_file), state_dir=str(tmp_path / "file"))
    with pytest.raises(CleaveError, match=r"'.*/file' cannot be written \(File exists"):
        prepare(job, TrainContext(None, lambda record: None))


def test_a_run_waits_for_space_and_has_the_usual_losses(
    tmp_path: Path, corpus_file: Path, plain_losses: Callable[[JobSpec], list[float]]
) -> None:
    job = JobSpec(
        "opt-nano", str(corpus_file), steps=2, batch=1, seq=16, method="local", checkpoint_every=1,
        schedule="constant", warmup_steps=0,
    )  # fmt: skip
    seen: list[Record] = []
    with small_disk(tmp_path) as disk:
        disk.fill(100_000)

        def sleep(seconds: float) -> None:
            disk.free()

        mapped = replace(job, state_dir=str(disk.path))
        folder = RunFolder.create(tmp_path, "run")
        train(mapped, folder, TrainContext(None, seen.append, sleep=sleep))
        assert list(disk.path.iterdir()) == []
    assert losses_of(seen) == plain_losses(job)
    told = [record for record in seen if isinstance(record, DiskRecord)]
    assert [record.state for record in told] == ["full", "free"]
    assert str(disk.path) in told[0].text
    more = replace(job, steps=3, state_dir=str(tmp_path / "other"))  # which may change
    train(more, folder, TrainContext(None, seen.append), resume=True)
    assert losses_of(seen) == plain_losses(replace(job, steps=3))


@pytest.mark.parametrize("widths", [None, [torch.float32], [torch.float16], [torch.bfloat16],
                                    [torch.float32, torch.bfloat16]])  # fmt: skip
@pytest.mark.parametrize("name", ["opt-nano", "llama-nano"])
def test_models_are_the_same_if_their_layers_begin_in_files(
    tmp_path: Path, name: str, widths: list[torch.dtype] | None
) -> None:
    """New random weights, and weights of a folder in one dtype or two."""
    model = build_model(find_model(name), seed=3)
    folder = None
    if widths is not None:
        for number, tensor in enumerate(model.parameters()):
            tensor.data = tensor.data.to(widths[number % len(widths)])
        model.save_pretrained(folder := tmp_path / "model")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    files = at_once(tmp_path / "state")
    source = ModelSource(find_model(name), folder)
    usual, _ = load_model(source, seed=3)
    placed, _ = load_model(
        source, seed=3, place=lambda model: files.move_parameters(decoder_layers(model))
    )
    assert all(is_mapped(each) for each in decoder_layers(placed)[0].parameters())
    if folder is not None:
        shutil.rmtree(folder)
    expected, found = usual.state_dict(), placed.state_dict()
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype
        assert torch.equal(found[key], tensor)
    assert placed.config.dtype == usual.config.dtype
    assert [n for n, _ in placed.named_parameters()] == [n for n, _ in usual.named_parameters()]
