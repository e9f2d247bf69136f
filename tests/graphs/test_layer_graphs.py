"""Which layers become graphs, and which are refused and why."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnxruntime import InferenceSession
from torch import Tensor, nn

from cleave.errors import LayerGraphError
from cleave.graphs import tracing
from cleave.graphs.calls import OutsideLayers, decoder_layers, layer_calls
from cleave.graphs.graph_cache import GraphCache
from cleave.graphs.layer_parts import LayerPart, export_layer
from cleave.graphs.model_graphs import model_graphs
from cleave.graphs.tracing import TracedGraph, to_onnx
from cleave.protocol import limits
from tests.graphs.models import small_model

pytestmark = pytest.mark.slow
IDS = torch.arange(20).reshape(2, 10)


def test_the_model_is_left_as_it_was() -> None:
    model: Any = small_model("opt")
    model.eval()
    before = model.config._attn_implementation
    expected = model(input_ids=IDS).logits
    calls = layer_calls(model, IDS)
    OutsideLayers(model, calls).embed(IDS)
    assert model.config._attn_implementation == before
    assert not model.training
    torch.testing.assert_close(model(input_ids=IDS).logits, expected, rtol=0, atol=0)


def test_embedding_stops_before_the_layers() -> None:
    model = small_model("opt")
    calls = layer_calls(model, IDS)
    mask = torch.ones_like(IDS)
    mask[1, 7:] = 0
    padded = layer_calls(model, IDS, mask)
    found = OutsideLayers(model, padded).embed(IDS, mask)
    torch.testing.assert_close(found.x, padded[0].x)
    assert found.x.requires_grad
    assert [b.keys() for b in found.extras] == [call.extras.keys() for call in padded]
    with pytest.raises(LayerGraphError, match="differently than before"):
        OutsideLayers(model, calls).embed(IDS, mask)


@pytest.mark.parametrize("name", ["dropout", "attention_dropout"])
def test_dropout_is_refused(name: str) -> None:
    model = small_model("opt", **{name: 0.1}).eval()
    with pytest.raises(LayerGraphError, match="at random"):
        export_layer(LayerPart.whole(layer_calls(model, IDS)[0], 0))


def test_layers_that_are_never_skipped_are_no_chance() -> None:
    """Some versions of transformers draw a number for each layer even where none is skipped."""

    def skipping(probability: float) -> TracedGraph:
        def function(given: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
            skipped = torch.rand([]) < probability
            return (given["x"] if skipped else 2 * given["x"],)

        return TracedGraph(function, {"x": torch.ones(2, 3)}, ("y",), {"x"})

    graph = InferenceSession(to_onnx(skipping(0.0)))
    given = np.ones((5, 3), np.float32)
    np.testing.assert_array_equal(graph.run(None, {"x": given})[0], 2 * given)
    with pytest.raises(LayerGraphError, match="set its layerdrop to 0"):
        to_onnx(skipping(0.1))


def test_a_layer_that_looks_at_values_is_refused() -> None:
    model = small_model("llama")
    layer: Any = decoder_layers(model)[0]
    plain = layer.mlp.forward
    layer.mlp.forward = lambda x: plain(x) if x.sum() > 0 else -plain(x)
    with pytest.raises(LayerGraphError, match="does something that cannot be traced as a graph"):
        export_layer(LayerPart.whole(layer_calls(model, IDS)[0], 0))


@pytest.mark.nightly
def test_a_layer_that_differs_by_its_number_alone_gets_no_other_layers_graph(
    tmp_path: Path,
) -> None:
    model: Any = small_model("llama")
    kind: Any = type(model.model.layers[0])

    class Numbered(kind):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs) * (1 + self.layer_idx)

    for number, layer in enumerate(model.model.layers):
        layer.__class__, layer.layer_idx = Numbered, number
    graphs = model_graphs(model, 10, GraphCache(tmp_path))
    assert [part.layer for part in graphs.parts] == [0]
    assert list(graphs.refused) == [1]
    assert graphs.refused[1].startswith("its graph's output has")


def test_gradients_of_slices_with_and_without_steps() -> None:
    """As of rotary embeddings that turn every second element with its neighbour."""
    places = [
        slice(None, None, 2),
        slice(1, None, 3),
        slice(2, 6, 2),
        slice(-5, -1),
        slice(6, 99, 4),
    ]

    def loss(x: Tensor) -> Tensor:
        parts = [(x[:, place] ** 2).sum() * n for n, place in enumerate(places, 1)]
        return torch.stack(parts).sum()

    def gradient(given: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        return (torch.func.grad(loss)(given["x"]),)

    x = torch.randn(5, 8)
    graph = to_onnx(TracedGraph(gradient, {"x": x}, ("dx",), {"x"}))
    (found,) = InferenceSession(graph).run(None, {"x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), torch.func.grad(loss)(x))


def test_layers_that_are_not_one_after_another_are_refused() -> None:
    model: Any = small_model("llama")
    model.model.layers.append(model.model.layers[0])
    model.config.num_hidden_layers = 3
    with pytest.raises(LayerGraphError, match="exactly once, in order"):
        layer_calls(model, IDS)


def test_a_model_that_is_not_of_transformers_is_refused() -> None:
    with pytest.raises(LayerGraphError, match="Sequential has no list of layers"):
        layer_calls(nn.Sequential(nn.Linear(2, 2)), IDS)

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(2, 2)])

    with pytest.raises(LayerGraphError, match="Own is not a transformers model"):
        layer_calls(Own(), IDS)


def test_graphs_are_no_larger_than_devices_take() -> None:
    assert tracing.MAX_GRAPH_BYTES == limits.MAX_GRAPH_BYTES
    assert tracing.MAX_GRAPH_NODES == limits.MAX_GRAPH_NODES


@pytest.mark.nightly
def test_a_graph_of_too_many_operations_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MAX_GRAPH_NODES", 10)
    call = layer_calls(small_model("opt"), IDS)[0]
    with pytest.raises(LayerGraphError, match="operations; the limit is 10"):
        export_layer(LayerPart.whole(call, 0))
