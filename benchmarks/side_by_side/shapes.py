"""Models known only by their shape: folders with published sizes and random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from cleave.workload.registry import Family, ModelSpec

SMOLLM2: Final = "smollm2-135m"
SMOLLM2_SPEC: Final = ModelSpec(
    name=SMOLLM2, family=Family.LLAMA, layers=30, width=576, heads=9, kv_heads=3, head_width=64,
    ffn_width=1536, vocabulary=49152, max_positions=8192, embedding_width=576, tied_head=True,
)  # fmt: skip
_TOKENS: Final = 4096  # vocabulary size of the tokenizer, as for the default corpus


def model_path(name: str, folder: Path) -> str:
    """Return a model for the command line: a folder, made for SmolLM2, or a registry name.

    Args:
        name: name of the model.
        folder: folder in which model folders are made.
    """
    if name != SMOLLM2:
        return name
    made = folder / SMOLLM2
    if not made.exists():
        _write_smollm2(made)
    return str(made)


def _write_smollm2(folder: Path) -> None:
    """Write a model with SmolLM2-135M's sizes from its published config."""
    from transformers import PreTrainedTokenizerFast

    from cleave.training.data.tokenizer import default_tokenizer
    from cleave.workload.build import build_model

    build_model(SMOLLM2_SPEC, seed=0).save_pretrained(folder)
    text = default_tokenizer(vocab_size=_TOKENS, progress=lambda _: None)
    held = text.library_tokenizer
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=held, eos_token=held.id_to_token(text.eos_id)
    )
    wrapped.save_pretrained(folder)
