"""Models that are known by their shape alone: folders with the published sizes, weights drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Final

SMOLLM2: Final = "smollm2-135m"
_TOKENS: Final = 4096  # of the tokenizer: those of the default corpus


def model_path(name: str, folder: Path) -> str:
    """Return a model as programs take it: SmolLM2's folder, which is made, or a registry's name.

    Args:
        name: of the model.
        folder: where folders of models are made.
    """
    if name != SMOLLM2:
        return name
    made = folder / SMOLLM2
    if not made.exists():
        _write_smollm2(made)
    return str(made)


def _write_smollm2(folder: Path) -> None:
    """Write a model of SmolLM2-135M's sizes, as its published config has them."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from cleave.training.tokenizer import default_tokenizer

    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192,
        rms_norm_eps=1e-5, rope_theta=100000.0, tie_word_embeddings=True,
        bos_token_id=0, eos_token_id=0, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    text = default_tokenizer(vocab_size=_TOKENS, progress=lambda _: None)
    held = text.library_tokenizer
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=held, eos_token=held.id_to_token(text.eos_id)
    )
    wrapped.save_pretrained(folder)
