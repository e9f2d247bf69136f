"""A trained model and its tokenizer, loaded from a run folder or a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cleave.errors import UsageError
from cleave.training.data.tokenizer import TextTokenizer, folder_tokenizer
from cleave.training.loop.run_folder import RunFolder
from cleave.training.lora.adapters import ADAPTER_CONFIG, adapted_model, open_adapters
from cleave.training.results.export import (
    described_config,
    description_of,
    find_checkpoint,
    weights_of,
)
from cleave.workload.build import hub_folder, load_folder, quiet_transformers


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A model and its tokenizer, loaded for inference.

    Attributes:
        model: the model on the CPU, in fp32 and evaluation mode, with the key-value cache enabled.
        title: short description of the model for messages.
    """

    model: nn.Module
    tokenizer: TextTokenizer
    title: str

    @property
    def most_tokens(self) -> int:
        """Return the model's context length in tokens; 2**31 if the configuration has none."""
        config: Any = self.model.config
        return int(getattr(config, "max_position_embeddings", None) or 2**31)

    def check_ids(self, ids: Iterable[int]) -> None:
        """Raise UsageError if a token ID is not in the model's vocabulary."""
        config: Any = self.model.config
        held = int(getattr(config, "vocab_size", None) or 2**31)
        if (largest := max(ids, default=0)) >= held:
            raise UsageError(
                f"the tokenizer encodes this text with token {largest}, but the model has only "
                f"{held:,} tokens; use the model's own tokenizer"
            )


def open_trained(path: Path, step: int = 0) -> TrainedModel:
    """Load a trained model for inference.

    Args:
        path: a run folder, or a folder with a saved model or adapters (for example, an export), or
            the name of a model on the Hugging Face Hub that `hf download` has stored.
        step: step of the checkpoint in a run folder; 0 for the newest intact checkpoint.

    Raises:
        CleaveError: if the model does not exist or cannot be loaded.
    """
    if not path.is_dir():
        path = hub_folder(str(path)) or path
    if (path / "config.toml").is_file():
        return _of_run(RunFolder(path), step)
    if step:
        raise UsageError(f"--step needs a run folder, but {str(path)!r} is not one")
    if (path / ADAPTER_CONFIG).is_file():
        return _ready(open_adapters(path).get_base_model(), folder_tokenizer(path), str(path))
    model, _ = load_folder(path)
    return _ready(model, folder_tokenizer(path), str(path))


def _of_run(run: RunFolder, step: int) -> TrainedModel:
    from transformers import AutoModelForCausalLM

    checkpoint, folder = find_checkpoint(run, step), description_of(run)
    tokenizer, title = folder_tokenizer(folder), f"{run.path} after step {checkpoint.step}"
    job = run.read_config()
    if job.get("lora"):
        return _ready(adapted_model(job, checkpoint).get_base_model(), tokenizer, title)
    weights = weights_of(checkpoint)
    config = described_config(folder, weights.keys())
    with quiet_transformers():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(weights, strict=False)  # a checkpoint names each tied weight only once
    _generates_as(model, folder)
    return _ready(model, tokenizer, title)


@contextmanager
def in_training(model: Any, run: RunFolder, tokenizer: TextTokenizer) -> Iterator[TrainedModel]:
    """Yield the model of a run that is training, for inference; then continue in training mode."""
    _generates_as(model, description_of(run))
    try:
        yield _ready(model, tokenizer, str(run.path))
    finally:
        model.config.use_cache = False
        model.train()


def _generates_as(model: Any, folder: Path) -> None:
    """Read a model's generation configuration from a folder with the model's description."""
    from transformers import GenerationConfig

    # Without a readable file, the defaults from the model's configuration remain.
    with suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)


def _ready(model: Any, tokenizer: TextTokenizer, title: str) -> TrainedModel:
    model.config.use_cache = True
    return TrainedModel(model.eval(), tokenizer, title)
