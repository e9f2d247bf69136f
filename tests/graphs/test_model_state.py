"""What graphs are known by: the same for layers that do the same, and another after any change."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cleave.graphs.calls import decoder_layers
from cleave.graphs.layer_parts import tensors_of
from cleave.graphs.model_state import content, graph_key, model_state
from tests.graphs.models import small_model, with_lora

X = torch.zeros(2, 12, 32)

OF_A_NEW_PROCESS = """
from tests.graphs.models import small_model, with_lora
from tests.graphs.test_model_state import key_of
print(key_of(with_lora(small_model("llama")), 1))
"""


def key_of(model: nn.Module, number: int = 0) -> str:
    layer = decoder_layers(model)[number]
    paths = {id(module): name for name, module in model.named_modules()}
    return graph_key(layer, tensors_of(layer), X, {}, [], path=paths[id(layer)])


@pytest.mark.parametrize("family", ["opt", "llama", "gpt2", "gemma2"])
def test_layers_that_differ_in_their_number_alone_have_one_key(family: str) -> None:
    model = small_model(family)
    numbers = range(len(decoder_layers(model)))
    wanted = 2 if family == "gemma2" else 1  # every second one has a window
    assert len({key_of(model, number) for number in numbers}) == wanted


def test_a_model_in_another_folder_has_the_same_key(tmp_path: Path) -> None:
    keys = []
    for folder in (tmp_path / "here", tmp_path / "there"):
        made: Any = small_model("llama")
        made.save_pretrained(folder)
        model = type(made).from_pretrained(folder)
        without = [*model.get_decoder().layers]  # as for the graph of the loss
        keys.append(graph_key(model, tensors_of(model), X, {}, [], without=without))
    assert keys[0] == keys[1]


@pytest.mark.nightly
def test_a_key_is_the_same_in_another_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", OF_A_NEW_PROCESS],
        capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.stdout.strip() == key_of(with_lora(small_model("llama")), 0)


def halved(x: torch.Tensor) -> torch.Tensor:
    return x / 2


def closure(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x * factor


class Scaled:
    """A function of its own, as code outside transformers has them."""

    def __init__(self, factor: Any) -> None:
        self.factor = factor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x * self.factor
        return found


HOLDS_ITSELF: dict[str, Any] = {}
HOLDS_ITSELF["again"] = HOLDS_ITSELF

DIFFERENT: list[tuple[Any, Any]] = [
    (closure(1.0), closure(2.0)),
    (functools.partial(torch.clamp, min=0.0), functools.partial(torch.clamp, min=1.0)),
    (functools.partial(torch.clamp, min=0.0), functools.partial(torch.relu)),
    (halved, torch.relu),
    (Scaled(1.0), Scaled(2.0)),
    (Scaled(torch.zeros(3000)), Scaled(torch.cat([torch.zeros(2999), torch.ones(1)]))),
    (Scaled(1.0).__call__, Scaled(2.0).__call__),
    ([closure(1.0)], [closure(2.0)]),
    (nn.GELU(), nn.GELU(approximate="tanh")),
    (torch.tensor(1.0), torch.tensor(2.0)),
    ({"a": 1}, {"a": 1, "again": HOLDS_ITSELF}),
]


@pytest.mark.parametrize(("before", "after"), DIFFERENT)
@pytest.mark.parametrize("name", ["act", "_private", "forward"])
def test_attributes_that_do_something_else_have_other_keys(
    name: str, before: Any, after: Any
) -> None:
    model = small_model("llama")
    layers = decoder_layers(model)
    keys, states = [], []
    for value in (before, before, after):
        vars(layers[0].mlp)[name] = value
        keys.append(key_of(model))
        states.append(model_state(model, layers))
    assert keys[0] == keys[1] != keys[2]
    assert states[0] == states[1] != states[2]


def test_functions_that_were_replaced_have_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    model = small_model("llama")
    before = key_of(model)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", halved)
    rotated = key_of(model)
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: x)
    assert len({before, rotated, key_of(model)}) == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.q.enable_adapters(enabled=False),
        lambda layer: layer.q.set_scale("default", 3.0),
        lambda layer: layer.q.set_adapter("other"),
        lambda layer: layer.q.lora_A["default"].weight.requires_grad_(requires_grad=False),
        lambda layer: layer.eval(),
        lambda layer: layer.register_forward_hook(lambda *given: None),
        lambda layer: layer.mlp.act_fn.register_forward_pre_hook(lambda *given: None),
        lambda layer: setattr(layer.input_layernorm, "weight", nn.Parameter(torch.ones(32))),
        lambda layer: layer.mlp.to(torch.bfloat16),
    ],
)
def test_a_model_that_was_changed_has_another_state(change: Callable[[Any], object]) -> None:
    import peft

    how = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    model: Any = peft.get_peft_model(small_model("llama"), how)
    model.add_adapter("other", how)
    layers = decoder_layers(model)
    before = model_state(model, layers)
    assert model_state(model, layers) == before
    layer: Any = layers[1]
    object.__setattr__(layer, "q", layer.self_attn.q_proj)
    named = model_state(model, layers)
    change(layer)
    assert model_state(model, layers) != named


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (0,)])
def test_values_are_told_apart(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.zeros(shape, dtype=dtype)
    before = content(tensor)
    assert content(tensor.clone()) == before
    if tensor.numel():
        tensor.view(-1)[-1] = 1
        assert content(tensor) != before
    if tensor.dim() == 2:
        assert content(tensor.T.contiguous().T) == content(tensor)
