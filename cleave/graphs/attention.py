"""Attention as separate matrix multiplications and a softmax, so that layers can be traced.

torch cannot decompose the backward pass of its fused CPU attention. For long sequences, attention
runs over one block of queries at a time, so that the scores fit in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan_op

from cleave.attention_blocks import BLOCKS, Blocks
from cleave.errors import LayerGraphError

_NAME: Final = "cleave"
# Keyword arguments of attention that can be ignored, because the mask already reflects them.
_KNOWN: Final = frozenset({"position_ids", "cache_position"})

_NAMED: Final = {"s_aux": "sinks (s_aux)", "alibi": "ALiBi slopes (alibi)"}


@contextmanager
def plain_attention(
    model: nn.Module, blocks: Blocks = BLOCKS, *, packed: bool = False
) -> Iterator[None]:
    """Return a context manager in which a transformers model uses traceable attention.

    Args:
        blocks: determines whether attention runs over blocks of queries, and the block size.
        packed: whether one sequence may contain several documents. If so, layers receive a mask
            even for a batch in which each sequence is one document.

    Raises:
        LayerGraphError: if the model's attention implementation cannot be replaced.
    """
    from transformers import AttentionInterface, PreTrainedModel
    from transformers.masking_utils import AttentionMaskInterface

    if not isinstance(model, PreTrainedModel):
        raise LayerGraphError(f"{type(model).__name__} is not a transformers model")
    AttentionInterface.register(_NAME, partial(attention, blocks))
    AttentionMaskInterface.register(_NAME, partial(_mask, packed=packed))
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation(_NAME)
    except ValueError as error:
        raise LayerGraphError(f"the attention implementation cannot be set: {error}") from None
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
    """Compute attention, with the signature of transformers' attention functions.

    Args:
        query: shape (batch, heads, queries, width).
        key, value: shape (batch, key-value heads, keys, width). The number of key-value heads
            divides the number of heads.
        attention_mask: a boolean mask that is true where a query attends to a key, or a mask that
            is added to the scores.
        scaling: factor by which scores are multiplied; by default 1 / sqrt(width).
        is_causal: whether attention without a mask is causal. None uses the module's `is_causal`.
        softcap: bound on the scores, applied with tanh, as in Gemma 2.

    Returns:
        The output, shape (batch, queries, heads, width), and None instead of attention weights.

    Raises:
        LayerGraphError: if `dropout` is not 0, or if `others` contains an unknown tensor or float.
    """
    if dropout:
        raise LayerGraphError(f"its attention drops {dropout:g} of the weights at random")
    unknown = {name for name, given in others.items() if isinstance(given, Tensor | float)} - _KNOWN
    if unknown:
        named = ", ".join(_NAMED.get(name, name) for name in sorted(unknown))
        raise LayerGraphError(f"its attention takes {named}, which graphs do not support")
    each = query.shape[1] // key.shape[1]
    if each > 1:
        key, value = key.repeat_interleave(each, 1), value.repeat_interleave(each, 1)
    factor = query.shape[-1] ** -0.5 if scaling is None else scaling
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    rows = blocks.rows(query.shape[1], query.shape[2], key.shape[2])
    if rows < query.shape[2]:
        how = Weighing(rows, factor, causal, softcap)
        return attention_in_blocks(query, key, value, attention_mask, how), None
    scores = query @ key.transpose(2, 3) * factor
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    least = torch.finfo(scores.dtype).min
    seen = None if attention_mask is None else attention_mask[..., : scores.shape[-1]]
    if seen is None:
        if causal:
            queries, keys = torch.arange(scores.shape[-2]), torch.arange(scores.shape[-1])
            scores = torch.where(queries[:, None] >= keys, scores, least)
        weights = scores.softmax(-1)
    elif seen.dtype is torch.bool:
        # A query that attends to no key (left padding) gets zeros, as in torch's own attention.
        weights = torch.where(seen, torch.where(seen, scores, least).softmax(-1), 0.0)
    else:
        weights = (scores + seen).softmax(-1)
    return (weights @ value).transpose(1, 2).contiguous(), None


def _mask(*, packed: bool, **how: Any) -> Tensor | None:
    """Return an attention mask; None if causal, without padding, packing or sliding windows."""
    from transformers.masking_utils import sdpa_mask

    if packed or how.get("attention_mask") is not None:
        how["allow_is_causal_skip"] = False
    made: Tensor | None = sdpa_mask(**how)
    return made


@dataclass(frozen=True)
class Weighing:
    """Settings for attention in blocks of `rows` queries. The last block may be smaller.

    Scores are multiplied by `factor`, and then bounded by `softcap` with tanh. `causal` is ignored
    if attention has a mask.
    """

    rows: int
    factor: float
    causal: bool
    softcap: float | None


def attention_in_blocks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, how: Weighing
) -> Tensor:
    """Compute attention over blocks of queries, with one iteration of a `Scan` per block.

    A block's scores are freed before the next block. The backward pass recomputes the scores.

    Args:
        query: shape (batch, heads, queries, width).
        key, value: shape (batch, heads, keys, width).
        mask: a boolean or additive mask as in `attention`, shape (batch or 1, heads or 1, queries
            or 1, keys).

    Returns:
        The attention output, shape (batch, queries, heads, width).

    Raises:
        LayerGraphError: in the backward pass, if the mask requires a gradient.
    """
    # `scan_op` refuses inputs that are views of one tensor, as in GPT-2. Exported graphs do not
    # contain these copies.
    own = [part.clone(memory_format=torch.contiguous_format) for part in (query, key, value)]
    found: Tensor = _Attention.apply(*own, mask, how)  # type: ignore[no-untyped-call]
    return found.contiguous()


class _Attention(torch.autograd.Function):
    """Autograd function for attention in blocks. It supports `torch.func` and tracing."""

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, how: Weighing
    ) -> Tensor:
        shared = (query, key, value) if mask is None else (query, key, value, mask)
        starts = torch.arange(0, query.shape[2], how.rows)
        (found,) = scan_op(partial(_attend, how), [], [starts], shared)
        return _joined(found, query)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.how = inputs
        ctx.save_for_backward(*tensors, output)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.needs_input_grad[3]:
            raise LayerGraphError("the mask of its attention is trained, which is not supported")
        query, key, value, mask, y = ctx.saved_tensors
        found: tuple[Tensor, ...] = _Gradients.apply(  # type: ignore[no-untyped-call]
            query, key, value, y, dy, mask, ctx.how
        )
        return (*found, None, None)


class _Gradients(torch.autograd.Function):
    """Separate autograd function for the backward pass, as `torch.func` requires."""

    @staticmethod
    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        y: Tensor,
        dy: Tensor,
        mask: Tensor | None,
        how: Weighing,
    ) -> tuple[Tensor, Tensor, Tensor]:
        shared = (query, key, value, y, dy) if mask is None else (query, key, value, y, dy, mask)
        sums = [torch.zeros_like(key), torch.zeros_like(value)]
        starts = torch.arange(0, query.shape[2], how.rows)
        dkey, dvalue, found = scan_op(partial(_back, how), sums, [starts], shared)
        return _joined(found, query).transpose(1, 2), dkey, dvalue

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Save no tensors, because second-order gradients are not needed."""


def _attend(
    how: Weighing, start: Tensor, query: Tensor, key: Tensor, value: Tensor, *mask: Tensor
) -> tuple[Tensor]:
    """Return the attention output of one block of queries, shape (batch, rows, heads, width)."""
    at = _positions(start, query, how)
    weights = _Weights.of(query.index_select(2, at) * how.factor, key, at, mask, how).weights
    return ((weights @ value).transpose(1, 2).contiguous(),)


def _back(
    how: Weighing,
    dkey: Tensor,
    dvalue: Tensor,
    start: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    y: Tensor,
    dy: Tensor,
    *mask: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return updated sums of the key and value gradients, and one block's query gradient.

    `start` is the index of the block's first query. Shapes are as in `attention_in_blocks`.
    """
    at = _positions(start, query, how)
    block = query.index_select(2, at) * how.factor
    made = _Weights.of(block, key, at, mask, how)
    # Rows after the last query are padding and must not contribute to the gradients.
    there = (start + torch.arange(how.rows) < query.shape[2])[:, None, None]
    dblock = torch.where(there, dy.index_select(1, at), 0.0)
    common = (dblock * y.index_select(1, at)).sum(-1).transpose(1, 2)[..., None]
    dblock = dblock.transpose(1, 2)
    dvalue = dvalue + made.weights.transpose(2, 3) @ dblock
    dscores = made.before_softmax((dblock @ value.transpose(2, 3) - common) * made.weights, how)
    dkey = dkey + dscores.transpose(2, 3) @ block
    return dkey, dvalue, (dscores @ key * how.factor).transpose(1, 2).contiguous()


@dataclass(frozen=True)
class _Weights:
    """The attention weights of one block of queries, shape (batch, heads, rows, keys).

    Attributes:
        squeezed: tanh(scores / softcap), with the same shape; None if no softcap is set.
        seen: true where a query attends to a key; None for additive masks and full attention.
    """

    weights: Tensor
    squeezed: Tensor | None
    seen: Tensor | None

    @classmethod
    def of(
        cls, block: Tensor, key: Tensor, at: Tensor, mask: tuple[Tensor, ...], how: Weighing
    ) -> _Weights:
        scores, squeezed, seen = block @ key.transpose(2, 3), None, None
        if how.softcap is not None:
            squeezed = torch.tanh(scores / how.softcap)
            scores = squeezed * how.softcap
        if mask:
            part = mask[0][..., : key.shape[2]]
            part = part if part.shape[2] == 1 else part.index_select(2, at)
            if part.dtype is torch.bool:
                seen = part
            else:
                scores = scores + part
        elif how.causal:
            seen = at[:, None] >= torch.arange(key.shape[2])
        if seen is not None:
            scores = torch.where(seen, scores, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1)
        if mask and seen is not None:  # a query that attends to no key gets zeros
            weights = torch.where(seen, weights, 0.0)
        return cls(weights, squeezed, seen)

    def before_softmax(self, gradient: Tensor, how: Weighing) -> Tensor:
        """Convert the gradient of the softmax's input to the gradient of the uncapped scores."""
        if self.seen is not None:
            gradient = torch.where(self.seen, gradient, 0.0)
        return gradient if self.squeezed is None else gradient * (1 - self.squeezed**2)


def _positions(start: Tensor, query: Tensor, how: Weighing) -> Tensor:
    """Return the query indices of a block. A short block is padded with the last index."""
    return (start + torch.arange(how.rows)).clamp(max=query.shape[2] - 1)


def _joined(blocks: Tensor, query: Tensor) -> Tensor:
    """Concatenate blocks, shape (blocks, batch, rows, heads, width), and remove the padding."""
    return blocks.movedim(0, 1).flatten(1, 2)[:, : query.shape[2]]
