"""Attention over blocks of queries, for long sequences whose attention scores exceed the memory.

The scores of one block of queries are computed, used and freed before the next block starts. In an
ONNX graph, each block is an iteration of one `Scan`, and ONNX Runtime reuses the memory of the
previous iteration. In PyTorch, each block is an iteration of a loop. The backward pass recomputes
the scores block by block.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan_op

from cleave.graphs.errors import LayerGraphError


@dataclass(frozen=True)
class Weighing:
    """Parameters of the computation of attention weights from queries and keys.

    Attributes:
        rows: number of queries in a block. The last block may have fewer queries.
        factor: factor of the scores.
        causal: whether a query attends only to its own and earlier positions; used if there is no
            mask.
        softcap: bound on the scores, applied with tanh; None for no bound.
    """

    rows: int
    factor: float
    causal: bool
    softcap: float | None


def attention_in_blocks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, how: Weighing
) -> Tensor:
    """Compute attention over blocks of queries.

    Args:
        query: shape (batch, heads, queries, width).
        key, value: shape (batch, heads, keys, width).
        mask: a boolean mask that is true where a query attends to a key, or a mask that is added to
            the scores, shape (batch or 1, heads or 1, queries or 1, keys); None for no mask.
        how: block size, and parameters of the attention weights.

    Returns:
        The attention output, shape (batch, queries, heads, width).

    Raises:
        LayerGraphError: in the backward pass, when the mask requires a gradient.
    """
    # `scan_op` refuses inputs that are views of one tensor, as in GPT-2. Exported graphs do not
    # contain these copies.
    own = [part.clone(memory_format=torch.contiguous_format) for part in (query, key, value)]
    found: Tensor = _Attention.apply(*own, mask, how)  # type: ignore[no-untyped-call]
    return found.contiguous()


class _Attention(torch.autograd.Function):
    """Attention with a custom backward pass, which also works in `torch.func` and in a trace."""

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, how: Weighing
    ) -> Tensor:
        shared = (query, key, value) if mask is None else (query, key, value, mask)
        (found,) = scan_op(partial(_attend, how), [], [_starts(query, how)], shared)
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
    """The backward pass of attention, which `torch.func` requires as a separate function."""

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
        dkey, dvalue, found = scan_op(partial(_back, how), sums, [_starts(query, how)], shared)
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
    """Run the backward pass of one block of queries.

    Args:
        dkey, dvalue: sums of the key and value gradients over the previous blocks.
        start: index of the block's first query.
        y, dy: the attention output and its gradient, shape (batch, queries, heads, width).

    Returns:
        The key and value gradients including this block, and the gradient of the block's queries,
            shape (batch, rows, heads, width).
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
    """The attention weights of one block of queries, with the tensors that the gradient needs.

    Attributes:
        weights: attention weights, shape (batch, heads, rows, keys).
        squeezed: tanh(scores / softcap), same shape; None without a softcap.
        seen: boolean mask that is true where a query attends to a key; None if there is no boolean
            or causal mask.
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
        """Return the gradient of the scores before softcap and mask.

        Args:
            gradient: gradient of the softmax's input.
            how: parameters of the attention weights.
        """
        if self.seen is not None:
            gradient = torch.where(self.seen, gradient, 0.0)
        return gradient if self.squeezed is None else gradient * (1 - self.squeezed**2)


def _starts(query: Tensor, how: Weighing) -> Tensor:
    return torch.arange(0, query.shape[2], how.rows)


def _positions(start: Tensor, query: Tensor, how: Weighing) -> Tensor:
    """Return the query indices of a block; an incomplete block repeats the last query's index."""
    return (start + torch.arange(how.rows)).clamp(max=query.shape[2] - 1)


def _joined(blocks: Tensor, query: Tensor) -> Tensor:
    """Concatenate blocks along the queries and remove the padding.

    Args:
        blocks: shape (blocks, batch, rows, heads, width).
        query: the queries, which give the number of rows to return.
    """
    return blocks.movedim(0, 1).flatten(1, 2)[:, : query.shape[2]]
