"""A model goes on with a text, token by token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from cleave.errors import UsageError
from cleave.training.trained import TrainedModel

_UNFINISHED = "\ufffd"  # what half a character decodes to


def continued(
    trained: TrainedModel,
    text: str,
    tokens: int,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
) -> Iterator[str]:
    """Yield what a model adds to a text, in pieces, until it ends it.

    Args:
        trained: the model.
        text: the text.
        tokens: that are added at most.
        temperature: 0 for the likeliest token each time; else logits are divided by it.
        top_p: of the likeliest tokens that have this share together, one is drawn.
        seed: of the draws.

    Raises:
        UsageError: when the text and what is added do not fit the model.
    """
    (found,) = trained.tokenizer.encode_batch([text])
    given = torch.tensor(found.tolist())[None]
    if given.shape[1] + tokens > trained.most_tokens:
        raise UsageError(
            f"the text has {given.shape[1]} tokens and {tokens} are to be added, but the model "
            f"takes {trained.most_tokens}; give a shorter text, or --tokens"
        )
    chance = torch.Generator().manual_seed(seed)
    model: Any = trained.model
    added: list[int] = []
    shown, past = "", None
    for _ in range(tokens):
        with torch.no_grad():
            out = model(input_ids=given, past_key_values=past, use_cache=True)
        past = out.past_key_values
        token = _chosen(out.logits[0, -1].float(), temperature, top_p, chance)
        if token == trained.tokenizer.eos_id:
            return
        added.append(token)
        said = trained.tokenizer.decode(added)
        if not said.endswith(_UNFINISHED):
            yield said[len(shown) :]
            shown = said
        given = torch.tensor([[token]])


def _chosen(logits: Tensor, temperature: float, top_p: float, chance: torch.Generator) -> int:
    """Return the next token."""
    if not temperature:
        return int(logits.argmax())
    shares, order = (logits / temperature).softmax(0).sort(descending=True)
    # A token counts if those before it have less than the share.
    shares[shares.cumsum(0) - shares >= top_p] = 0.0
    return int(order[torch.multinomial(shares, 1, generator=chance)])
