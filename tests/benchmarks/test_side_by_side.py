"""The comparison's own parts: settings, rows and their file, faults, memory, stages of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig

from benchmarks.side_by_side.method import VARIANTS, Method, Way
from benchmarks.side_by_side.row import Ending, Row, from_json, to_json
from benchmarks.side_by_side.setting import Fault, Link, Setting
from benchmarks.side_by_side.workers.parts import StageModule, in_line, in_v

SETTING = Setting("opt-125m", 1024, 256, Link(100, 20))
METHODS = [
    Method(way, dtype, variant)
    for way in Way
    for dtype in ("fp32", "bf16")
    for variant in ("", *VARIANTS[way])
]


def row(name: str, seconds: float = 1.0, **more: object) -> Row:
    """Return a row of one method in `SETTING`."""
    made = Row(Method.of(name), SETTING, seconds=[seconds, seconds], losses=[4.0, 3.0, 2.0])
    return replace(made, **more)  # type: ignore[arg-type]


# --- rows and their file ---


@given(st.sampled_from(METHODS), st.sampled_from([*Fault]), st.sampled_from([*Ending]))
def test_a_row_is_the_same_after_json(method: Method, fault: Fault, ending: Ending) -> None:
    made = Row(method, replace(SETTING, fault=fault), seconds=[1.5], losses=[3.0, 2.0])
    made.ending, made.down_bytes, made.reason = ending, [1.0, 2.0], "a reason"
    assert from_json(to_json(made)) == made


# --- stages of a pipeline ---


@given(st.integers(0, 100), st.floats(0, 30), st.integers(1, 16))
def test_stages_hold_each_layer_once_and_in_order(layers: int, head: float, ranks: int) -> None:
    for cuts in (in_line(layers, head, ranks), in_v(layers, head, ranks)):
        assert [layer for part in cuts for layer in part] == list(range(layers))
    assert len(in_line(layers, head, ranks)) == ranks
    assert len(in_v(layers, head, ranks)) == 2 * ranks


CONFIGS = {
    "opt": OPTConfig(
        hidden_size=16, ffn_dim=32, num_hidden_layers=3, num_attention_heads=2, dropout=0.0,
        word_embed_proj_dim=16, vocab_size=64, max_position_embeddings=32,
    ),
    "llama": LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=64, max_position_embeddings=32, tie_word_embeddings=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("in_turn", [in_line, in_v])
def test_stages_one_after_another_are_the_model(
    family: str, in_turn: Callable[[int, float, int], list[range]]
) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family])
    ids = torch.arange(24).reshape(2, 12)
    expected = model(input_ids=ids, use_cache=False).logits
    torch.autograd.backward(expected.square().mean())
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    cuts = in_turn(3, 1.0, 3)
    stages = [
        StageModule(model, part, first=index == 0, last=index == len(cuts) - 1)
        for index, part in enumerate(cuts)
    ]
    x = ids
    for stage in stages:
        x = stage(x)
    torch.autograd.backward(x.square().mean())
    assert torch.equal(x, expected)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, gradients[name]), name
