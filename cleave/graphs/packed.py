"""Pack several documents into one sequence so that no token attends to another document."""

from __future__ import annotations

from enum import Enum
from typing import Any, Final

import torch
from torch import Tensor, nn

from cleave.errors import UsageError

_LENGTHS: Final = 3, 5  # numbers of tokens in two test documents
_MOST_OFF: Final = 1e-3
_MOST_OFF_16_BIT: Final = 0.1


class PackedBy(Enum):
    """How a model separates the documents in one sequence.

    POSITIONS: the model derives attention masks from position IDs, which restart at 0 in each
    document. MASK: the model's masks ignore position IDs, but the model accepts a complete mask.
    """

    POSITIONS = "positions"
    MASK = "mask"


def called_with(ids: Tensor, mask: Tensor | None, positions: Tensor | None) -> dict[str, Any]:
    """Return the keyword arguments for calling a transformers causal language model.

    Args:
        ids: token IDs, shape (batch, tokens).
        mask: padding mask (0 for padding), same shape as `ids`, or a mask from `mask_for`.
        positions: each token's position in its document, same shape as `ids`; None if each sequence
            is one document.
    """
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    if positions is not None:  # not every model accepts positions
        given["position_ids"] = positions
    return given


def mask_for(packed: PackedBy | None, positions: Tensor | None) -> Tensor | None:
    """Return the attention mask that a model needs to separate documents, or None if unneeded.

    The mask is boolean and causal, with the shape (batch, 1, tokens, tokens). `positions` is as
    in `called_with`.
    """
    if packed is not PackedBy.MASK or positions is None:
        return None
    document = (positions == 0).cumsum(1)
    return (document[:, None, :, None] == document[:, None, None, :]).tril()


def packed_by(model: nn.Module) -> PackedBy:
    """Test how a model can separate documents and return the first method that works.

    The model is called, because some models accept position IDs but ignore them.

    Raises:
        UsageError: if the model cannot separate documents.
    """
    training = model.training
    model.eval()
    try:
        if _apart(model, PackedBy.POSITIONS):
            return PackedBy.POSITIONS
        # A mask argument replaces all masks of the model, so sliding windows would be lost.
        if not _has_windows(model) and _apart(model, PackedBy.MASK):
            return PackedBy.MASK
    finally:
        model.train(training)
    raise UsageError(
        f"--packing is 'separate', but {type(model).__name__} cannot separate documents in one "
        "sequence; omit it"
    )


def _apart(model: nn.Module, packed: PackedBy) -> bool:
    """Return True if the first of two packed documents does not affect the logits of the second."""
    first, second = _LENGTHS
    ids = torch.arange(1, 1 + first + second)[None] % vocabulary_of(model)
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


def vocabulary_of(model: Any) -> int:
    """Return the number of rows of a model's token embedding."""
    size: int = model.get_input_embeddings().num_embeddings
    return size
