"""Digests of a run's inputs, by which a resumed run detects that an input has changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Self

from cleave.training.data.batches import Corpus
from cleave.training.data.tokenizer import TextTokenizer, json_object

FINGERPRINTS: Final = "fingerprints"  # key of the fingerprints in a checkpoint's metadata
_WORDS: Final = {
    "text": "training text",
    "held_out": "held-out text",
    "tokenizer": "tokenizer",
    "template": "chat template",
    "model": "model configuration",
}
# Configuration keys that do not affect the model, but may change whenever the model is saved.
_NOT_OF_THE_MODEL: Final = {"_name_or_path", "transformers_version", "dtype", "torch_dtype"}


@dataclass(frozen=True, slots=True)
class Fingerprints:
    """SHA-256 digests, in hex, of the inputs that determine a run's results.

    `template` is empty if the model has no chat template. `model` is the digest of the
    configuration in the model folder, and is empty for a model without a folder.
    """

    text: str
    held_out: str
    tokenizer: str
    template: str
    model: str

    @classmethod
    def of(cls, corpus: Corpus, tokenizer: TextTokenizer, folder: Path | None) -> Self:
        """Return the fingerprints of a run's inputs. `folder` is None without a model folder."""
        return cls(
            text=hashlib.sha256(corpus.train.data).hexdigest(),
            held_out=hashlib.sha256(corpus.validation.data).hexdigest(),
            tokenizer=tokenizer.fingerprint,
            template=_of_template(folder) if folder is not None else "",
            model=_of_config(folder / "config.json") if folder is not None else "",
        )

    def changed(self, saved: Mapping[str, Any]) -> list[str]:
        """Return the names of the fingerprints whose values in `saved` differ."""
        mine = {field.name: getattr(self, field.name) for field in fields(self)}
        return [name for name in mine if name in saved and saved[name] != mine[name]]


def in_words(names: list[str]) -> str:
    """Return a phrase for fingerprint names, as "another tokenizer and another chat template"."""
    return " and ".join(f"another {_WORDS[name]}" for name in names)


def _of_template(folder: Path) -> str:
    stated = json_object(folder / "tokenizer_config.json").get("chat_template")
    files = [folder / "chat_template.jinja", *sorted(folder.glob("additional_chat_templates/*"))]
    found = [stated, *(path.read_text(encoding="utf-8") for path in files if path.is_file())]
    if not any(found):
        return ""
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def _of_config(path: Path) -> str:
    kept = {key: value for key, value in json_object(path).items() if key not in _NOT_OF_THE_MODEL}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()
