"""Attention as separate matrix multiplications and a softmax, for tracing layers.

torch has no decomposition for the backward pass of its fused attention on a CPU. So a layer that
uses fused attention cannot be exported as a graph. Within the context of `plain_attention`, a model
uses the attention of this module instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from cleave.attention_blocks import BLOCKS, Blocks
from cleave.graphs.blocked_attention import Weighing, attention_in_blocks
from cleave.graphs.errors import LayerGraphError

_NAME: Final = "cleave"
_KNOWN: Final = frozenset({"position_ids", "cache_position"})
"""Keyword arguments of attention that can be ignored, because the mask already reflects them."""

_NAMED: Final = {"s_aux": "sinks (s_aux)", "alibi": "ALiBi slopes (alibi)"}


@contextmanager
def plain_attention(
    model: nn.Module, blocks: Blocks = BLOCKS, *, packed: bool = False
) -> Iterator[None]:
    """Return a context manager in which a transformers model uses traceable attention.

    Args:
        model: the model; its own attention implementation is restored afterwards.
        blocks: decides when attention runs over blocks of queries, and the size of a block.
        packed: whether one sequence may hold several documents, which are distinguished by their
            position IDs. The layers then always receive a mask, even for a batch in which each
            sequence is one document.

    Raises:
        LayerGraphError: when the model's attention implementation cannot be replaced.
    """
    from transformers import AttentionInterface, PreTrainedModel
    from transformers.masking_utils import AttentionMaskInterface

    if not isinstance(model, PreTrainedModel):
        raise LayerGraphError(f"{type(model).__name__} is not a model of transformers")
    AttentionInterface.register(_NAME, partial(attention, blocks))
    AttentionMaskInterface.register(_NAME, partial(_mask, packed=packed))
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation(_NAME)
    except ValueError as error:
        raise LayerGraphError(f"its attention cannot be chosen: {error}") from None
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def attention(
    blocks: Blocks,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute attention, with the signature of an attention function of transformers.

    Args:
        blocks: decides when attention runs over blocks of queries, and the size of a block.
        module: the attention module that calls this function.
        query: shape (batch, heads, queries, width).
        key, value: shape (batch, key-value heads, keys, width). The number of key-value heads
            divides the number of heads.
        attention_mask: a boolean mask that is true where a query attends to a key, or a mask that
            is added to the scores; None for no mask.
        scaling: factor of the scores; by default 1 / sqrt(width).
        dropout: dropout probability; must be 0.
        is_causal: whether a query attends only to its own and earlier positions; used if there is
            no mask. None for the module's own setting.
        softcap: bound on the scores, applied with tanh, as in Gemma 2; None for no bound.

    Returns:
        The output, shape (batch, queries, heads, width), and None instead of attention weights.

    Raises:
        LayerGraphError: when `dropout` is not 0, or a tensor or float argument is unknown.
    """
    if dropout:
        raise LayerGraphError(f"its attention drops {dropout:g} of the weights at random")
    unknown = [name for name, given in others.items() if isinstance(given, Tensor | float)]
    if unknown := sorted(set(unknown) - _KNOWN):
        named = ", ".join(_NAMED.get(name, name) for name in unknown)
        raise LayerGraphError(f"its attention takes {named}, which graphs do not compute")
    each = query.shape[1] // key.shape[1]
    if each > 1:
        key, value = key.repeat_interleave(each, 1), value.repeat_interleave(each, 1)
    factor = query.shape[-1] ** -0.5 if scaling is None else scaling
    rows = blocks.rows(query.shape[1], query.shape[2], key.shape[2])
    if rows < query.shape[2]:
        how = Weighing(rows, factor, _causal(module, is_causal), softcap)
        return attention_in_blocks(query, key, value, attention_mask, how), None
    scores = query @ key.transpose(2, 3) * factor
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    weights = _masked(scores, attention_mask, _causal(module, is_causal)).softmax(-1)
    if attention_mask is not None and attention_mask.dtype is torch.bool:
        # A query that attends to no key (left padding) gets zeros, as in torch's own attention.
        weights = torch.where(attention_mask[..., : scores.shape[-1]], weights, 0.0)
    return (weights @ value).transpose(1, 2).contiguous(), None


def _mask(*, packed: bool, **how: Any) -> Tensor | None:
    """Return the attention mask of a layer; None if causal attention needs no mask.

    Whether the mask is None depends on the arguments, never on the values in a batch.
    """
    from transformers.masking_utils import sdpa_mask

    made: Tensor | None
    if how.get("attention_mask") is None and not packed:
        made = sdpa_mask(**how)
    else:
        made = sdpa_mask(**{**how, "allow_is_causal_skip": False})
    return made


def _causal(module: nn.Module, stated: bool | None) -> bool:
    return bool(getattr(module, "is_causal", True)) if stated is None else stated


def _masked(scores: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    least = torch.finfo(scores.dtype).min
    if mask is not None:
        seen = mask[..., : scores.shape[-1]]
        return torch.where(seen, scores, least) if mask.dtype is torch.bool else scores + seen
    if not causal:
        return scores
    queries, keys = torch.arange(scores.shape[-2]), torch.arange(scores.shape[-1])
    return torch.where(queries[:, None] >= keys, scores, least)
