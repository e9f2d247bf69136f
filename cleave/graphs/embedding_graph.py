"""Export everything before a model's first layer as graphs, for devices that train whole models."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from cleave import attention_blocks
from cleave import graph_names as names
from cleave.errors import LayerGraphError
from cleave.graphs import attention, calls, tracing
from cleave.graphs.calls import LayerCall, OutsideLayers
from cleave.graphs.graph_cache import GraphCache
from cleave.graphs.layer_parts import tensors_of
from cleave.graphs.loss_graph import parameters_in
from cleave.graphs.model_state import digest, graph_key
from cleave.graphs.tracing import TracedGraph, core_aten, to_onnx
from cleave.machine.graph_session import GraphSession

_OURS: Final = (attention, attention_blocks, calls, tracing, sys.modules[__name__])
_MOST_OFF: Final = 1e-4  # maximum relative error of the first layer's input


@dataclass(frozen=True)
class EmbeddingGraphs:
    """The graphs of the embedding: ids, parameters -> y, and ids, dy, sums -> sums + gradients.

    `ids` has the shape (batch, tokens), and `y` is the first layer's input.

    Attributes:
        forward, backward: serialized ONNX models. `backward` is empty if nothing is trained.
        parameters: the model's names of the parameters and buffers that the graphs read.
        trainable: the model's names of the parameters for which `backward` returns a gradient.
    """

    forward: bytes
    backward: bytes
    parameters: tuple[str, ...]
    trainable: tuple[str, ...]


def embedding_graphs(
    model: nn.Module,
    found: Sequence[LayerCall],
    ids: Tensor,
    cache: GraphCache,
    progress: Callable[[str], None],
) -> EmbeddingGraphs:
    """Return the graphs of a model's embedding from the cache, or export them.

    Args:
        found: the recorded calls of the model's layers.
        ids: example token IDs, shape (batch, tokens).
        progress: called before the export with a description of the graphs.
    """
    modules = [call.layer for call in found]
    inside = {id(t) for module in modules for t in tensors_of(module).values()}
    held = {name: t for name, t in tensors_of(model).items() if id(t) not in inside}

    def made() -> EmbeddingGraphs:
        progress("graphs of the embedding")
        return export_embedding(model, found, ids)

    key = graph_key(model, held, found[0].x, {}, _OURS, path="embedding", without=modules)
    return cache.get(digest(f"{key} embedding of {ids.shape[1]}"), EmbeddingGraphs, made)


def export_embedding(model: nn.Module, found: Sequence[LayerCall], ids: Tensor) -> EmbeddingGraphs:
    """Export everything before a causal language model's first layer.

    Args:
        found: the recorded calls of the model's layers.
        ids: example token IDs, shape (batch, tokens).

    Raises:
        LayerGraphError: if this part of the model cannot be exported, or the graph's output differs
            from PyTorch's.
    """
    outside, held = OutsideLayers(model, found), tensors_of(model)
    inputs = {names.IDS: ids} | {names.parameter(n): t for n, t in held.items()}
    varying = {names.IDS, names.DY}

    def forward(given: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        return (outside.first_input(parameters_in(given), given[names.IDS]),)

    traced = TracedGraph(forward, inputs, (names.Y,), varying)
    _, used = core_aten(traced)
    parameters = tuple(n for n in held if names.parameter(n) in used)
    trainable = tuple(n for n in parameters if held[n].requires_grad)
    graph = to_onnx(traced)
    feed = {names.IDS: ids.numpy()}
    feed |= {names.parameter(n): held[n].detach().float().numpy() for n in parameters}
    made = torch.from_numpy(GraphSession(graph, shares_memory=False).run(feed)[names.Y])
    with torch.no_grad():
        wanted = outside.embed(ids).x.float()
    off = float((made - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))
    if not off <= _MOST_OFF:
        raise LayerGraphError(f"its embedding graph has an error of {off:.1e} (over {_MOST_OFF})")
    if not trainable:
        return EmbeddingGraphs(graph, b"", parameters, ())

    def gradients(given: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        own = parameters_in(given)

        def embedded(trained: Mapping[str, Tensor]) -> Tensor:
            return outside.first_input({**own, **trained}, given[names.IDS])

        _, pulled = torch.func.vjp(embedded, {n: own[n] for n in trainable})  # type: ignore[misc]
        (each,) = pulled(given[names.DY])
        return tuple(given[names.total(n)] + each[n] for n in trainable)

    inputs |= {names.DY: wanted} | {names.total(n): held[n] for n in trainable}
    outputs = tuple(map(names.new_total, trainable))
    backward = to_onnx(TracedGraph(gradients, inputs, outputs, varying))
    return EmbeddingGraphs(graph, backward, parameters, trainable)
