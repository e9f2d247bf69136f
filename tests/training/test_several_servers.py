"""Several servers train as one does: losses, checkpoints on any number, faults of one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cleave.errors import CleaveError, UsageError
from cleave.training.loop.checkpoint import load_checkpoint, load_latest, save_checkpoint
from cleave.training.loop.disk import DiskFullError
from cleave.training.loop.finite import first_not_finite
from cleave.training.loop.job import JobSpec
from cleave.training.loop.run_folder import CHECKPOINTS
from cleave.training.servers.ranks import LostServerError, Ranks, owners_of
from tests.training.several_servers import Servers, alone, losses_of

JOB = JobSpec(
    "opt-nano", steps=4, batch=5, seq=32, eval_every=2, eval_batches=3, checkpoint_every=2
)
CLOSE = 2e-5


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    started = Servers(3)
    yield started
    started.close()


SHARDED = {"memory": "sharded"}


@pytest.mark.parametrize(
    "changed",
    [
        {"accumulate": 2},
        {"method": "tiles", "accumulate": 2},
        {"method": "stages"},
        {"dtype": "fp16", "clip": 0.0},
        {"dtype": "bf16", "clip": 0.05},
        {"optimizer": "muon", "lora": ""},
        {"lora": "r=4", "keep_best": True},
        {"lora": "r=4,dropout=0.3"},
        {"batch": 2},  # so that a server has nothing to do
        {**SHARDED, "accumulate": 2},
        {**SHARDED, "batch": 2, "accumulate": 3, "clip": 0.05},
        {**SHARDED, "method": "tiles", "accumulate": 2},  # devices keep weights for micro-batches
        {**SHARDED, "method": "auto"},
        {**SHARDED, "method": "tiles", "model": "llama-nano"},  # with a head of its own weights
        {**SHARDED, "method": "tiles", "dtype": "bf16"},
        {**SHARDED, "dtype": "fp16", "clip": 0.0},
        {**SHARDED, "optimizer": "muon"},
        {**SHARDED, "optimizer": "adafactor"},
        {**SHARDED, "method": "tiles", "lora": "r=4", "keep_best": True},
        {**SHARDED, "lora": "r=4,save=lm_head"},
        {**SHARDED, "packing": "separate"},
    ],
    ids=str,
)
def test_losses_are_those_of_one_server_however_it_trains(
    servers: Servers, tmp_path: Path, changed: dict[str, Any]
) -> None:
    job = replace(JOB, **{"method": "local", **changed})
    devices = [0, 0, 0] if job.method == "local" else [5, 2, 3]
    expected = alone(replace(job, memory="plain"), tmp_path / "one", devices[0])
    first, *others = servers.do(3, tmp_path / "store", losses_of, job, tmp_path / "many", devices)
    assert first == pytest.approx(expected, abs=CLOSE if job.dtype == "fp32" else 2e-3)
    assert others == [[], []]  # who is not the first reports no step


@pytest.mark.parametrize("memory", ["plain", "sharded"])
@pytest.mark.parametrize("then", [1, 2])
def test_a_checkpoint_of_three_servers_goes_on_on_any_number(
    servers: Servers, tmp_path: Path, then: int, memory: str
) -> None:
    plain, folder = replace(JOB, method="local", memory="plain"), tmp_path / "many"
    alone(plain, tmp_path / "one")
    expected = alone(replace(plain, steps=6), tmp_path / "one", resume=True)
    job = replace(plain, memory=memory)
    servers.do(3, tmp_path / "store", losses_of, job, folder, [0, 0, 0])
    if then == 1:
        found = alone(replace(plain, steps=6), folder, resume=True)
    else:
        job, again = replace(job, steps=6), tmp_path / "again"
        found = servers.do(then, again, losses_of, job, folder, [0, 0, 0], True)[0]
    assert found == pytest.approx(expected, abs=CLOSE)


def _other_text(ranks: Ranks, job: JobSpec, folder: Path, texts: list[str]) -> None:
    losses_of(ranks, replace(job, data=texts[ranks.rank]), folder, [0, 0, 0])


def test_other_text_on_one_server_is_refused_on_all(servers: Servers, tmp_path: Path) -> None:
    texts = []
    for number in range(3):
        text = tmp_path / f"{number}.txt"
        text.write_text(f"what is in file {number // 2} is not elsewhere\n" * 300)
        texts.append(str(text))
    job = replace(JOB, method="local")
    said = servers.do(3, tmp_path / "store", _other_text, job, tmp_path / "run", texts)
    assert all("server 3 has another text" in str(each) for each in said)


@pytest.mark.parametrize(
    ("method", "memory"), [("stages", "auto"), ("local", "auto"), ("local", "sharded")]
)
def test_what_fails_on_one_server_ends_all_and_says_where(
    servers: Servers, tmp_path: Path, method: str, memory: str
) -> None:
    job = replace(JOB, method=method, memory=memory)
    devices = [3, 3] if method == "stages" else [0, 0]
    first, second = servers.do(
        2, tmp_path / "store", _with_broken_disk, job, tmp_path / "run", devices
    )
    assert isinstance(second, CleaveError)
    assert "of 2" not in str(second)
    assert f"server 2 of 2 failed: {second}" in str(first)


@pytest.mark.parametrize("memory", ["plain", "sharded"])
def test_a_run_that_diverges_ends_on_all_servers_with_its_last_good_checkpoint(
    servers: Servers, tmp_path: Path, memory: str
) -> None:
    job = replace(
        JOB, method="local", memory=memory, learning_rate=1e18, warmup_steps=0, clip=0.0,
        schedule="constant", eval_every=0, checkpoint_every=1, save_total_limit=1,
    )  # fmt: skip
    folder = tmp_path / "run"
    said = servers.do(3, tmp_path / "store", losses_of, job, folder, [0, 0, 0])
    assert all("the run diverged in step" in str(each) for each in said)
    (path,) = (folder / CHECKPOINTS).iterdir()
    assert not first_not_finite(load_checkpoint(path).tensors)


def _with_broken_disk(ranks: Ranks, job: JobSpec, folder: Path, devices: list[int]) -> Any:
    """Train while the second server's step fails, by stages at once, else in its backward pass."""
    import cleave.training.loop.trainer as trainer

    def broken(*_: object) -> Any:
        raise CleaveError("this disk broke")

    def loss(self: Any, batch: Any) -> torch.Tensor:
        found = kept_loss(self, batch)
        middle = list(self.model.parameters())[len(list(self.model.parameters())) // 2]
        middle.register_hook(broken)
        return found

    kept, kept_loss = trainer.Trainer._gradients, trainer.Trainer._loss
    if ranks.rank == 1 and job.method == "stages":
        trainer.Trainer._gradients = broken  # type: ignore[method-assign, assignment]
    elif ranks.rank == 1:
        trainer.Trainer._loss = loss  # type: ignore[method-assign]
    try:
        return losses_of(ranks, job, folder, devices)
    finally:
        trainer.Trainer._gradients = kept  # type: ignore[method-assign]
        trainer.Trainer._loss = kept_loss  # type: ignore[method-assign]


def test_several_servers_refuse_to_be_lean(servers: Servers, tmp_path: Path) -> None:
    job = replace(JOB, method="local", memory="lean")
    said = servers.do(2, tmp_path / "store", losses_of, job, tmp_path / "run", [0, 0])
    assert all(isinstance(each, UsageError) and "sharded" in str(each) for each in said)


def _saved_on_a_full_disk(ranks: Ranks, folder: Path) -> int:
    """Write a checkpoint of what all have, which fails once; return the attempts."""
    held = {f"of {ranks.rank}.{n}": torch.full((3, n), float(ranks.rank)) for n in range(1, 4)}
    attempts = 0
    with ranks.collect(held) as collected:
        if collected is None:
            return 0
        fetch = collected.fetch

        def fetched(name: str) -> torch.Tensor:
            if attempts == 1 and name.endswith("2.2"):
                raise DiskFullError("no space")
            assert fetch is not None
            return fetch(name)

        while attempts < 2:
            attempts += 1
            try:
                save_checkpoint(folder, step=1, tensors=collected.tensors, meta={}, fetch=fetched)
            except DiskFullError:
                continue
    return attempts


def test_a_checkpoint_is_written_again_after_a_full_disk(servers: Servers, tmp_path: Path) -> None:
    folder = tmp_path / CHECKPOINTS
    assert servers.do(3, tmp_path / "store", _saved_on_a_full_disk, folder) == [2, 0, 0]
    saved = load_latest(folder)
    assert saved is not None
    assert {
        name: sorted(set(values.flatten().tolist())) for name, values in saved.tensors.items()
    } == {f"of {rank}.{n}": [float(rank)] for rank in range(3) for n in range(1, 4)}


@pytest.mark.parametrize("memory", ["plain", "sharded"])
def test_a_server_that_is_killed_is_noticed_by_the_others(tmp_path: Path, memory: str) -> None:
    job = replace(JOB, method="local", memory=memory, steps=50, eval_every=0)
    with closing(Servers(3)) as servers:
        said = servers.do(
            3, tmp_path / "store", losses_of, job, tmp_path / "run", [0, 0, 0], False, (2, 3)
        )
    assert said[2] is None
    assert all(isinstance(each, LostServerError) for each in said[:2])


def test_owners_share_what_there_is() -> None:
    owners = owners_of([100, 10, 10, 10, 10, 60], 2)
    assert owners == [0, 1, 0, 1, 0, 1]  # both hold the gradient of the first one
    assert owners_of([], 3) == []
