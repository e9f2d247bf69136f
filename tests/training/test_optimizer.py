"""Updates are those of torch's optimizers, in and after the backward pass; rates fall as asked."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import cleave
from cleave.errors import CleaveError, UsageError
from cleave.training.loop.job import Decay, JobSpec, OptimizerKind
from cleave.training.loop.optimizer import Optimizer, Schedule, UpdateRule
from cleave.training.lora.adapters import add_adapters
from cleave.training.lora.spec import LoraSpec
from tests.graphs.models import VOCABULARY, small_model

STEPS = 6


class Small(nn.Module):
    """An embedding that is the head as well, and two layers between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embedding = nn.Embedding(11, 6)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def loss(self, seed: int) -> torch.Tensor:
        ids = torch.randint(11, (5,), generator=torch.Generator().manual_seed(seed))
        logits = self.head(self.layers(self.embedding(ids[:-1])))
        return nn.functional.cross_entropy(logits, ids[1:])


def backward(model: Small, seed: int) -> Callable[[], float]:
    def run() -> float:
        loss = model.loss(seed)
        torch.autograd.backward(loss)
        return float(loss.detach())

    return run


def plain(kind: OptimizerKind, model: Small) -> list[torch.optim.Optimizer]:
    """The same by hand: matrices decay, vectors do not."""
    hidden: list[Any] = [model.layers[0].weight, model.layers[2].weight]
    matrices: list[Any] = [model.embedding.weight, *hidden]
    vectors: list[Any] = [model.layers[0].bias, model.layers[2].bias]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    match kind:
        case OptimizerKind.ADAMW:
            return [torch.optim.AdamW(groups, betas=(0.8, 0.9))]
        case OptimizerKind.SGD:
            return [torch.optim.SGD(groups, momentum=0.7)]
        case OptimizerKind.ADAFACTOR:
            return [torch.optim.Adafactor(groups)]
        case OptimizerKind.MUON:
            groups[0]["params"] = matrices[:1]
            how: Any = {"momentum": 0.7, "adjust_lr_fn": "match_rms_adamw"}
            return [
                torch.optim.AdamW(groups, betas=(0.8, 0.9)),
                torch.optim.Muon(hidden, weight_decay=0.1, **how),
            ]


@pytest.mark.parametrize("clip", [0.0, 0.2])
@pytest.mark.parametrize("kind", OptimizerKind)
def test_updates_are_those_of_torch(kind: OptimizerKind, clip: float) -> None:
    """After the backward pass, in it, and across a checkpoint."""
    rule = UpdateRule(kind, 0.1, (0.8, 0.9), 0.7)
    model = Small()
    models = [copy.deepcopy(model) for _ in range(3)]
    optimizers = [
        Optimizer(each, rule, clip=clip, in_backward=lean)
        for each, lean in zip(models, (False, True, False), strict=True)
    ]
    theirs = plain(kind, model)
    for step in range(STEPS):
        rate = 0.01 * (step + 1)
        for optimizer in theirs:
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = rate
        torch.autograd.backward(model.loss(step))
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        for optimizer in theirs:
            optimizer.step()
        for mine, each in zip(models, optimizers, strict=True):
            each.step(rate, backward(mine, step))
        if step == 2:  # the third one goes on from a checkpoint
            saved = {name: tensor.clone() for name, tensor in optimizers[2].tensors().items()}
            optimizers[2] = Optimizer(models[2], rule, clip=clip, in_backward=False)
            optimizers[2].load_tensors(saved)
    for mine in models:
        for (name, found), expected in zip(
            mine.named_parameters(), model.parameters(), strict=True
        ):
            assert torch.allclose(found, expected, rtol=1e-5, atol=1e-7), name
    assert torch.equal(models[0].head.weight, models[2].head.weight)


def state_space() -> nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    sizes: Any = {"hidden_size": 16, "state_size": 4, "num_hidden_layers": 1, "expand": 2}
    model: nn.Module = MambaForCausalLM(
        MambaConfig(vocab_size=VOCABULARY, time_step_rank=2, **sizes)
    )
    return model


def adapted(targets: str, save: str = "") -> nn.Module:
    model: Any = small_model("llama", tie_word_embeddings=True)
    spec = LoraSpec(4, targets=(targets,), save=(save,) if save else (), dora=True)
    inner: nn.Module = add_adapters(model, spec).get_base_model()
    return inner


LLAMA = r"layers\.\d\.(mlp\.\w+_proj|self_attn\.[qkvo]_proj)\.weight"


@pytest.mark.slow
@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize(
    ("make", "matrices"),
    [
        (lambda: small_model("llama"), LLAMA),
        (lambda: small_model("llama", tie_word_embeddings=True), LLAMA),
        (lambda: small_model("opt"), r"layers\.\d\.(fc\d|self_attn\.\w+_proj)\.weight"),
        (lambda: small_model("gpt2"), r"h\.\d\.(attn|mlp)\.c_(attn|proj|fc)\.weight"),
        (state_space, r"mixer\.(in|x|dt|out)_proj\.weight"),
        (lambda: adapted("q_proj"), r"q_proj\.lora_[AB]\.default\.weight"),
        (lambda: adapted("lm_head"), r"there is none"),
        (lambda: adapted("q_proj", "embed_tokens"), r"q_proj\.lora_[AB]\.default\.weight"),
        (lambda: adapted("q_proj", "lm_head"), r"q_proj\.lora_[AB]\.default\.weight"),
    ],
)
def test_muon_is_for_matrices_of_hidden_layers_and_adamw_for_what_remains(
    make: Callable[[], Any], matrices: str, offloaded: bool
) -> None:
    """Not for embeddings of tokens or positions, the head, or what no product has."""
    model, theirs = make(), make()
    theirs.load_state_dict(model.state_dict())
    named = {n: p for n, p in theirs.named_parameters() if p.requires_grad}
    hidden = [p for n, p in named.items() if re.search(matrices + "$", n)]
    others = [p for n, p in named.items() if not re.search(matrices + "$", n)]
    assert others or "lora" in matrices
    how: Any = {"lr": 0.02, "momentum": 0.9, "adjust_lr_fn": "match_rms_adamw"}
    optimizers: list[Any] = [torch.optim.Muon(hidden, weight_decay=0.0, **how)] if hidden else []
    optimizers += [torch.optim.AdamW(others, lr=0.02, betas=(0.9, 0.95), weight_decay=0.0)]
    with cleave.emulated(2) if offloaded else nullcontext() as fleet:
        if fleet is not None:
            cleave.offload(model, fleet)
        mine = Optimizer(model, UpdateRule(OptimizerKind.MUON), clip=0.0, in_backward=False)
    for step in range(3):
        torch.manual_seed(step)
        gradients = {name: torch.randn_like(p) for name, p in named.items()}

        def give(gradients: dict[str, torch.Tensor] = gradients) -> float:
            for name, gradient in gradients.items():
                mine.parameters[name].grad = gradient.clone()
            return 0.0

        mine.step(0.02, give)
        for name, parameter in named.items():
            parameter.grad = gradients[name]
        for optimizer in optimizers:
            optimizer.step()
    for name, expected in named.items():
        assert torch.allclose(mine.parameters[name], expected, rtol=1e-5, atol=1e-7), name


@pytest.mark.parametrize(
    "rule", [UpdateRule(), UpdateRule(OptimizerKind.SGD, momentum=0.0)], ids=["adamw", "plain sgd"]
)
def test_state_is_restored_also_of_parameters_that_have_none(rule: UpdateRule) -> None:
    """Plain SGD keeps no state, and neither does a parameter without a gradient so far."""
    first, second = Small(), Small()
    before = Optimizer(first, rule, clip=0.0, in_backward=False)

    def give() -> float:
        for name, parameter in before.parameters.items():
            if name != "embedding.weight":
                parameter.grad = torch.ones_like(parameter)
        return 0.0

    before.step(0.01, give)
    after = Optimizer(second, rule, clip=0.0, in_backward=False)
    after.load_tensors(before.tensors())
    assert after.tensors().keys() == before.tensors().keys()
    assert not any("embedding" in name for name in after.tensors())


def test_a_checkpoint_of_another_model_is_refused() -> None:
    optimizer = Optimizer(Small(), UpdateRule(), clip=0.0, in_backward=False)
    with pytest.raises(CleaveError, match=r"has no optimizer state for 'embedding\.weight'"):
        optimizer.load_tensors({"optimizer.step.other": torch.zeros(1)})


@pytest.mark.parametrize("decay", Decay)
def test_rates_rise_to_the_peak_and_fall_to_the_floor(decay: Decay) -> None:
    schedule = Schedule(0.5, 10, 110, decay, 0.2, 20)
    rates = [schedule.rate(step) for step in range(111)]
    assert rates[:10] == pytest.approx([0.05 * (step + 1) for step in range(10)])
    assert max(rates) == pytest.approx(0.5)
    assert all(before >= after - 1e-12 for before, after in pairwise(rates[10:]))
    assert rates[110] == pytest.approx(0.5 if decay is Decay.CONSTANT else 0.1)
    middle = {Decay.COSINE: 0.3, Decay.LINEAR: 0.3, Decay.CONSTANT: 0.5, Decay.WSD: 0.5}
    assert rates[60] == pytest.approx(middle[decay])
    linear = Schedule(0.4, 0, 4, Decay.LINEAR, 0.0, 0)  # without warm-up
    assert [linear.rate(n) for n in range(4)] == pytest.approx([0.4, 0.3, 0.2, 0.1])
    if decay is Decay.WSD:
        assert rates[90] == pytest.approx(0.5)
        assert rates[100] == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"schedule": "steps"}, "--schedule is 'steps'; use one of cosine, linear, constant, wsd"),
        ({"packing": "apart"}, "--packing is 'apart'; use one of joined, separate"),
        (
            {"optimizer": "nonesuch"},
            "--optimizer is 'nonesuch'; use one of adamw, sgd, adafactor, muon",
        ),
        ({"optimizer": "sgd"}, "--optimizer sgd needs --learning-rate"),
        ({"beta2": 1.0}, "--beta2 must be a number from 0 to below 1, not 1.0"),
        ({"data": "a\udcff.txt"}, "--data is 'a\\udcff.txt', which is not UTF-8; rename the file"),
        ({"warmup_steps": -2}, "--warmup-steps must be -1 or more, not -2"),
        ({"floor": 1.5}, "--floor must be a number from 0 to 1, not 1.5"),
    ],
)
def test_a_job_that_asks_for_what_there_is_not(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as raised:
        JobSpec("opt-nano", **changed)
    assert said in str(raised.value)


def test_the_fleet_hears_of_each_updated_parameter_layers_first() -> None:
    """Devices need the layers first; the server needs the embedding last."""
    model = Small()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    mine = Optimizer(model, UpdateRule(), clip=1.0, in_backward=False)
    heard: list[str] = []

    def updated(parameter: torch.Tensor) -> None:
        (name,) = (n for n, p in mine.parameters.items() if p is parameter)
        assert not torch.equal(parameter, before[name])
        heard.append(name)

    mine.step_whole(0.1, backward(model, 1), updated)
    layers = [name for name in before if name.startswith("layers")]
    assert heard == [*layers, "embedding.weight"]


@pytest.mark.parametrize("kind", OptimizerKind)
def test_devices_run_an_update_or_refuse_it(kind: OptimizerKind) -> None:
    rule = UpdateRule(kind)
    if kind in (OptimizerKind.ADAFACTOR, OptimizerKind.MUON):
        with pytest.raises(UsageError, match=f"devices cannot run {kind.value} updates"):
            _ = rule.moments
        return
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = rule.optimizer(parameter, hidden=True)
    parameter.grad = torch.ones(2, 2)
    optimizer.step()
    assert {*rule.moments} == {*optimizer.state[parameter]} - {"step"}
