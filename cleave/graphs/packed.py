"""Sequences of several documents that do not see one another, for models of transformers."""

from __future__ import annotations

from enum import Enum
from typing import Any, Final

import torch
from torch import Tensor, nn

from cleave.errors import UsageError

_LENGTHS: Final = 3, 5  # of two documents
_MOST_OFF: Final = 1e-3
_MOST_OFF_16_BIT: Final = 0.1


class PackedBy(Enum):
    """What tells a model where documents begin.

    POSITIONS: it makes its masks of positions, which begin anew. MASK: its masks ignore positions,
    but it takes one that is made already.
    """

    POSITIONS = "positions"
    MASK = "mask"


def called_with(ids: Tensor, mask: Tensor | None, positions: Tensor | None) -> dict[str, Any]:
    """Return what a causal language model of transformers is called with.

    Args:
        ids: tokens, shape (batch, tokens).
        mask: 0 where a token is padding, shaped alike; or see `document_mask`; None for neither.
        positions: of each token in its document, shaped alike; None where a sequence is one.
    """
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    if positions is not None:  # not every model takes some
        given["position_ids"] = positions
    return given


def document_mask(positions: Tensor) -> Tensor:
    """Return which tokens see which, shape (batch, 1, tokens, tokens).

    Args:
        positions: of each token in its document, shape (batch, tokens).
    """
    document = (positions == 0).cumsum(1)
    together = document[:, None, :, None] == document[:, None, None, :]
    return together.tril()


def mask_for(packed: PackedBy | None, positions: Tensor | None) -> Tensor | None:
    """Return the mask that a model has to be called with beside positions, if any."""
    if packed is not PackedBy.MASK or positions is None:
        return None
    return document_mask(positions)


def packed_by(model: nn.Module) -> PackedBy:
    """Try out what keeps a model's documents apart.

    That is tried and not looked up: some models take positions and see across all the same.

    Args:
        model: a causal language model of transformers; it is left as it was.

    Raises:
        UsageError: when nothing does.
    """
    training = model.training
    model.eval()
    try:
        if _apart(model, PackedBy.POSITIONS):
            return PackedBy.POSITIONS
        # A mask that is given takes the place of all, so no layer would see a window only.
        if not _has_windows(model) and _apart(model, PackedBy.MASK):
            return PackedBy.MASK
    finally:
        model.train(training)
    raise UsageError(
        f"--packing is 'separate', and {type(model).__name__} sees across documents in one "
        f"sequence; leave it out"
    )


def _apart(model: nn.Module, packed: PackedBy) -> bool:
    """Say whether the second document of a sequence gets the logits that it gets alone."""
    first, second = _LENGTHS
    ids = torch.arange(1, 1 + first + second)[None] % _vocabulary(model)
    positions = torch.cat([torch.arange(first), torch.arange(second)])[None]
    with torch.no_grad():
        alone = model(**called_with(ids[:, first:], None, None)).logits.float()
        try:
            both = model(**called_with(ids, mask_for(packed, positions), positions)).logits
        except (TypeError, ValueError, RuntimeError, IndexError):  # it takes none of that shape
            return False
    off = float((both[:, first:].float() - alone).abs().max() / alone.abs().max().clamp(min=1e-30))
    narrow = any(p.dtype is not torch.float32 for p in model.parameters())
    return off <= (_MOST_OFF_16_BIT if narrow else _MOST_OFF)


def _has_windows(model: Any) -> bool:
    config = model.config
    kinds = getattr(config, "layer_types", None) or ()
    return getattr(config, "sliding_window", None) is not None or "sliding_attention" in kinds


def _vocabulary(model: Any) -> int:
    size: int = model.get_input_embeddings().num_embeddings
    return size
