"""Sequences of several documents that cannot see one another, for models of transformers."""

from __future__ import annotations

from enum import Enum
from typing import Any, Final

import torch
from torch import Tensor, nn

from cleave.errors import UsageError

_LENGTHS: Final = 3, 5  # tokens of two documents
_MOST_OFF: Final = 1e-3
_MOST_OFF_16_BIT: Final = 0.1


class PackedBy(Enum):
    """How a model finds where documents begin.

    POSITIONS: it derives its masks from positions, which restart in each document. MASK: its masks
    ignore positions, but it accepts a ready-made mask.
    """

    POSITIONS = "positions"
    MASK = "mask"


def called_with(ids: Tensor, mask: Tensor | None, positions: Tensor | None) -> dict[str, Any]:
    """Return the arguments for a causal language model of transformers.

    Args:
        ids: tokens, shape (batch, tokens).
        mask: padding mask (0 for padding), shaped as `ids`; or a `document_mask`; None for no mask.
        positions: each token's position in its document, shaped as `ids`; None for one document.
    """
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    if positions is not None:  # not every model accepts positions
        given["position_ids"] = positions
    return given


def document_mask(positions: Tensor) -> Tensor:
    """Return which tokens see which, shape (batch, 1, tokens, tokens).

    Args:
        positions: each token's position in its document, shape (batch, tokens).
    """
    document = (positions == 0).cumsum(1)
    together = document[:, None, :, None] == document[:, None, None, :]
    return together.tril()


def mask_for(packed: PackedBy | None, positions: Tensor | None) -> Tensor | None:
    """Return the mask that a model needs in addition to positions, or None."""
    if packed is not PackedBy.MASK or positions is None:
        return None
    return document_mask(positions)


def packed_by(model: nn.Module) -> PackedBy:
    """Test how a model keeps documents apart.

    A test is needed because some models accept positions and still see across documents.

    Args:
        model: a causal language model of transformers; left unchanged.

    Raises:
        UsageError: when neither way keeps documents apart.
    """
    training = model.training
    model.eval()
    try:
        if _apart(model, PackedBy.POSITIONS):
            return PackedBy.POSITIONS
        # A given mask replaces all of the model's masks, so sliding windows would be lost.
        if not _has_windows(model) and _apart(model, PackedBy.MASK):
            return PackedBy.MASK
    finally:
        model.train(training)
    raise UsageError(
        f"--packing is 'separate', and {type(model).__name__} sees across documents in one "
        f"sequence; leave it out"
    )


def _apart(model: nn.Module, packed: PackedBy) -> bool:
    """Return whether the second document's logits are the same as without the first document."""
    first, second = _LENGTHS
    ids = torch.arange(1, 1 + first + second)[None] % _vocabulary(model)
    positions = torch.cat([torch.arange(first), torch.arange(second)])[None]
    with torch.no_grad():
        alone = model(**called_with(ids[:, first:], None, None)).logits.float()
        try:
            both = model(**called_with(ids, mask_for(packed, positions), positions)).logits
        except (TypeError, ValueError, RuntimeError, IndexError):  # unsupported mask shape
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
