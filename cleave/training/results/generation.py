"""A model goes on with a text, token by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cleave.errors import UsageError
from cleave.training.results.trained import TrainedModel
from cleave.workload.models.build import quiet_transformers

_UNFINISHED = "\ufffd"  # what half a character decodes to


def go_on(
    trained: TrainedModel,
    text: str,
    tokens: int,
    say: Callable[[str], bool],
    *,
    chat: bool = False,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
) -> None:
    """Add to a text until the model ends it, as `generate` of transformers does.

    Tokens that end the text, penalties and the like are those of the model's generation
    configuration.

    Args:
        trained: the model.
        text: what it goes on with.
        tokens: that are added at most.
        say: called with each piece of text that was added; it returns False to stop.
        chat: whether the text is a rendered conversation, whose template wrote its first tokens.
        temperature: 0 for the likeliest token each time; else logits are divided by it.
        top_p: of the likeliest tokens that have this share together, one is drawn.
        seed: of the draws.

    Raises:
        UsageError: when the text and what is added do not fit the model.
    """
    (found,) = trained.tokenizer.encode_batch([text])
    given = found.tolist() if chat else trained.tokenizer.begin_ids.tolist() + found.tolist()
    if not given:
        raise UsageError(f"the tokenizer makes no token of {text!r}; give another text")
    if len(given) + tokens > trained.most_tokens:
        raise UsageError(
            f"the text has {len(given)} tokens and {tokens} are to be added, but the model "
            f"takes {trained.most_tokens}; give a shorter text, or --tokens"
        )
    trained.check_ids(given)
    model: Any = trained.model
    ends = model.generation_config.eos_token_id
    ends = trained.tokenizer.eos_id if ends is None else ends
    over = ends if isinstance(ends, list) else [ends]

    def text_of(ids: list[int]) -> str:
        return trained.tokenizer.decode(ids[:-1] if ids[-1] in over else ids, special=False)

    shown = trained.tokenizer.decode(given, special=False)
    wanted = True

    def added(ids: Tensor, *_: Any, **__: Any) -> Tensor:
        """Say what the last token adds; return whether to stop, as transformers asks."""
        nonlocal shown, wanted
        whole = text_of(ids[0].tolist())
        open_ended = whole.endswith(_UNFINISHED) or trained.tokenizer.is_byte(int(ids[0, -1]))
        if not open_ended and whole != shown:
            wanted = say(whole[len(shown) :])
            shown = whole
        return torch.full((len(ids),), not wanted)

    drawing = {"temperature": temperature, "top_p": top_p} if temperature else {}
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(seed)
        ids = model.generate(
            torch.tensor([given]),
            attention_mask=torch.ones(1, len(given), dtype=torch.long),
            max_new_tokens=tokens,
            do_sample=bool(temperature),
            num_beams=1,
            eos_token_id=ends,
            pad_token_id=trained.tokenizer.eos_id,  # of batches, and this is none
            stopping_criteria=[added],
            **drawing,
        )
    if wanted and (rest := text_of(ids[0].tolist())[len(shown) :]):
        say(rest)  # what no later token finished
