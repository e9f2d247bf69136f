"""What of each family goes to a fleet, what stays here and why; and the choice by the caller."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cleave
from cleave.errors import UsageError
from cleave.fleet.fleet import Fleet
from tests.training.runs import nightly

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {**GROUPED, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "opt": {"vocab_size": 96, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
    "llama": GROUPED, "mistral": GROUPED, "qwen2": GROUPED, "qwen3": GROUPED, "gemma": GROUPED,
    "gemma2": GROUPED, "gemma3_text": GROUPED, "phi": SIZES,
    "gpt2": {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "mixtral": EXPERTS, "qwen3_moe": {**EXPERTS, "moe_intermediate_size": 24},
    "gpt_neox": {**SIZES, "max_position_embeddings": 64},
    "bloom": {"vocab_size": 96, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "falcon": {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2,
               "num_attention_heads": 4, "bos_token_id": 1, "eos_token_id": 2},
}  # fmt: skip
OWN_FORWARD = {"falcon"}  # its layers are subclasses of nn.Linear


def model_of(family: str) -> nn.Module:
    """Return a small model of a family, without dropout."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config: Any = AutoConfig.for_model(family, **FAMILIES[family])
    for key in config.to_dict():
        if "dropout" in key or key.endswith("pdrop"):
            setattr(config, key, 0.0)
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model.train()


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with cleave.emulated(1) as made:  # a plan for several devices takes much longer
        yield made


def gradients(model: Any) -> dict[str, Tensor]:
    model.zero_grad()
    ids = torch.randint(3, 96, (2, 16), generator=torch.Generator().manual_seed(0))
    torch.autograd.backward(model(input_ids=ids, labels=ids).loss)
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [nightly(name) if name == "qwen3_moe" else name for name in FAMILIES]
)
def test_of_every_family_nearly_all_that_multiplies_goes(fleet: Fleet, family: str) -> None:
    """And what goes gets the gradients of plain PyTorch."""
    model = model_of(family)
    with warnings.catch_warnings():
        warnings.simplefilter("error" if family not in OWN_FORWARD else "ignore")
        report = cleave.offload(model, fleet)
    counted = sum(report.sent.values()) + sum(each.parameters for each in report.stayed.values())
    assert counted == sum(p.numel() for p in model.parameters())
    if family in OWN_FORWARD:
        assert "its own forward" in report.shortfall
    else:
        assert report.share > 0.98, str(report)
    found = gradients(model)
    cleave.restore(model)
    expected = gradients(model)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        largest = float(gradient.abs().max())
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5 * largest + 1e-9)


@pytest.mark.slow
def test_experts_multiply_on_the_fleet(fleet: Fleet) -> None:
    """Each expert that a token goes to takes two products there, and four for its gradients."""
    model = model_of("mixtral")
    before = fleet.counters().gemms
    report = cleave.offload(model, fleet, include=["*.experts"])
    assert len(report.sent) == 2
    gradients(model)
    products = fleet.counters().gemms - before
    assert products % 6 == 0
    assert 6 * 2 <= products <= 6 * 2 * 4
    cleave.restore(model)


def test_what_stayed_is_named_with_the_reason(fleet: Fleet) -> None:
    class Own(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    model = nn.ModuleDict(
        {
            "first": nn.Linear(8, 8),
            "own": Own(64, 64),
            "norm": nn.LayerNorm(8),
            "look": nn.Embedding(9, 8),
            "attention": nn.MultiheadAttention(8, 2),
            "patches": nn.Conv2d(3, 8, 2),
        }
    )
    with pytest.warns(UserWarning, match="only 2% of the parameters .* 'own': Own is a subclass"):
        report = cleave.offload(model, fleet)
    assert report.sent == {"first": 72}
    reasons = {name: each.reason for name, each in report.stayed.items()}
    assert "looked up" in reasons["look"]
    assert "vectors only" in reasons["norm"]
    assert "nn.MultiheadAttention" in reasons["attention"]
    assert "Conv2d" in reasons["patches"]
    assert {n for n, each in report.stayed.items() if each.multiplies} == {
        "own", "attention", "attention.out_proj", "patches",
    }  # fmt: skip
    assert "to the fleet: 1 layers, 72 parameters" in str(report)
    assert "here: own, 4,160 parameters" in str(report)


def test_the_caller_chooses(fleet: Fleet) -> None:
    model = model_of("llama")
    report = cleave.offload(model, fleet, include=["model.layers.0.*"], exclude=["*.mlp.*"])
    assert {name.rsplit(".", 1)[0] for name in report.sent} == {"model.layers.0.self_attn"}
    assert report.stayed["lm_head"].reason == "include and exclude do not select it"
    cleave.restore(model)
    with pytest.raises(UsageError, match=r"no nn\.Linear .* that include and exclude select"):
        cleave.offload(model, fleet, include=["decoder.*"])


def test_small_products_are_done_here(fleet: Fleet) -> None:
    model = model_of("llama")
    tokens, queries = 32, 32 * 32
    before = fleet.counters().gemms
    report = cleave.offload(model, fleet, min_flops=2 * tokens * queries + 1)
    assert "here: products of fewer than 65,537 operations" in str(report)
    found = gradients(model)
    assert fleet.counters().gemms - before == 3 * (3 * 2 + 1)  # gate, up, down, and the head
    cleave.restore(model)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"include": "lm_head"},
            r"include is 'lm_head'; use a list of patterns, such as \['lm_head'\]",
        ),
        ({"min_flops": -1}, "min_flops must be 0 or more operations, not -1"),
        ({"method": "stages", "exclude": ["lm_head"]}, "apply only to method 'tiles'"),
    ],
)
def test_choices_that_are_refused(fleet: Fleet, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        cleave.offload(model_of("llama"), fleet, **options)
