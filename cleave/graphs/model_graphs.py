"""All graphs of a model: one pair for each kind of layer, and the loss."""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from cleave import attention_blocks
from cleave import graph_names as names
from cleave.graphs import (
    attention,
    blocked_attention,
    calls,
    exporter,
    joint_graph,
    layer_graphs,
    layer_parts,
    loss_graph,
    loss_slices,
    outside,
    programs,
    tracing,
)
from cleave.graphs.calls import LayerCall, layer_calls
from cleave.graphs.errors import LayerGraphError
from cleave.graphs.graph_cache import GraphCache
from cleave.graphs.layer_graphs import LayerGraphs, export_layer
from cleave.graphs.layer_parts import LayerPart, tensors_of
from cleave.graphs.loss_graph import LossGraph, export_loss
from cleave.graphs.loss_slices import SliceGraphs, export_slice, rows_of_head
from cleave.graphs.packed import PackedBy, document_mask
from cleave.machine.graph_session import Array, GraphSession

_EXPORTERS: Final = ("torch", "transformers", "onnx", "onnxscript", "onnx-ir", "peft", "numpy")
_OURS: Final = (
    attention,
    attention_blocks,
    blocked_attention,
    calls,
    exporter,
    joint_graph,
    layer_graphs,
    layer_parts,
    loss_graph,
    loss_slices,
    outside,
    programs,
    tracing,
)
_EXAMPLE_SAMPLES: Final = 2
_MOST_OFF: Final = 1e-4  # of the largest element; a right graph is off by 1e-6
_MOST_OFF_16_BIT: Final = 0.05


@dataclass(frozen=True)
class ModelGraphs:
    """The graphs of a model for sequences of one length.

    Attributes:
        calls: how the model calls its layers.
        parts: the layers that can become graphs, or, in order, their parts.
        layers: the graphs of each of these; those of one kind have the same.
        loss: what follows the last layer, with the loss.
        slice_of_loss: returns the graphs of a slice of the loss with so many rows of the LM head,
            which are made then; None where the loss cannot be cut.
        refused: why the other layers cannot become graphs, by their numbers.
    """

    calls: Sequence[LayerCall]
    parts: Sequence[LayerPart]
    layers: Sequence[LayerGraphs]
    loss: LossGraph
    slice_of_loss: Callable[[int], SliceGraphs] | None = None
    refused: Mapping[int, str] = field(default_factory=dict)


def model_graphs(
    model: nn.Module,
    tokens: int,
    cache: GraphCache,
    *,
    padded: bool = False,
    packed: PackedBy | None = None,
    in_parts: bool = False,
    pieces: int = 1,
    progress: Callable[[str], None] = lambda text: None,
) -> ModelGraphs:
    """Return the graphs of a model, from the cache or made anew, which takes seconds for each.

    Args:
        model: a causal language model of transformers.
        tokens: length of its sequences.
        cache: keeps graphs between runs.
        padded: whether batches come with a mask of padding.
        packed: what tells documents of one sequence apart; None where a sequence is one.
        in_parts: make graphs of two parts of each layer, where it can be cut.
        pieces: into how many runs sequences are cut in those parts of layers whose tokens do not
            depend on each other.
        progress: called with what is made, before it is.

    Raises:
        LayerGraphError: when no layer, or not the loss, can become a graph; says why.
    """
    samples = _EXAMPLE_SAMPLES if tokens != _EXAMPLE_SAMPLES else _EXAMPLE_SAMPLES + 1
    # Different tokens: one alone may be embedded as zeros, of which every layer makes zeros.
    ids = torch.arange(samples * tokens).reshape(samples, tokens) % _vocabulary(model)
    mask = torch.ones_like(ids) if padded else None
    if mask is not None:
        mask[1:, tokens // 2 :] = 0  # a mask without padding is left out by transformers
    # One sequence of one document, the others of two.
    positions = torch.arange(tokens).repeat(samples, 1) if packed else None
    if positions is not None:
        positions[1:, tokens // 2 :] -= tokens // 2
        if packed is PackedBy.MASK:
            mask = document_mask(positions)
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

    def made_loss() -> LossGraph:
        progress("a graph of the loss")
        return export_loss(model, found)

    key = _key(model, tensors_of(model), found[-1].y[:, :1], {})
    loss = cache.get(key, LossGraph, made_loss)

    def slice_of_loss(rows: int) -> SliceGraphs:
        def made() -> SliceGraphs:
            progress("graphs of a slice of the loss")
            return export_slice(model, found, loss, rows)

        return cache.get(_digest(f"{key} {rows}"), SliceGraphs, made)

    sliced = slice_of_loss if rows_of_head(model, loss) else None
    return ModelGraphs(found, parts, layers, loss, sliced, refused)


class _Kinds:
    """Graphs of layers, made once for each kind.

    Args:
        cache: keeps them between runs.
        progress: called with what is made, before it is.
        pieces: see `model_graphs`.
        in_parts: whether layers are cut, where they can be.
    """

    def __init__(
        self, cache: GraphCache, progress: Callable[[str], None], pieces: int, *, in_parts: bool
    ) -> None:
        self._pieces = pieces
        self._cache, self._progress, self._in_parts = cache, progress, in_parts
        self._graphs: dict[str, LayerGraphs | LayerGraphError] = {}
        self._cut: dict[str, list[LayerPart]] = {}

    def graphs_of(self, whole: LayerPart, path: str) -> list[tuple[LayerPart, LayerGraphs]]:
        """Return a layer, or its parts in order, with their graphs.

        Args:
            whole: the layer.
            path: its name in the model.

        Raises:
            LayerGraphError: when it cannot become a graph.
        """
        call = whole.call
        if call.hooked:
            raise LayerGraphError(call.hooked)
        kind = _key(call.layer, whole.held, call.x, call.beside, path)
        if self._in_parts and kind not in self._cut:
            self._cut[kind] = whole.cut()
        parts = whole.cut_as(self._cut[kind]) if self._in_parts else [whole]
        return [self._checked(part, kind) for part in parts]

    def _checked(self, part: LayerPart, kind: str) -> tuple[LayerPart, LayerGraphs]:
        """Return a layer or a part of one, in pieces where that changes nothing, and its graphs."""
        if self._pieces > 1 and not (part.is_whole or part.attends):
            with suppress(LayerGraphError):  # its tokens may depend on each other all the same
                in_pieces = part.in_pieces(self._pieces)
                graphs = self._graphs_of_kind(in_pieces, kind)
                _refuse_other_outputs(in_pieces, graphs)
                return in_pieces, graphs
        graphs = self._graphs_of_kind(part, kind)
        _refuse_other_outputs(part, graphs)
        return part, graphs

    def _graphs_of_kind(self, part: LayerPart, kind: str) -> LayerGraphs:
        cut = f"{kind} {part.first} {part.last} {part.pieces}"
        key = kind if part.is_whole else _digest(cut)
        if key not in self._graphs:

            def made() -> LayerGraphs:
                what = type(part.call.layer).__name__
                self._progress(f"a graph of {what if part.is_whole else f'a part of {what}'}")
                return export_layer(part)

            try:
                self._graphs[key] = self._cache.get(key, LayerGraphs, made)
            except LayerGraphError as error:  # as of other layers of this kind
                self._graphs[key] = error
        graphs = self._graphs[key]
        if isinstance(graphs, LayerGraphError):
            raise graphs
        return graphs


def _vocabulary(model: Any) -> int:
    size: int = model.get_input_embeddings().num_embeddings
    return size


def _refuse_other_outputs(part: LayerPart, graphs: LayerGraphs) -> None:
    """Ensure that a layer's graph returns what the layer did: it may be another layer's graph.

    Raises:
        LayerGraphError: when it does not.
    """
    feed = {names.X: _fp32(part.x)}
    feed |= {names.parameter(n): _fp32(t) for n, t in part.held.items()}
    feed |= {names.beside(n): _fp32(t) for n, t in part.call.beside.items()}
    session = GraphSession(graphs.forward, shares_memory=False)  # used once
    found, wanted = session.run(feed)[names.Y], _fp32(part.y)
    off = float(np.abs(found - wanted).max() / max(float(np.abs(wanted).max()), 1e-30))
    most = _MOST_OFF if part.y.dtype is torch.float32 else _MOST_OFF_16_BIT
    if not off <= most:
        raise LayerGraphError(f"its graph's output is {off:.1e} off, more than {most:g}")


def _fp32(tensor: Tensor) -> Array:
    made = tensor.detach().float() if tensor.is_floating_point() else tensor.detach()
    found: Array = made.numpy()
    return found


def _key(
    module: nn.Module,
    held: Mapping[str, Tensor],
    x: Tensor,
    beside: Mapping[str, Tensor],
    path: str = "",
) -> str:
    """Return a digest of all that a graph follows from.

    Layers that differ in their number alone have the same.

    Args:
        module: what becomes a graph.
        held: its parameters and buffers.
        x, beside: what it is called with.
        path: its name in the model, which adapters note.
    """
    described = {
        "modules": [
            [name, type(part).__qualname__, _plain_attributes(part, path)]
            for name, part in module.named_modules()
        ],
        "sources": sorted({_digest(_source(type(part))) for part in module.modules()}),
        "held": [[name, list(t.shape), t.requires_grad] for name, t in held.items()],
        "x": list(x.shape[1:]),
        "beside": [
            [name, list(t.shape), str(t.dtype), t.shape[:1] == x.shape[:1]]
            for name, t in beside.items()
        ],
        "versions": {name: _version(name) for name in _EXPORTERS},
        "ours": [_digest(inspect.getsource(part)) for part in _OURS],
    }
    return _digest(json.dumps(described, sort_keys=True))


def _plain_attributes(module: nn.Module, path: str) -> dict[str, Any]:
    """Return what a module holds besides tensors, as far as it can change what it computes."""
    return {
        name: _described(held, path)
        for name, held in vars(module).items()
        if name not in ("layer_idx", "training") and not name.startswith("_")
    }


def _described(held: Any, path: str, depth: int = 3) -> Any:
    """Return a description of what a module holds, as JSON has it.

    What has no description of its own is described by its class and what it holds, to some depth,
    and beyond that by its address: then nothing is shared.

    Args:
        held: what is described.
        path: the module's name in the model, which is left out of texts.
        depth: of what it holds.
    """
    if isinstance(held, bool | int | float | None):
        return held
    if isinstance(held, str):
        return _without(path, held)
    if depth and isinstance(held, dict):
        return {str(key): _described(value, path, depth - 1) for key, value in held.items()}
    if callable(held):
        return getattr(held, "__qualname__", type(held).__qualname__)
    if hasattr(held, "to_json_string"):  # a configuration of transformers
        return held.to_json_string()
    kind: Any = type(held)
    known = hasattr(held, "__dict__") and not hasattr(kind, "__slots__")
    if depth and known and kind.__repr__ is object.__repr__:
        return [
            kind.__qualname__,
            _digest(_source(kind)),
            _described(vars(held), path, depth - 1),
        ]
    return _without(path, repr(held))


def _without(path: str, text: str) -> str:
    return text.replace(path, "*") if path else text


def _source(kind: type) -> str:
    """Return the text of the file that a class comes from."""
    module: ModuleType | None = sys.modules.get(kind.__module__)
    try:
        return inspect.getsource(module) if module is not None else kind.__qualname__
    except (OSError, TypeError):
        return kind.__qualname__


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
