"""Export all graphs of a model: the forward and backward passes of its layers, and the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from cleave import attention_blocks
from cleave import graph_names as names
from cleave.errors import LayerGraphError
from cleave.graphs import attention, calls, joint_graph, layer_parts, loss_graph, programs, tracing
from cleave.graphs.calls import LayerCall, layer_calls, output_of
from cleave.graphs.embedding_graph import EmbeddingGraphs, embedding_graphs
from cleave.graphs.graph_cache import GraphCache
from cleave.graphs.layer_parts import LayerGraphs, LayerPart, export_layer, tensors_of
from cleave.graphs.loss_graph import LossGraph, SliceGraphs, export_loss, export_slice, rows_of_head
from cleave.graphs.model_state import digest, graph_key
from cleave.graphs.packed import PackedBy, called_with, mask_for, vocabulary_of
from cleave.machine.graph_session import Array, GraphSession

_OURS: Final = (
    attention,
    attention_blocks,
    calls,
    joint_graph,
    layer_parts,
    loss_graph,
    programs,
    tracing,
)
_EXAMPLE_SAMPLES: Final = 2
_MOST_OFF: Final = 1e-4  # maximum error relative to the largest element; usually it is 1e-6
_MOST_OFF_16_BIT: Final = 0.05
_MOST_OFF_GRADIENT: Final = 1e-2  # relative to the norm, as rounding at a kink may zero an element


@dataclass(frozen=True)
class ModelGraphs:
    """The graphs of a model for one sequence length.

    Attributes:
        parts: the layers that can be exported, or the parts of these layers, in order.
        layers: the graphs of each element of `parts`. Parts of the same kind share their graphs.
        loss: the graph of everything after the last layer; None if it was not requested.
        slice_of_loss: exports the graphs of a slice of the loss, given the slice's number of LM
            head rows; None if the loss cannot be cut into slices or was not requested.
        refused: reasons why the remaining layers cannot be exported, by layer index.
        embedding: exports the graphs of everything before the first layer, for batches without
            masks and positions; None if `loss` was not requested.
    """

    calls: Sequence[LayerCall]
    parts: Sequence[LayerPart]
    layers: Sequence[LayerGraphs]
    loss: LossGraph | None = None
    slice_of_loss: Callable[[int], SliceGraphs] | None = None
    refused: Mapping[int, str] = field(default_factory=dict)
    embedding: Callable[[], EmbeddingGraphs] | None = None


def model_graphs(
    model: nn.Module,
    tokens: int,
    cache: GraphCache,
    *,
    padded: bool = False,
    packed: PackedBy | None = None,
    in_parts: bool = False,
    pieces: int = 1,
    with_loss: bool = True,
    progress: Callable[[str], None] = lambda text: None,
) -> ModelGraphs:
    """Return a model's graphs from the cache, exporting each missing graph in a few seconds.

    Args:
        model: transformers causal language model.
        padded: whether batches have a padding mask.
        packed: how the model separates the documents in one sequence; None if each sequence is one
            document.
        in_parts: whether to cut layers into two parts with separate graphs, where possible.
        pieces: number of sequence chunks for parts that process each token independently.
        with_loss: whether to export everything after the last layer, including the loss.
        progress: called before each export with a description of the graph.

    Raises:
        LayerGraphError: if no layer can be exported, or the loss cannot be exported. The message
            states the reason.
    """
    if getattr(model.config, "output_router_logits", False):
        raise LayerGraphError(
            "its loss includes an auxiliary loss of its experts (config.output_router_logits)"
        )
    samples = _EXAMPLE_SAMPLES if tokens != _EXAMPLE_SAMPLES else _EXAMPLE_SAMPLES + 1
    # Use different tokens. A single token, such as padding, may be embedded as zeros, and then
    # every layer would return zeros.
    ids = torch.arange(samples * tokens).reshape(samples, tokens) % vocabulary_of(model)
    mask = torch.ones_like(ids) if padded else None
    if mask is not None:
        mask[1:, tokens // 2 :] = 0  # transformers ignores a mask without padding
    # The first sequence is one document. All other sequences have two documents.
    positions = torch.arange(tokens).repeat(samples, 1) if packed else None
    if positions is not None:
        positions[1:, tokens // 2 :] -= tokens // 2
        if packed is PackedBy.MASK:
            mask = mask_for(packed, positions)
    found = layer_calls(model, ids, mask, positions=positions)
    paths = {id(module): name for name, module in model.named_modules()}
    kinds = _Kinds(cache, progress, pieces, in_parts=in_parts)
    parts: list[LayerPart] = []
    layers: list[LayerGraphs] = []
    refused: dict[int, str] = {}
    for number, call in enumerate(found):
        whole = LayerPart.whole(call, number)
        try:
            made = kinds.graphs_of(whole, paths[id(call.layer)])
        except LayerGraphError as error:
            refused[number] = str(error)
            continue
        parts += [part for part, _ in made]
        layers += [graphs for _, graphs in made]
    if not parts:
        raise LayerGraphError(next(iter(refused.values())))
    _refuse_other_attention(model, found, called_with(ids, mask, positions))
    if not with_loss:
        return ModelGraphs(found, parts, layers, refused=refused)

    def made_loss() -> LossGraph:
        progress("a graph of the loss")
        return export_loss(model, found)

    modules = [call.layer for call in found]
    inside = {id(t) for module in modules for t in tensors_of(module).values()}
    held = {name: t for name, t in tensors_of(model).items() if id(t) not in inside}
    key = graph_key(model, held, found[-1].y[:, :1], {}, _OURS, without=modules)
    loss = cache.get(key, LossGraph, made_loss)

    def slice_of_loss(rows: int) -> SliceGraphs:
        def made() -> SliceGraphs:
            progress("graphs of a slice of the loss")
            return export_slice(model, found, loss, rows)

        return cache.get(digest(f"{key} {rows}"), SliceGraphs, made)

    def embedding() -> EmbeddingGraphs:
        return embedding_graphs(model, found, ids, cache, progress)

    sliced = slice_of_loss if rows_of_head(model, loss) else None
    return ModelGraphs(found, parts, layers, loss, sliced, refused, embedding)


class _Kinds:
    """Graphs of layers, exported once for each kind of layer. Arguments are as in `model_graphs`.

    Layers are of one kind if they differ at most in their index and their parameters' values.
    """

    def __init__(
        self, cache: GraphCache, progress: Callable[[str], None], pieces: int, *, in_parts: bool
    ) -> None:
        self._pieces = pieces
        self._cache, self._progress, self._in_parts = cache, progress, in_parts
        self._graphs: dict[str, LayerGraphs | LayerGraphError] = {}
        self._cut: dict[str, list[LayerPart]] = {}

    def graphs_of(self, whole: LayerPart, path: str) -> list[tuple[LayerPart, LayerGraphs]]:
        """Return the parts of a layer in order, each with its graphs. An uncut layer is one part.

        Args:
            path: the layer's module name in the model.
        """
        call = whole.call
        if call.hooked:
            raise LayerGraphError(call.hooked)
        kind = graph_key(call.layer, whole.held, call.x, call.extras, _OURS, path=path)
        if self._in_parts and kind not in self._cut:
            self._cut[kind] = whole.cut()
        parts = whole.cut_as(self._cut[kind]) if self._in_parts else [whole]
        return [self._checked(part, kind) for part in parts]

    def _checked(self, part: LayerPart, kind: str) -> tuple[LayerPart, LayerGraphs]:
        """Return a part and its graphs after testing the forward graph's output.

        A part without attention is exported for sequence chunks if chunks do not change the output.
        """
        if self._pieces > 1 and not (part.is_whole or part.attends):
            with suppress(LayerGraphError):  # a token's output may still depend on other tokens
                in_pieces = part.in_pieces(self._pieces)
                graphs = self._graphs_of_kind(in_pieces, kind)
                _refuse_other_outputs(in_pieces, graphs)
                return in_pieces, graphs
        graphs = self._graphs_of_kind(part, kind)
        _refuse_other_outputs(part, graphs)
        return part, graphs

    def _graphs_of_kind(self, part: LayerPart, kind: str) -> LayerGraphs:
        cut = f"{kind} {part.first} {part.last} {part.pieces}"
        key = kind if part.is_whole else digest(cut)
        if key not in self._graphs:

            def made() -> LayerGraphs:
                what = type(part.call.layer).__name__
                self._progress(f"a graph of {what if part.is_whole else f'a part of {what}'}")
                graphs = export_layer(part)
                _refuse_other_gradients(part, graphs)
                return graphs

            try:
                self._graphs[key] = self._cache.get(key, LayerGraphs, made)
            except LayerGraphError as error:  # all layers of this kind fail with the same reason
                self._graphs[key] = error
        graphs = self._graphs[key]
        if isinstance(graphs, LayerGraphError):
            raise graphs
        return graphs


def _refuse_other_attention(
    model: nn.Module, calls: Sequence[LayerCall], called: Mapping[str, Any]
) -> None:
    """Raise LayerGraphError if `plain_attention` changes the output of the model's last layer.

    `called` contains the keyword arguments of the recorded forward pass.
    """
    found: list[Tensor] = []

    def note(layer: nn.Module, given: object, y: object) -> None:
        found.append(output_of(y))

    hook = calls[-1].layer.register_forward_hook(note)
    try:
        with torch.no_grad():
            model(**called)
    finally:
        hook.remove()
    wanted, mask = calls[-1].y.float(), called["attention_mask"]
    seen = torch.ones(wanted.shape[:2]) if mask is None or mask.dim() > 2 else mask
    off = float(((found[0].float() - wanted) * seen[..., None]).abs().max())
    narrow = any(p.dtype is not torch.float32 for p in model.parameters())
    most = (_MOST_OFF_16_BIT if narrow else _MOST_OFF) * float(wanted.abs().max())
    if not off <= most:
        name = getattr(model.config, "_attn_implementation", None)
        raise LayerGraphError(f"its attention ({name}) is not supported in graphs")


def _refuse_other_outputs(part: LayerPart, graphs: LayerGraphs) -> None:
    """Raise LayerGraphError if a forward graph does not reproduce a part's example output."""
    session = GraphSession(graphs.forward, shares_memory=False)  # this session runs only once
    found, wanted = session.run(_feed(part))[names.Y], _fp32(part.y)
    off = float(np.abs(found - wanted).max() / max(float(np.abs(wanted).max()), 1e-30))
    most = _MOST_OFF if part.y.dtype is torch.float32 else _MOST_OFF_16_BIT
    if not off <= most:
        raise LayerGraphError(f"its graph's output has an error of {off:.1e}, more than {most:g}")


def _refuse_other_gradients(part: LayerPart, graphs: LayerGraphs) -> None:
    """Raise LayerGraphError if the backward graphs' gradients differ from PyTorch's."""
    dy = torch.randn(part.x.shape, generator=torch.Generator().manual_seed(0))
    wanted = {n: _fp32(t) for n, t in part.gradients(graphs.trainable, dy).items() if t is not None}
    feed = _feed(part) | {names.DY: _fp32(dy)}
    feed |= {names.total(n): np.zeros(part.held[n].shape, np.float32) for n in graphs.trainable}
    forward = GraphSession(graphs.forward, shares_memory=False)
    feed |= {n: a for n, a in forward.run(feed).items() if n != names.Y}
    largest = max(float(np.linalg.norm(each)) for each in wanted.values())
    for graph in (graphs.backward, graphs.from_activations):
        found = GraphSession(graph, shares_memory=False).run(feed)
        for name, each in wanted.items():
            off = float(np.linalg.norm(found[name] - each))
            # The gradient of a key bias is pure rounding error. So do not compare its error with
            # its own norm alone, but also with the norm of the largest gradient.
            scale = max(float(np.linalg.norm(each)), 1e-3 * largest)
            if not off <= _MOST_OFF_GRADIENT * scale:
                raise LayerGraphError(
                    f"its graph's gradient {name} differs from PyTorch's by {off / scale:.1e}"
                )


def _feed(part: LayerPart) -> dict[str, Array]:
    """Return the example inputs of a part's forward graph, by input name."""
    feed = {names.X: _fp32(part.x)}
    feed |= {names.parameter(n): _fp32(t) for n, t in part.held.items()}
    return feed | {names.extra(n): _fp32(t) for n, t in part.call.extras.items()}


def _fp32(tensor: Tensor) -> Array:
    made = tensor.detach().float() if tensor.is_floating_point() else tensor.detach()
    found: Array = made.numpy()
    return found
