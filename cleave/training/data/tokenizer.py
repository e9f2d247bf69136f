"""Tokenizers of model folders, and a default tokenizer trained on Python's standard library."""

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from cleave.errors import UsageError
from cleave.files import cache_folder, write_atomically
from cleave.training.data.batches import Tokens, python_fingerprint
from cleave.training.data.conversations import (
    ChatTemplate,
    Completion,
    Conversation,
    Message,
    rendered,
)
from cleave.training.data.documents import read_documents

_END_OF_TEXT = "<|endoftext|>"
_END_OF_TEXT_ID = 0  # the trainer numbers special tokens first
_BYTES = 256
_BYTE = re.compile("<0x[0-9A-F]{2}>")  # sentencepiece's name of a single-byte token
_TRAINING_CHARS = 8_000_000
# Common names of the end-of-text token, for model folders that do not specify the token.
_USUAL_ENDS = (_END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "[SEP]")


class TextTokenizer:
    """A tokenizer of the `tokenizers` library, with an end-of-text token and a chat template.

    Attributes:
        vocab_size: largest token ID plus 1.
        eos_id: ID of the end-of-text token, which follows every document.
        begin_ids: IDs of the begin tokens that precede every text, such as `<s>`; may be empty.
        fingerprint: SHA-256, in hex, of all settings that determine how text is encoded.
    """

    def __init__(
        self, tokenizer: Tokenizer, eos_id: int, template: ChatTemplate | None = None
    ) -> None:
        self._template = template
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())
        # A model folder's tokenizer may enable truncation and padding.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.eos_id = eos_id
        self.vocab_size = 1 + max(self._tokenizer.get_vocab().values())
        self._library = self._tokenizer.to_str()
        begin = _begin_of(self._tokenizer)
        self.begin_ids: Tokens = np.array(begin, np.int32)
        recipe = f"{eos_id}{f' {begin}' if begin else ''}\n{self._library}"
        self.fingerprint = hashlib.sha256(recipe.encode()).hexdigest()
        # Without special tokens, the post-processor would only trim spaces from token offsets.
        self._tokenizer.post_processor = None

    @property
    def library_tokenizer(self) -> Tokenizer:
        """Return a copy of the tokenizer that can also add special tokens to a text."""
        return Tokenizer.from_str(self._library)

    def encode_batch(self, texts: list[str]) -> list[Tokens]:
        """Return each text's token IDs as a 1-D array, without begin and end-of-text tokens."""
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def encode_answers(self, document: Conversation | Completion) -> Tokens:
        """Return the token IDs of a conversation, or of a prompt with a completion.

        All tokens except those of the answers or the completion are marked as not learned; see
        `Tokens`. Raise UsageError if no chat template can render a conversation.
        """
        if isinstance(document, Conversation):
            try:
                template = self._chat_template()
                if marked := template.marked(document.messages, document.tools):
                    ids, learned = (np.array(each, np.int32) for each in marked)
                    return np.where(learned, ids, ~ids)
                return self._learned(*rendered(document, template))
            except UsageError as error:
                place = f"{document.where}: " if document.where else ""
                raise UsageError(f"{place}{error}") from error
        return self._learned(document.text, [(len(document.prompt), len(document.text))])

    def _learned(self, text: str, answers: list[tuple[int, int]]) -> Tokens:
        """Encode a text and mark tokens outside the character ranges `answers` as not learned."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        ids = np.array(encoding.ids, np.int32)
        starts, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
        learned = np.zeros(len(ids), np.bool_)
        for first, stop in answers:
            learned |= (starts < stop) & ((starts >= first) | (ends > first))
        return np.where(learned, ids, ~ids)

    @property
    def has_template(self) -> bool:
        """Return True if the tokenizer has a chat template."""
        return self._template is not None

    def question(self, text: str, earlier: Sequence[Message] = ()) -> str:
        """Render a user's message with the chat template, followed by the generation prompt.

        The messages `earlier` come before the user's message.
        """
        return self._chat_template()([*earlier, {"role": "user", "content": text}], None, True)

    def _chat_template(self) -> ChatTemplate:
        if self._template is None:
            raise UsageError(
                'conversations ("messages", or --chat) need a chat template, but the tokenizer has '
                "none; use a model whose folder has a chat template, or plain text"
            )
        return self._template

    def is_byte(self, token: int) -> bool:
        """Return True if a token is a sentencepiece byte token, such as `<0x0A>`.

        A character outside the vocabulary is encoded as its UTF-8 bytes, one token per byte. The
        text of these tokens may change until the character's last byte is decoded.
        """
        return _BYTE.fullmatch(self._tokenizer.id_to_token(token) or "") is not None

    def decode(self, ids: Iterable[int], *, special: bool = True) -> str:
        """Decode token IDs to text, including special tokens if `special` is True."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=not special)


def default_tokenizer(
    cache_dir: Path | None = None,
    vocab_size: int = 4096,
    progress: Callable[[str], None] | None = None,
) -> TextTokenizer:
    """Return a byte-level BPE tokenizer, trained on the source of Python's standard library.

    The same Python build and `vocab_size` always give the same tokenizer. It is cached in
    `cache_dir`, by default the user's cache folder.

    Raises:
        UsageError: if `vocab_size` is too small for the 256 bytes and the end-of-text token, or
            too large for the training text.
    """
    if vocab_size <= _BYTES:
        raise UsageError(
            f"a vocabulary of {vocab_size} is too small; the bytes and the end-of-text token take "
            f"{_BYTES + 1}"
        )
    path = (cache_dir or cache_folder()) / f"tokenizer-{vocab_size}-{python_fingerprint()}.json"
    if (kept := _load(path, vocab_size)) is not None:
        return kept
    tell = progress or (lambda text: None)
    tell("training a tokenizer on Python's standard library (only this once)")
    trained = _train(vocab_size)
    if trained.get_vocab_size() != vocab_size:
        raise UsageError(
            f"a vocabulary of {vocab_size} is too large for the text of Python's standard library, "
            f"which yields only {trained.get_vocab_size()}; choose at most this size"
        )
    try:
        write_atomically(path, trained.to_str().encode())
    except OSError as error:  # continue without the cache, which only saves time
        tell(f"The tokenizer is not cached: {str(path)!r} is not writable ({error.strerror})")
    return TextTokenizer(trained, _END_OF_TEXT_ID)


def folder_tokenizer(folder: Path) -> TextTokenizer:
    """Load the tokenizer of a Hugging Face model folder.

    Nothing is downloaded, and no code from the folder is run.

    Raises:
        UsageError: if the folder has no readable tokenizer, or if the tokenizer's end-of-text token
            is unknown.
    """
    if not folder.is_dir():
        raise UsageError(f"there is no model folder {str(folder)!r}; check the path")
    path = folder / "tokenizer.json"
    eos_id: int | None = None
    if path.exists():
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no narrower class
            raise UsageError(
                f"{str(path)!r} cannot be read as a tokenizer ({error}); copy it from its source "
                "again"
            ) from error
    else:
        tokenizer, eos_id = _from_transformers(folder)
    if eos_id is None:
        eos_id = _end_of_text(folder, tokenizer)
    if eos_id is None:
        raise UsageError(
            f'the tokenizer in {str(folder)!r} does not name an end-of-text token; add "eos_token" '
            "to its tokenizer_config.json"
        )
    stated = json_object(folder / "tokenizer_config.json").get("chat_template")
    talks = stated or (folder / "chat_template.jinja").is_file()
    return TextTokenizer(tokenizer, eos_id, ChatTemplate(folder) if talks else None)


def _begin_of(tokenizer: Tokenizer) -> list[int]:
    """Return the IDs of the special tokens that a tokenizer prepends to every text."""
    alone = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a", add_special_tokens=True).ids
    before = (n for n in range(len(whole)) if whole[n : n + len(alone)] == alone)
    return whole[: next(before, 0)]


def _train(vocab_size: int) -> Tokenizer:
    documents = [d for d in read_documents(None) if isinstance(d, str)]
    random.Random(0).shuffle(documents)
    chosen = []
    chars = 0
    for document in documents:
        chosen.append(document)
        chars += len(document)
        if chars >= _TRAINING_CHARS:
            break
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(chosen, trainer)
    return tokenizer


def _load(path: Path, vocab_size: int) -> TextTokenizer | None:
    """Load a cached tokenizer. Return None if it is missing, damaged or of another size."""
    if not path.exists():
        return None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception:  # noqa: BLE001  the library raises no narrower class
        return None
    ends = tokenizer.token_to_id(_END_OF_TEXT) == _END_OF_TEXT_ID
    whole = ends and tokenizer.get_vocab_size() == vocab_size
    return TextTokenizer(tokenizer, _END_OF_TEXT_ID) if whole else None


def _from_transformers(folder: Path) -> tuple[Tokenizer, int | None]:
    missing = (
        f"the folder {str(folder)!r} has no tokenizer.json and no other tokenizer files that "
        "transformers can read (vocab.json with merges.txt, or tokenizer.model)"
    )
    advice = "copy the model's tokenizer files there"
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise UsageError(f"{missing}, and transformers is not installed; {advice}") from None
    try:
        wrapped = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # unknown files raise errors of any kind
        raise UsageError(f"{missing}; {advice}") from error
    # If tokenizer files are missing, transformers creates an empty tokenizer without an error.
    declared: dict[str, str] = wrapped.vocab_files_names
    names = (name for name in declared.values() if name != "tokenizer.json")
    absent = [name for name in names if not (folder / name).exists()]
    if absent:
        raise UsageError(
            f"the folder {str(folder)!r} has no tokenizer.json, and it cannot be created without "
            f"{' and '.join(absent)}; {advice}"
        )
    tokenizer = getattr(wrapped, "backend_tokenizer", None)
    if not isinstance(tokenizer, Tokenizer):
        raise UsageError(f"{missing} as a fast tokenizer; {advice}")
    return tokenizer, wrapped.eos_token_id


def _end_of_text(folder: Path, tokenizer: Tokenizer) -> int | None:
    """Return the ID of the end-of-text token; None if unknown.

    The configuration files take precedence over common names in the vocabulary.
    """
    names: list[Any] = [
        json_object(folder / file).get("eos_token")
        for file in ("tokenizer_config.json", "special_tokens_map.json")
    ]
    for name in names:
        token = name.get("content") if isinstance(name, dict) else name
        if isinstance(token, str) and (found := tokenizer.token_to_id(token)) is not None:
            return found
    for file in ("generation_config.json", "config.json"):
        ids = json_object(folder / file).get("eos_token_id")
        first = ids[0] if isinstance(ids, list) and ids else ids
        if isinstance(first, int) and tokenizer.id_to_token(first) is not None:
            return first
    known = (tokenizer.token_to_id(token) for token in _USUAL_ENDS)
    return next((found for found in known if found is not None), None)


def json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or an empty dict if the file is missing or damaged."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
