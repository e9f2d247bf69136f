"""Digests of what a run was begun with, by which a resumed run notices what has changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Self

from cleave.training.data.batches import Corpus
from cleave.training.data.tokenizer import TextTokenizer

FINGERPRINTS: Final = "fingerprints"
"""What a checkpoint calls them."""

_WORDS: Final = {
    "text": "training text",
    "held_out": "held-out text",
    "tokenizer": "tokenizer",
    "template": "chat template",
    "model": "model configuration",
}
# Saving a configuration again changes these, and a model is built the same whatever they are.
_NOT_OF_THE_MODEL: Final = {"_name_or_path", "transformers_version", "dtype", "torch_dtype"}


@dataclass(frozen=True, slots=True)
class Fingerprints:
    """Digests of what decides a run's numbers, in hex.

    Attributes:
        text, held_out: of the tokens, so of the documents and of how they are read.
        tokenizer: what decides which tokens a text has.
        template: the chat template; empty without one.
        model: the configuration in the model's folder; empty for a model that has none.
    """

    text: str
    held_out: str
    tokenizer: str
    template: str
    model: str

    @classmethod
    def of(cls, corpus: Corpus, tokenizer: TextTokenizer, folder: Path | None) -> Self:
        """Return those of a run that is to begin or go on.

        Args:
            corpus: the tokens.
            tokenizer: the tokenizer.
            folder: the model's folder; None for a model of the registry.
        """
        return cls(
            text=hashlib.sha256(corpus.train.data).hexdigest(),
            held_out=hashlib.sha256(corpus.validation.data).hexdigest(),
            tokenizer=tokenizer.fingerprint,
            template=_of_template(folder) if folder is not None else "",
            model=_of_config(folder / "config.json") if folder is not None else "",
        )

    def changed(self, saved: Mapping[str, Any]) -> list[str]:
        """Return the names of those that a checkpoint has otherwise; it may lack some."""
        mine = {field.name: getattr(self, field.name) for field in fields(self)}
        return [name for name in mine if name in saved and saved[name] != mine[name]]


def in_words(names: list[str]) -> str:
    """Return what has changed, as a list in words."""
    return " and ".join(f"another {_WORDS[name]}" for name in names)


def _of_template(folder: Path) -> str:
    stated = _json_of(folder / "tokenizer_config.json").get("chat_template")
    files = [folder / "chat_template.jinja", *sorted(folder.glob("additional_chat_templates/*"))]
    found = [stated, *(path.read_text(encoding="utf-8") for path in files if path.is_file())]
    if not any(found):
        return ""
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def _of_config(path: Path) -> str:
    kept = {key: value for key, value in _json_of(path).items() if key not in _NOT_OF_THE_MODEL}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _json_of(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one without it: who loads the model refuses it."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
