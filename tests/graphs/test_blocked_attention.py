"""Attention over blocks of queries: the same results as at once, whatever the blocks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from benchmarks.graph_memory import write
from cleave import graph_names as names
from cleave.attention_blocks import BLOCKS, Blocks
from cleave.errors import LayerGraphError
from cleave.graphs.attention import attention
from cleave.graphs.calls import LayerCall, layer_calls
from cleave.graphs.layer_parts import LayerGraphs, LayerPart, export_layer, tensors_of
from cleave.machine.graph_session import Array, GraphSession
from tests.examples import examples
from tests.graphs.models import small_model

TOKENS = 23
EXACT = 1e-6
"""Of the largest element."""

_SUMS = names.new_total("")


def blocks_of(rows: int, heads: int, keys: int) -> Blocks:
    """Blocks of so many queries, for any sequence."""
    return Blocks(whole_bytes=0, block_bytes=rows * heads * keys * 4)


def test_short_sequences_go_at_once_and_long_ones_within_a_bound() -> None:
    assert BLOCKS.rows(12, 512, 512) == 512
    assert BLOCKS.rows(12, 4096, 4096) * 12 * 4096 * 4 <= BLOCKS.block_bytes
    assert Blocks(whole_bytes=0, block_bytes=0).rows(12, 512, 512) == 1
    assert Blocks(whole_bytes=0).rows(1, 8, 8) == 8


class _Caller(nn.Module):
    is_causal = True


@st.composite
def masks(draw: st.DrawFn, batch: int, tokens: int) -> Tensor | None:
    """No mask, or one of truth values or of what is added to scores; rows may see no key."""
    kind = draw(st.sampled_from(["none", "truth", "added", "of keys"]))
    if kind == "none":
        return None
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    rows = 1 if kind == "of keys" else tokens
    seen = torch.rand(batch, 1, rows, tokens, generator=generator) < draw(st.floats(0, 1))
    return torch.where(seen, 0.0, -1e4) if kind == "added" else seen


@settings(deadline=None, max_examples=examples(60))
@given(st.data())
def test_the_blocks_do_not_change_the_result(data: st.DataObject) -> None:
    batch, tokens, rows = (data.draw(st.integers(1, most)) for most in (3, 20, 20))
    keys_of = data.draw(st.sampled_from([1, 2]))
    mask = data.draw(masks(batch, tokens))
    softcap = data.draw(st.sampled_from([None, 5.0]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    tensors = [normal(batch, heads, tokens, 4) for heads in (2, keys_of, keys_of)]
    mask = mask.double() if mask is not None and mask.dtype is not torch.bool else mask
    dy = normal(batch, tokens, 2, 4)

    def found(blocks: Blocks) -> list[Tensor]:
        inputs = [t.clone().requires_grad_() for t in tensors]
        query, key, value = inputs
        y, _ = attention(blocks, _Caller(), query, key, value, mask, softcap=softcap)
        return [y.detach(), *torch.autograd.grad(y, inputs, dy)]

    whole, parts = found(BLOCKS), found(blocks_of(rows, 2, tokens))
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-10)


def test_a_mask_that_is_trained_is_refused() -> None:
    query, mask = torch.randn(1, 2, 6, 4), torch.zeros(1, 1, 6, 6, requires_grad=True)
    y, _ = attention(blocks_of(2, 2, 6), _Caller(), query, query, query, mask)
    with pytest.raises(LayerGraphError, match="mask of its attention is trained"):
        torch.autograd.backward(y.sum())


def _call(family: str, padded: bool, blocks: Blocks) -> LayerCall:
    ids = torch.arange(2 * TOKENS).reshape(2, TOKENS)
    mask = torch.ones_like(ids) if padded else None
    if mask is not None:
        mask[1, TOKENS // 2 :] = 0
    return layer_calls(small_model(family), ids, mask, blocks)[0]


def _inputs(call: LayerCall, graphs: LayerGraphs, samples: Sequence[int]) -> dict[str, Tensor]:
    """Random activations for graphs; all else as the model had it for these of its samples."""
    torch.manual_seed(5)
    held = tensors_of(call.layer)
    chosen = list(samples)
    shape = (len(chosen), *call.x.shape[1:])
    found = {names.X: torch.randn(shape), names.DY: torch.randn(shape)}
    found |= {names.parameter(n): t.detach() for n, t in held.items()}
    for name, tensor in call.extras.items():
        found[names.extra(name)] = tensor[chosen] if len(tensor) == len(call.x) else tensor
    return found | {names.total(n): torch.zeros(held[n].shape) for n in graphs.trainable}


def _by_torch(
    call: LayerCall, graphs: LayerGraphs, inputs: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """What the graphs return, by PyTorch."""
    trained = {n: inputs[names.parameter(n)].clone().requires_grad_() for n in graphs.trainable}
    x = inputs[names.X].clone().requires_grad_()
    extras = {n: inputs[names.extra(n)] for n in call.extras}
    y = call.run(tensors_of(call.layer) | trained, x, extras)
    dx, *gradients = torch.autograd.grad(y, [x, *trained.values()], inputs[names.DY])
    sums = {names.new_total(n): g for n, g in zip(trained, gradients, strict=True)}
    return {names.Y: y.detach(), names.DX: dx, **sums}


@pytest.mark.parametrize(
    ("family", "padded"),
    [
        ("llama", False),
        ("opt", True),
        ("gpt2", True),
        ("qwen3", True),
        ("phi", False),
        ("mistral", True),
        ("gemma2", False),
    ],
)
def test_layers_of_blocks_do_what_they_do_at_once(family: str, padded: bool) -> None:
    """Every family calls its attention in its own way; what is exported is tested below."""
    whole, blocked = (_call(family, padded, blocks) for blocks in (BLOCKS, blocks_of(5, 4, TOKENS)))
    torch.manual_seed(5)
    x, dy = torch.randn(2, *whole.x.shape).unbind()

    def found(call: LayerCall) -> list[Tensor]:
        given = x.clone().requires_grad_()
        y = call.run(tensors_of(call.layer), given, call.extras)
        return [y.detach(), *torch.autograd.grad(y, [given, *call.layer.parameters()], dy)]

    for one, other in zip(found(blocked), found(whole), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


# Exporting takes many seconds: one family for each thing that may go wrong.
@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "padded"),
    [
        ("opt", True),  # a bias, and a mask
        ("gemma2", True),  # products that are squeezed, a sliding window, grouped keys, and a mask
    ],
)
def test_graphs_of_blocks_do_what_the_layer_does_at_once(family: str, padded: bool) -> None:
    whole = _call(family, padded, BLOCKS)
    graphs = export_layer(LayerPart.whole(_call(family, padded, blocks_of(5, 4, TOKENS)), 0))
    assert "Scan" in _operations(graphs.forward) & _operations(graphs.backward)
    inputs = _inputs(whole, graphs, samples=[0, 1, 1])
    expected = _by_torch(whole, graphs, inputs)
    feed = {n: t.numpy() for n, t in inputs.items()}
    forward = GraphSession(graphs.forward, threads=1).run(feed)
    kept = {name: forward.pop(name) for name in graphs.activations}
    assert {name: a.size // 3 for name, a in kept.items()} == graphs.activations
    backward = GraphSession(graphs.backward, threads=1).run(feed)
    _assert_close(forward | backward, expected)
    from_activations = GraphSession(graphs.from_activations, threads=1)
    _assert_close(forward | from_activations.run(feed | kept), expected)


def _assert_close(found: Mapping[str, Array], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    # Some gradients are nothing but noise: that of a key's bias, of which no weight depends.
    largest = max(float(t.abs().max()) for n, t in expected.items() if n.startswith(_SUMS))
    for name, tensor in expected.items():
        scale = largest if name.startswith(_SUMS) else float(tensor.abs().max())
        off = float(np.abs(found[name] - tensor.numpy()).max()) / scale
        assert off <= EXACT, name


def _operations(model: bytes) -> set[str]:
    """The kinds of a graph's own nodes; the graph has none but of ONNX's own domain."""
    loaded = onnx.load_model_from_string(model)
    onnx.checker.check_model(loaded)
    assert [one.domain for one in loaded.opset_import] == [""]
    return {node.op_type for node in loaded.graph.node}


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads a process's memory as Linux says it")
def test_running_a_long_sequence_takes_less_than_its_scores(tmp_path: Path) -> None:
    tokens, heads = 2048, 4
    changed = {"num_hidden_layers": 1, "num_attention_heads": heads}
    model = small_model("llama", max_position_embeddings=tokens, **changed)
    ids = torch.zeros(2, tokens, dtype=torch.long)
    call = layer_calls(model, ids, blocks=Blocks(0, block_bytes=2 * 2**20))[0]
    graphs = export_layer(LayerPart.whole(call, 0))
    inputs = {n: t.numpy() for n, t in _inputs(call, graphs, samples=[0]).items()}
    write(tmp_path, graphs.forward, graphs.backward, inputs)
    command = [sys.executable, "-m", "benchmarks.graph_memory", str(tmp_path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout)
    assert found["most"] - found["before"] < heads * tokens * tokens * 4
