"""Several servers train as one does: losses, checkpoints on any number, faults of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from cleave.errors import CleaveError, UsageError
from cleave.fleet.local_fallback import AbandonedError
from cleave.training.loop.checkpoint import load_checkpoint, load_latest, save_checkpoint
from cleave.training.loop.disk import DiskFullError
from cleave.training.loop.finite import first_not_finite
from cleave.training.loop.job import JobSpec
from cleave.training.loop.run_folder import CHECKPOINTS, RunFolder
from cleave.training.loop.trainer import Trainer
from cleave.training.servers.gradient_sums import GradientSums
from cleave.training.servers.ranks import LostServerError, Ranks, owners_of
from cleave.training.servers.shared_weights import SharedWeights
from cleave.workload.build import build_model, enable_checkpointing
from cleave.workload.registry import find_model
from tests.training.runs import nightly, save_model
from tests.training.several_servers import Servers, alone, losses_of

pytestmark = pytest.mark.slow

JOB = JobSpec(
    "opt-nano", steps=2, batch=5, seq=32, eval_every=2, eval_batches=2, checkpoint_every=2
)
CLOSE = 2e-5


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    started = Servers(3)
    yield started
    started.close()


SHARDED = {"memory": "sharded"}
SHARDED_JOB = replace(JOB, method="local", memory="sharded")
SHORT: dict[str, Any] = {"steps": 1, "batch": 2, "seq": 16, "eval_every": 1, "eval_batches": 1}


@pytest.mark.parametrize(
    "changed",
    [
        {"method": "stages"},
        {**SHARDED, "batch": 2, "accumulate": 3, "clip": 0.05},  # a server has nothing to do
        *(
            nightly(changed)
            for changed in (
                {"accumulate": 2},
                {"lora": "r=4,dropout=0.3"},
                # Devices keep weights for all micro-batches.
                {**SHARDED, "method": "tiles", "accumulate": 2, "batch": 3, "seq": 16},
                {**SHARDED, "dtype": "fp16", "clip": 0.0},
                {**SHARDED, "optimizer": "muon"},
                {"method": "tiles", "accumulate": 2},
                {"dtype": "bf16", "clip": 0.05},
                {"dtype": "fp16", "clip": 0.0},
                {"lora": "r=4", "keep_best": True},
                {"batch": 2},
                {**SHARDED, "method": "auto"},
                {**SHARDED, "method": "tiles", "model": "llama-nano"},  # a head of its own weights
                {**SHARDED, "method": "tiles", "dtype": "bf16"},
                {**SHARDED, "method": "tiles", "lora": "r=4", "keep_best": True},
                {**SHARDED, "optimizer": "adafactor"},
                {**SHARDED, "packing": "separate"},
                {**SHARDED, "lora": "r=4,save=lm_head"},
            )
        ),
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


@pytest.mark.parametrize("memory", ["plain", nightly("sharded")])
def test_the_first_server_alone_draws_samples(
    servers: Servers, tmp_path: Path, memory: str
) -> None:
    """It does so unless it lacks the weights that other servers have. Losses stay the same."""
    job = replace(JOB, **{"method": "local", "memory": memory, **SHORT, "steps": 2})
    expected = alone(replace(job, memory="plain"), tmp_path / "one")
    sampled = replace(job, sample_every=1, prompt="def")
    first, *_ = servers.do(2, tmp_path / "store", losses_of, sampled, tmp_path / "many", [0, 0])
    assert first == pytest.approx(expected, abs=CLOSE)
    events = [record["event"] for record in RunFolder(tmp_path / "many").records()]
    assert events.count("sample") == (2 if memory == "plain" else 0)


@pytest.mark.parametrize(
    ("then", "memory"), [(2, "sharded"), nightly(1, "sharded"), nightly(2, "plain")]
)
def test_a_checkpoint_of_three_servers_goes_on_on_any_number(
    servers: Servers, tmp_path: Path, then: int, memory: str
) -> None:
    plain, folder = replace(JOB, method="local", memory="plain"), tmp_path / "many"
    alone(plain, tmp_path / "one")
    expected = alone(replace(plain, steps=4), tmp_path / "one", resume=True)
    job = replace(plain, memory=memory)
    servers.do(3, tmp_path / "store", losses_of, job, folder, [0, 0, 0])
    if then == 1:
        found = alone(replace(plain, steps=4), folder, resume=True)
    else:
        job, again = replace(job, steps=4), tmp_path / "again"
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
    assert all("server 3 has a different text" in str(each) for each in said)


@pytest.mark.parametrize(
    ("method", "memory"), [nightly("stages", "auto"), ("local", "auto"), ("local", "sharded")]
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


@pytest.mark.parametrize("memory", [nightly("plain"), "sharded"])
def test_a_run_that_diverges_ends_on_all_servers_with_its_last_good_checkpoint(
    servers: Servers, tmp_path: Path, memory: str
) -> None:
    job = replace(
        JOB, steps=4, method="local", memory=memory, learning_rate=1e18, warmup_steps=0, clip=0.0,
        schedule="constant", eval_every=0, checkpoint_every=1, save_total_limit=1,
    )  # fmt: skip
    folder = tmp_path / "run"
    said = servers.do(3, tmp_path / "store", losses_of, job, folder, [0, 0, 0])
    assert all("the run diverged in step" in str(each) for each in said)
    (path,) = (folder / CHECKPOINTS).iterdir()
    assert not first_not_finite(load_checkpoint(path).tensors)


def _with_broken_disk(ranks: Ranks, job: JobSpec, folder: Path, devices: list[int]) -> Any:
    """Train while the second server's step fails, by stages at once, else in its backward pass."""
    kept = Trainer._loss

    def broken(*_: object) -> Any:
        raise CleaveError("this disk broke")

    def loss(self: Any, batch: Any) -> torch.Tensor:
        found = kept(self, batch)
        middle = list(self.model.parameters())[len(list(self.model.parameters())) // 2]
        middle.register_hook(broken)
        return found

    name, by = ("_gradients", broken) if job.method == "stages" else ("_loss", loss)
    with patch.object(Trainer, name, by if ranks.rank == 1 else getattr(Trainer, name)):
        return losses_of(ranks, job, folder, devices)


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


@pytest.mark.parametrize("memory", [nightly("plain"), "sharded"])
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


# --- sharded weights ---


def _held(model: nn.Module) -> int:
    """Return the bytes of all weights that are in memory."""
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}
    return sum(storage.nbytes() for storage in storages.values() if storage.nbytes() > 8)


def _pass(ranks: Ranks, computing: Sequence[int]) -> dict[str, Any]:
    """Do a step of two passes. Return what the server holds before and after, and the errors."""
    spec = find_model("opt-nano")
    model, plain = (build_model(spec, seed=0) for _ in range(2))
    enable_checkpointing(model)
    ids = torch.randint(0, spec.vocabulary, (1, 16), generator=torch.Generator().manual_seed(1))
    weights = SharedWeights(model, ranks)
    total = _held(model)
    weights.begin_sharing()
    freed = _held(model)
    within: list[int] = []
    layers = model.get_decoder().layers
    for layer in layers:
        layer.mlp_hook = layer.fc1.register_forward_hook(lambda *_: within.append(_held(model)))
    trained = dict(model.named_parameters())
    ordered = {name: trained[name] for name in weights.order}
    weights.begin(2, lambda: GradientSums(ranks, ordered, weights.owners))
    passes = computing[ranks.rank]
    for left in reversed(range(passes)):
        with weights.computing(left):
            model(ids).logits.square().mean().backward()
    found = weights.finish()
    plain(ids).logits.square().mean().backward()
    expected = dict(plain.named_parameters())
    far = max(
        [
            float((p.grad - sum(computing) * expected[n].grad).abs().max())
            for n, p in trained.items()
            if weights.owners[n] == ranks.rank and p.grad is not None
        ],
        default=0.0,
    )
    others = [n for n, p in trained.items() if weights.owners[n] != ranks.rank and p.grad is None]
    outside = sum(trained[n].nbytes for n in trained if ".layers." not in n)
    layer = max(sum(p.nbytes for p in each.parameters()) for each in layers)
    return {
        "total": total,
        "freed": freed,
        "owned": sum(p.nbytes for n, p in trained.items() if weights.owners[n] == ranks.rank),
        "most": max(within, default=0),
        "bound": outside + layer,
        "after": _held(model),
        "far": far,
        "found": found == weights.order,
        "sent": len(others) == sum(owner != ranks.rank for owner in weights.owners.values()),
    }


@pytest.mark.parametrize("computing", [[2, 2, 2], [2, 1, 0]])
def test_a_server_has_its_own_weights_and_while_it_computes_a_layer_those_of_that(
    servers: Servers, tmp_path: Path, computing: list[int]
) -> None:
    all_said = servers.do(3, tmp_path / "store", _pass, computing)
    assert sum(said["freed"] for said in all_said) == all_said[0]["total"]
    for said, passes in zip(all_said, computing, strict=True):
        assert said["freed"] == said["owned"] == said["after"]
        assert said["freed"] < said["total"] / 2
        assert said["most"] <= said["owned"] + said["bound"]
        assert (said["most"] > said["owned"]) is bool(passes)
        assert said["far"] < 1e-6
        assert said["found"]
        assert said["sent"]


@pytest.mark.parametrize("family", ["gpt2", *(nightly(name) for name in ("qwen3_moe", "gemma2"))])
def test_losses_are_those_of_one_server_whatever_layers_consist_of(
    servers: Servers, tmp_path: Path, corpus_file: Path, family: str
) -> None:
    """Layers with weights turned round, and with experts of which each takes a part of a weight."""
    model = save_model(tmp_path / family, family)
    job = replace(SHARDED_JOB, model=str(model), data=str(corpus_file), method="tiles", **SHORT)
    expected = alone(replace(job, memory="plain", method="local"), tmp_path / "one")
    found = servers.do(2, tmp_path / "store", losses_of, job, tmp_path / "many", [2, 2])[0]
    assert found == pytest.approx(expected, abs=CLOSE)


def _with_fault(
    ranks: Ranks, job: JobSpec, folder: Path, devices: Sequence[int], at: int, deep: bool
) -> Any:
    """Train while the second server gives up one of its passes, forward or in the middle back.

    Returns:
        The losses; on the second server, how many passes it began.
    """
    kept, calls, handles = Trainer._loss, 0, list[Any]()

    def given_up(*_: object) -> Any:
        raise AbandonedError("no device is left")

    def loss(self: Any, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == at and not deep:
            given_up()
        found = kept(self, batch)
        if calls == at:
            handles.append(self.model.get_decoder().layers[1].fc1.weight.register_hook(given_up))
        while calls > at and handles:
            handles.pop().remove()
        return found

    with patch.object(Trainer, "_loss", loss if ranks.rank == 1 else kept):
        losses = losses_of(ranks, job, folder, devices)
    return calls if ranks.rank else losses


@pytest.mark.parametrize(
    ("method", "at", "deep"),
    [
        nightly("local", 2, False),
        ("local", 5, False),
        nightly("tiles", 2, True),
        nightly("local", 2, True),
        nightly("tiles", 2, False),
        nightly("tiles", 5, False),
    ],
)
def test_a_pass_that_is_given_up_is_done_again_by_all(
    servers: Servers, tmp_path: Path, method: str, at: int, deep: bool
) -> None:
    """In a step forward, in a step backward, or while evaluating, which begins with the 5th."""
    job = replace(SHARDED_JOB, method=method, accumulate=3, batch=4)
    devices = [2, 2, 2] if method == "tiles" else [0, 0, 0]
    expected = alone(replace(job, memory="plain"), tmp_path / "one")
    first, passes = servers.do(
        2, tmp_path / "store", _with_fault, job, tmp_path / "many", devices, at, deep
    )
    assert first == pytest.approx(expected, abs=CLOSE)
    assert passes > at  # how many follow depends on how the servers share the batches


def test_layers_that_are_not_called_one_after_another_are_refused(
    servers: Servers, tmp_path: Path
) -> None:
    said = servers.do(2, tmp_path / "store", _called_twice, SHARDED_JOB, tmp_path / "run")
    assert all(isinstance(each, UsageError) and "one after another" in str(each) for each in said)


def _called_twice(ranks: Ranks, job: JobSpec, folder: Path) -> Any:
    """Train a model that calls its first layer once more in each pass."""
    kept = Trainer._loss

    def again(layer: Any, arguments: Any, kwargs: Any, output: Any) -> None:
        handles.pop().remove()
        layer(*arguments, **kwargs)

    def loss(self: Any, batch: Any) -> Tensor:
        layer = self.model.get_decoder().layers[0]
        handles.append(layer.register_forward_hook(again, with_kwargs=True))
        return kept(self, batch)

    handles = list[Any]()
    with patch.object(Trainer, "_loss", loss):
        return losses_of(ranks, job, folder, [0, 0, 0])
