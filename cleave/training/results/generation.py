"""Text generation with a trained model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cleave.errors import UsageError
from cleave.training.results.trained import TrainedModel
from cleave.workload.models.build import quiet_transformers

_UNFINISHED = "\ufffd"  # replacement character, to which an incomplete UTF-8 sequence decodes


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
    """Continue a text until the model generates an end token.

    The function uses `generate` of transformers. The model's generation configuration sets the end
    tokens, penalties and other options.

    Args:
        trained: the model.
        text: the text to continue.
        tokens: maximum number of generated tokens.
        say: called with each new piece of generated text; returns False to stop the generation.
        chat: whether the text was rendered with a chat template. The template already adds begin
            tokens, so none are added here.
        temperature: sampling temperature; 0 for greedy decoding.
        top_p: minimum total probability of the most likely tokens, from which each token is sampled
            (nucleus sampling).
        seed: seed of the random number generator for sampling.

    Raises:
        UsageError: the text is empty, has a token outside the model's vocabulary, or leaves too
            little of the model's context for `tokens` new tokens.
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
        """Call `say` with the text that the last token adds.

        Returns:
            For each sequence, whether to stop the generation.
        """
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
            pad_token_id=trained.tokenizer.eos_id,  # one text needs no padding
            stopping_criteria=[added],
            **drawing,
        )
    if wanted and (rest := text_of(ids[0].tolist())[len(shown) :]):
        say(rest)  # `rest` ends in an incomplete character
