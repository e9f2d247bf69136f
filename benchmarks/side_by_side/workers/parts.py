"""Splits models of transformers into stages; a stage is the model without its other layers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn


def _body(model: Any) -> Any:
    """Return the submodule with the embedding and the layers."""
    body = model.model
    return body.decoder if hasattr(body, "decoder") else body


def layers_of(model: nn.Module) -> Sequence[nn.Module]:
    """Return the decoder layers of an OPT or Llama model."""
    layers: nn.ModuleList = _body(model).layers
    return [*layers]


class _NoPositions(nn.Module):
    """Replaces position embeddings, which an earlier stage has added."""

    def forward(self, *_: Any, **__: Any) -> Tensor:
        return torch.zeros(())


class StageModule(nn.Module):
    """Some layers of a model; the first stage has the embedding, the last the head.

    Args:
        model: the model, whose parameters the stage shares.
        layers: range of layers.
        first, last: whether the input is tokens, and whether the output is logits.
    """

    def __init__(self, model: nn.Module, layers: range, *, first: bool, last: bool) -> None:
        super().__init__()
        # Copy the modules but share the model's parameters.
        shared: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
        self.part: Any = copy.deepcopy(model, shared)
        self._first = first
        body = _body(self.part)
        body.layers = nn.ModuleList([*body.layers][layers.start : layers.stop])
        body.config.num_hidden_layers = len(layers)
        if not first:
            if hasattr(body, "embed_positions"):
                body.embed_positions = _NoPositions()
            body.embed_tokens = None
        if not last:
            self.part.lm_head = nn.Identity()
            for norm in ("norm", "final_layer_norm"):
                if hasattr(body, norm):
                    setattr(body, norm, nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        """Return hidden states, or logits in the last stage."""
        given = {"input_ids": x} if self._first else {"inputs_embeds": x}
        result: Tensor = self.part(**given, use_cache=False).logits
        # Pipelines free outputs in place, which fails for inputs and views.
        return result.clone() if result is x or result._is_view() else result


def dealt(layers: int, head_layers: float, ranks: int, head: int) -> list[int]:
    """Return the number of layers of each rank, balanced for one rank that also has the head.

    Args:
        layers: number of layers.
        head_layers: work of the head, in layers.
        ranks: number of ranks.
        head: rank with the head.
    """
    with_head = max(0, round((layers + head_layers) / ranks - head_layers)) if ranks > 1 else layers
    others = max(1, ranks - 1)
    rest = layers - with_head
    sizes = [rest // others + (i < rest % others) for i in range(ranks - 1)]
    sizes.insert(head, with_head)
    return sizes


def in_line(layers: int, head_layers: float, ranks: int) -> list[range]:
    """Return the layers of the stages, one stage per rank; the last has the head."""
    return _ranges(dealt(layers, head_layers, ranks, ranks - 1))


def in_v(layers: int, head_layers: float, ranks: int) -> list[range]:
    """Return the layers of the stages, two stages per rank in a V.

    The first rank has the first and the last stage, and the last stage has the head.
    """
    each = dealt(layers, head_layers, ranks, 0)
    return _ranges([*((n + 1) // 2 for n in each), *(n // 2 for n in reversed(each))])


def _ranges(sizes: Sequence[int]) -> list[range]:
    stops = [*accumulate(sizes)]
    return [range(stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]
