"""Each server keeps the weights that it owns; the others gather a layer's for its passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from cleave.errors import UsageError
from cleave.fleet.local_fallback import AbandonedError
from cleave.training.loop.job import JobSpec
from cleave.training.loop.trainer import Trainer
from cleave.training.servers.gradient_sums import GradientSums
from cleave.training.servers.ranks import Ranks
from cleave.training.servers.shared_weights import (
    OUTSIDE,
    Kind,
    SharedWeights,
    exchanges,
    weight_owners,
)
from cleave.training.tiles.offload import offload
from cleave.workload.models.build import build_model, enable_checkpointing
from cleave.workload.registry import find_model
from emulator.virtual import emulated
from profiles.fleets import paper_fleet
from tests.training.several_servers import Servers, alone, losses_of
from tests.training.test_lora import save_model

JOB = JobSpec(
    "opt-nano",
    steps=4,
    batch=5,
    seq=32,
    eval_every=2,
    eval_batches=3,
    checkpoint_every=2,
    method="local",
    memory="sharded",
)
CLOSE = 2e-5
NO_DEVICES = [0, 0, 0]


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    started = Servers(3)
    yield started
    started.close()


# --- what is exchanged ---


@given(st.integers(1, 4), st.integers(1, 6), st.booleans())
def test_every_layer_is_gathered_for_each_pass_and_freed_again(
    passes: int, layers: int, backward: bool
) -> None:
    whole: set[int] = set()
    seen: list[tuple[int, Kind, int]] = []
    for each in exchanges(passes, layers, backward=backward):
        if each.kind is Kind.FORWARD and backward and each.unit != OUTSIDE:
            whole = {OUTSIDE}  # layers are freed after their forward pass, but for the last one
        if each.kind is Kind.BACKWARD:
            assert whole == ({OUTSIDE, layers} if each.unit == layers else {OUTSIDE})
        if each.kind is Kind.DONE and each.unit != OUTSIDE:
            assert each.unit in whole
            whole.discard(each.unit)
        elif each.kind is not Kind.DONE:
            whole.add(each.unit)
        seen.append((each.number, each.kind, each.unit))
    assert len(set(seen)) == len(seen)
    for number in range(passes):
        for layer in range(1, layers + 1):
            assert (number, Kind.FORWARD, layer) in seen
            assert (number, Kind.DONE, layer) in seen
            assert ((number, Kind.BACKWARD, layer) in seen) is (backward and layer < layers)


# --- weights of another that lie at the same address ---


class Gathered:
    """Two layers whose weights come to lie in one piece of memory, one after the other."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(2)])
        self.values: list[Tensor] = [self.weight(n).detach().clone() for n in range(2)]
        fleet = emulated(paper_fleet(2))
        offload(self.layers, fleet)
        self.operands: Any = self.layers[0].__dict__["_cleave"]

    def weight(self, number: int) -> nn.Parameter:
        found = self.layers[number].weight
        assert isinstance(found, nn.Parameter)
        return found

    def gather(self, number: int, memory: Tensor) -> None:
        memory.copy_(self.values[number])
        self.weight(number).data = memory
        self.operands.bind(self.weight(number))

    def free(self, number: int) -> None:
        self.operands.unbind(self.weight(number), done=True)
        self.weight(number).data = torch.full((), torch.nan).expand(8, 8)


def test_a_weight_is_not_taken_for_another_that_had_its_address() -> None:
    case, memory, other = Gathered(), torch.empty(8, 8), torch.empty(8, 8)
    x = torch.randn(4, 8, requires_grad=True)
    products = []
    told = []
    for number in range(2):
        case.gather(number, memory)
        told.append((case.weight(number).data_ptr(), case.weight(number)._version))
        products.append(case.layers[number](x))
        case.free(number)
    assert told[0] == told[1]  # all that the address and autograd tell is the same
    for y, values in zip(products, case.values, strict=True):
        torch.testing.assert_close(y, x @ values.T)
    for number, where in ((1, other), (0, memory)):  # backward, each in other memory than before
        case.gather(number, where)
        (dx,) = torch.autograd.grad(products[number].sum(), x)
        torch.testing.assert_close(dx, torch.ones(4, 8) @ case.values[number])
        case.free(number)
    case.gather(0, memory)
    kept = case.layers[0](x)  # its graph lives on, and the weight gets new values
    case.free(0)
    case.values[0] = case.values[0] + 1
    case.operands.updated()
    case.gather(0, memory)
    torch.testing.assert_close(case.layers[0](x), x @ case.values[0].T)
    assert kept is not None


# --- what each server holds ---


def _held(model: nn.Module) -> int:
    """Return the bytes of all weights that are in memory."""
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}
    return sum(storage.nbytes() for storage in storages.values() if storage.nbytes() > 8)


def _pass(ranks: Ranks, computing: Sequence[int]) -> dict[str, Any]:
    """Do a step of two passes; return the bytes of weights that are held, and what came of it."""
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


def test_the_largest_weights_are_spread_also_where_they_are_frozen() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    for layer in list(model)[:2]:
        layer.requires_grad_(False)
    owners = weight_owners(model, 2)
    assert sorted(owners[f"{n}.weight"] for n in (0, 1)) == [0, 1]
    assert sorted(owners[f"{n}.weight"] for n in (2, 3)) == [0, 1]


# --- training ---


@pytest.mark.parametrize("family", ["gpt2", "qwen3_moe", "gemma2"])
def test_losses_are_those_of_one_server_whatever_layers_consist_of(
    servers: Servers, tmp_path: Path, corpus_file: Path, family: str
) -> None:
    """Layers with weights turned round, and with experts of which each takes a part of a weight."""
    model = save_model(tmp_path / family, family)
    job = replace(JOB, model=str(model), data=str(corpus_file), seq=16, method="tiles")
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

    if ranks.rank == 1:
        Trainer._loss = loss  # type: ignore[method-assign]
    try:
        losses = losses_of(ranks, job, folder, devices)
        return calls if ranks.rank else losses
    finally:
        Trainer._loss = kept  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("at", "deep"),
    [(2, False), (2, True), (5, False)],
    ids=["forward", "backward", "evaluating"],
)
@pytest.mark.parametrize("method", ["local", "tiles"])
def test_a_pass_that_is_given_up_is_done_again_by_all(
    servers: Servers, tmp_path: Path, at: int, deep: bool, method: str
) -> None:
    job = replace(JOB, method=method, accumulate=3, batch=4)
    devices = [2, 2, 2] if method == "tiles" else NO_DEVICES
    expected = alone(replace(job, memory="plain"), tmp_path / "one")
    first, passes = servers.do(
        2, tmp_path / "store", _with_fault, job, tmp_path / "many", devices, at, deep
    )
    assert first == pytest.approx(expected, abs=CLOSE)
    assert passes > at  # how many follow depends on how the servers share the batches


def test_layers_that_are_not_called_one_after_another_are_refused(
    servers: Servers, tmp_path: Path
) -> None:
    said = servers.do(2, tmp_path / "store", _called_twice, JOB, tmp_path / "run")
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
    Trainer._loss = loss  # type: ignore[method-assign]
    try:
        return losses_of(ranks, job, folder, NO_DEVICES)
    finally:
        Trainer._loss = kept  # type: ignore[method-assign]
