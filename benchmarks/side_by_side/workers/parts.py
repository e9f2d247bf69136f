"""Models of transformers cut into stages: a stage is the model without its other layers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn


def _body(model: Any) -> Any:
    """Return the part of a model that has its embedding and its layers."""
    body = model.model
    return body.decoder if hasattr(body, "decoder") else body


def layers_of(model: nn.Module) -> Sequence[nn.Module]:
    """Return the decoder layers of an OPT or a Llama."""
    layers: nn.ModuleList = _body(model).layers
    return [*layers]


class _NoPositions(nn.Module):
    """Stands for position embeddings that an earlier stage has added."""

    def forward(self, *_: Any, **__: Any) -> Tensor:
        return torch.zeros(())


class StageModule(nn.Module):
    """Some layers of a model, with its embedding before the first and its head after the last.

    Args:
        model: the model, of which the stage shares the parameters.
        layers: first and past the last of its layers.
        first, last: whether it begins with tokens, and whether it ends with logits.
    """

    def __init__(self, model: nn.Module, layers: range, *, first: bool, last: bool) -> None:
        super().__init__()
        # A copy of the modules; parameters stay those of the model.
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
        """Return hidden states, or logits where the stage is the last."""
        given = {"input_ids": x} if self._first else {"inputs_embeds": x}
        result: Tensor = self.part(**given, use_cache=False).logits
        # Pipelines free outputs in place, which inputs and views do not allow.
        return result.clone() if result is x or result._is_view() else result


def dealt(layers: int, head_layers: float, ranks: int, head: int) -> list[int]:
    """Deal layers to ranks, one of which also has the head, so that the busiest has little to do.

    Args:
        layers: how many there are.
        head_layers: the work of the head, in layers.
        ranks: how many.
        head: the rank with the head.
    """
    with_head = max(0, round((layers + head_layers) / ranks - head_layers)) if ranks > 1 else layers
    others = max(1, ranks - 1)
    rest = layers - with_head
    sizes = [rest // others + (i < rest % others) for i in range(ranks - 1)]
    sizes.insert(head, with_head)
    return sizes


def in_line(layers: int, head_layers: float, ranks: int) -> list[range]:
    """Return the layers of stages, one a rank, of which the last has the head."""
    return _ranges(dealt(layers, head_layers, ranks, ranks - 1))


def in_v(layers: int, head_layers: float, ranks: int) -> list[range]:
    """Return the layers of stages, two a rank, of which the first rank has the first and the last.

    The last has the head.
    """
    each = dealt(layers, head_layers, ranks, 0)
    return _ranges([*((n + 1) // 2 for n in each), *(n // 2 for n in reversed(each))])


def _ranges(sizes: Sequence[int]) -> list[range]:
    stops = [*accumulate(sizes)]
    return [range(stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]
