"""Tokens of the training and validation splits, and batches of sequences in a seeded order."""

import hashlib
import io
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from cleave.errors import UsageError
from cleave.files import cache_folder, write_atomically
from cleave.training.data.conversations import Completion, Conversation, Document
from cleave.training.data.documents import read_documents

Tokens = npt.NDArray[np.int32]
"""A 1-D array of marked token IDs.

The first token of each document is stored as `id | START`. If a token is not learned, for example
because it belongs to a prompt, the bitwise complement is stored instead, which is negative.
"""

START = 2**30  # bit that marks a document's first token; no token ID reaches this value


class Batch(NamedTuple):
    """A batch of packed token sequences. All tensors are int64, of shape (batch, seq).

    Attributes:
        labels: ID of the token after each token of `ids`; IGNORED if that token is not learned.
        positions: index of each token in its document, counted from the start of the sequence if
            the document begins earlier. None if tokens may attend to earlier documents.
    """

    ids: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor | None = None


IGNORED = -100  # label that the loss ignores, as in torch and transformers

# Limit memory to 1 GiB of int32 tokens, because a streamed data set may be endless.
MAX_TOKENS = 2**28

_PIECE_CHARS = 2**20
_BATCH_CHARS = 2**22


class Encoder(Protocol):
    """Interface for tokenizers that `build_corpus` accepts, such as `TextTokenizer`."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_id(self) -> int: ...
    @property
    def begin_ids(self) -> Tokens: ...
    @property
    def fingerprint(self) -> str: ...
    def encode_batch(self, texts: list[str], /) -> list[Tokens]: ...
    def encode_answers(self, document: Conversation | Completion, /) -> Tokens: ...


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokens of the training and validation splits.

    Each split concatenates its documents. An end-of-text token follows each document.
    """

    train: Tokens
    validation: Tokens

    @property
    def largest_id(self) -> int:
        """Return the largest token ID in either split."""
        parts = (np.where(each < 0, ~each, each) & ~START for each in (self.train, self.validation))
        return max(int(part.max(initial=0)) for part in parts)

    def check(self, seq: int, *, separate: bool = False, judged: bool = True) -> None:
        """Raise UsageError if a split contains no complete sequence with a learned token.

        Args:
            seq: number of input tokens per sequence. The last label needs one more token.
            separate: whether tokens attend only to their own document; see `BatchLoader`.
            judged: whether the validation split also needs a learned token.
        """
        for name, tokens in (("training", self.train), ("validation", self.validation)):
            if len(tokens) < seq + 1:
                raise UsageError(
                    f"the {name} split has {len(tokens)} tokens, but one sequence of {seq} needs "
                    f"{seq + 1}; use more text, or a shorter sequence length"
                )
            if name == "training" or judged:
                try:
                    _learned_rows(tokens, seq, separate=separate)
                except UsageError as error:
                    raise UsageError(f"in the {name} split, {error}") from None


@dataclass(frozen=True)
class LoaderState:
    """Position of a `BatchLoader`.

    Attributes:
        epoch: number of the epoch, from 0.
        position: number of sequences already returned in this epoch.
    """

    epoch: int
    position: int


class BatchLoader:
    """Loads training batches. The same data and arguments always yield the same batches.

    Sequence i is tokens[i * seq : (i + 1) * seq + 1]. The last label of a sequence is therefore the
    first input of the next sequence. Each epoch returns every sequence once, in a new random order.
    A batch may span epochs. An incomplete last sequence and sequences without a learned token are
    skipped.

    With `separate`, tokens attend only to their own document. Batches then include `positions`, and
    the first token of a document is not learned, because it has no context.

    Raises:
        UsageError: if `batch`, `seq` or `seed` is too small, or if `tokens` contains no complete
            sequence with a learned token.
    """

    def __init__(
        self, tokens: Tokens, *, batch: int, seq: int, seed: int, separate: bool = False
    ) -> None:
        _check_sizes(batch, seq)
        if seed < 0:
            raise UsageError(f"the seed must be 0 or more, not {seed}")
        self._tokens = tokens
        self._batch = batch
        self._seq = seq
        self._seed = seed
        self._separate = separate
        self._rows = _learned_rows(tokens, seq, separate=separate)
        self._count = len(self._rows)
        self._epoch = 0
        self._position = 0
        self._order = self._permutation()

    def __len__(self) -> int:
        """Return the number of sequences per epoch."""
        return self._count

    def next_batch(self) -> Batch:
        """Return the next batch. After the last sequence of an epoch, begin the next epoch."""
        rows = np.empty(self._batch, np.int64)
        filled = 0
        while filled < self._batch:
            taken = self._order[self._position : self._position + self._batch - filled]
            rows[filled : filled + len(taken)] = taken
            filled += len(taken)
            self._position += len(taken)
            if self._position == self._count:
                self._epoch += 1
                self._position = 0
                self._order = self._permutation()
        return _sequences(self._tokens, self._rows[rows], self._seq, separate=self._separate)

    def state(self) -> LoaderState:
        """Return the position of the next batch, which `restore` accepts."""
        return LoaderState(self._epoch, self._position)

    def restore(self, state: LoaderState) -> None:
        """Continue at a position that `state()` returned for the same data and arguments."""
        if state.epoch < 0 or not 0 <= state.position < self._count:
            raise UsageError(
                f"position {state.position} of epoch {state.epoch} does not exist in data with "
                f"{self._count} sequences; resume with the run's original data"
            )
        self._epoch = state.epoch
        self._position = state.position
        self._order = self._permutation()

    def _permutation(self) -> npt.NDArray[np.int64]:
        return np.random.default_rng([self._seed, self._epoch]).permutation(self._count)


def validation_batches(
    tokens: Tokens, batch: int, seq: int, limit: int | None = None, *, separate: bool = False
) -> Iterator[Batch]:
    """Return an iterator of batches whose sequences are evenly spaced over `tokens`.

    Each batch contains `batch` sequences. If `tokens` contains fewer sequences, one batch contains
    them all.

    Args:
        limit: maximum number of batches; None for no limit.

    Raises:
        UsageError: if `batch` or `seq` is too small, or if `tokens` contains no complete sequence
            with a learned token.
    """
    _check_sizes(batch, seq)
    chosen = _learned_rows(tokens, seq, separate=separate)
    count = len(chosen)
    batch = min(batch, count)
    batches = count // batch if limit is None else min(limit, count // batch)
    total = batches * batch
    rows = np.arange(total, dtype=np.int64) * count // max(total, 1)
    return (
        _sequences(tokens, chosen[rows[i : i + batch]], seq, separate=separate)
        for i in range(0, total, batch)
    )


def python_fingerprint() -> str:
    """Return a digest (12 hex digits) that identifies the Python build and its library."""
    build = f"{sys.implementation.name} {sys.version}"
    return hashlib.sha256(build.encode()).hexdigest()[:12]


def build_corpus(
    source: str | None,
    tokenizer: Encoder,
    *,
    held_out: str | None = None,
    validation_fraction: float = 0.02,
    min_tokens: int = 2,
    max_tokens: int = MAX_TOKENS,
    cache_dir: Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> Corpus:
    """Read and encode the documents of a source, and divide them into two splits.

    A hash of each document's text selects its split, so equal documents are in the same split. If a
    split would have fewer than `min_tokens` tokens, for example because the source is a single
    document, all tokens are concatenated instead, and the last tokens become the validation split.

    Args:
        source: file, folder or data set of the training text, as for `read_documents`. The tokens
            of the default source (None) are cached in `cache_dir`, by default the user's cache
            folder.
        held_out: a separate source for the whole validation split. All documents of `source` are
            then used for training. None to split `source`.
        validation_fraction: approximate fraction of the documents assigned to the validation split,
            between 0 and 1.
        max_tokens: number of tokens after which Cleave stops reading a source.

    Raises:
        UsageError: if `validation_fraction` is invalid, if a source cannot be read, or if `source`
            has too little text for both splits.
    """
    if not 0 < validation_fraction < 1:
        raise UsageError(
            f"the validation fraction must be between 0 and 1, not {validation_fraction}"
        )
    tell = progress or (lambda text: None)

    def encode(source: str | None) -> Corpus:
        documents = read_documents(source)
        return _encode(documents, tokenizer, validation_fraction, max_tokens, tell)

    if source is None:
        recipe = f"2 {tokenizer.fingerprint} {validation_fraction!r} {max_tokens}"
        key = hashlib.sha256(recipe.encode()).hexdigest()[:12]
        stem = f"stdlib-{python_fingerprint()}-{key}"
        folder = cache_dir or cache_folder()
        corpus = _cached(folder, stem, tokenizer.vocab_size, lambda: encode(None), tell)
    else:
        corpus = encode(source)
    if held_out is not None:
        return Corpus(_whole(corpus), _whole(encode(held_out)))
    return _with_enough(corpus, validation_fraction, min_tokens, source)


def _check_sizes(batch: int, seq: int) -> None:
    if batch < 1 or seq < 1:
        raise UsageError(
            f"the batch size and the sequence length must be at least 1, not {batch} and {seq}"
        )


def _learned_rows(tokens: Tokens, seq: int, *, separate: bool) -> npt.NDArray[np.int64]:
    """Return the indices of the sequences that contain a learned token; see `BatchLoader`."""
    count = (len(tokens) - 1) // seq
    if count < 1:
        raise UsageError(
            f"{len(tokens)} tokens contain no sequence of {seq}, which needs {seq + 1}; use more "
            "text, or a shorter sequence length"
        )
    labels = tokens[1 : count * seq + 1].reshape(count, seq)
    learned = (labels >= 0) & (labels < START) if separate else labels >= 0
    rows = np.flatnonzero(learned.any(axis=1))
    if not len(rows):
        raise UsageError(
            f"no sequence of {seq} tokens has an answer to learn; use more text, or a longer "
            "sequence length"
        )
    return rows


def _sequences(tokens: Tokens, rows: npt.NDArray[np.int64], seq: int, *, separate: bool) -> Batch:
    places = rows[:, None] * seq + np.arange(seq + 1)
    marked = torch.from_numpy(tokens[places].astype(np.int64))
    ids, labels = ids_of(marked[:, :-1]), labels_of(marked[:, 1:])
    if not separate:
        return Batch(ids, labels)
    begins = starts_of(marked)
    labels = torch.where(begins[:, 1:], IGNORED, labels)
    return Batch(ids, labels, positions_of(begins[:, :-1]))


def cut_documents(tokens: Tokens, seq: int) -> float:
    """Return the share of sequences that begin within a document, without its earlier part."""
    firsts = torch.from_numpy(tokens[: (len(tokens) - 1) // seq * seq : seq].astype(np.int64))
    return float((~starts_of(firsts)).double().mean())


def learned_tokens(labels: torch.Tensor) -> int:
    """Return the number of labels that are not IGNORED."""
    return int((labels != IGNORED).sum())


def ids_of(marked: torch.Tensor) -> torch.Tensor:
    """Return the token IDs of marked tokens, without their marks; see `Tokens`."""
    return torch.where(marked < 0, ~marked, marked) & ~START


def labels_of(marked: torch.Tensor) -> torch.Tensor:
    """Return the IDs of marked tokens, with IGNORED for tokens that are not learned."""
    return torch.where(marked < 0, IGNORED, marked & ~START)


def starts_of(marked: torch.Tensor) -> torch.Tensor:
    """Return a boolean mask of the marked tokens that are the first token of a document."""
    return torch.where(marked < 0, ~marked, marked) >= START


def positions_of(begins: torch.Tensor) -> torch.Tensor:
    """Compute `Batch.positions` from a mask that is True at the first token of each document.

    The mask and the result have the shape (batch, seq).
    """
    places = torch.arange(begins.shape[1]).expand(begins.shape)
    return places - torch.where(begins, places, 0).cummax(dim=1).values


@dataclass(frozen=True)
class _Piece:
    """A whole document, or a part of a long text. `last` is False for every part but the last."""

    document: Document
    chars: int
    validation: bool
    last: bool = True


def encode_documents(documents: Sequence[Document], tokenizer: Encoder) -> list[Tokens]:
    """Return the marked tokens of each document, without begin and end-of-text tokens.

    Tokens that are not learned are marked, but document starts are not; see `Tokens`.
    """
    texts = [document for document in documents if isinstance(document, str)]
    of_texts = iter(tokenizer.encode_batch(texts))
    return [
        next(of_texts) if isinstance(document, str) else tokenizer.encode_answers(document)
        for document in documents
    ]


def begin_of(document: Document, tokenizer: Encoder) -> Tokens:
    """Return a document's begin tokens, marked as not learned.

    For a conversation, return an empty array, because the chat template adds the begin tokens.
    """
    return np.empty(0, np.int32) if isinstance(document, Conversation) else ~tokenizer.begin_ids


def end_of(document: Document, tokenizer: Encoder) -> Tokens:
    """Return the end-of-text token that follows a document, as an array of one token.

    After a conversation, the token is marked as not learned, because the answer has its own end
    token.
    """
    eos = tokenizer.eos_id
    return np.array([~eos if isinstance(document, Conversation) else eos], np.int32)


def _encode(
    documents: Iterable[Document],
    tokenizer: Encoder,
    validation_fraction: float,
    max_tokens: int,
    tell: Callable[[str], None],
) -> Corpus:
    train, validation = list[Tokens](), list[Tokens]()
    total = 0
    begins = True
    tell("reading and encoding the training text")
    for batch in _batches(_pieces(documents, validation_fraction)):
        found = encode_documents([piece.document for piece in batch], tokenizer)
        for piece, tokens in zip(batch, found, strict=True):
            split = validation if piece.validation else train
            if begins:
                tokens = np.append(begin_of(piece.document, tokenizer), tokens)
            if piece.last:
                tokens = np.append(tokens, end_of(piece.document, tokenizer))
            split.append(_marked(tokens) if begins else tokens)
            total += len(tokens)
            begins = piece.last
        tell(f"encoded {total:,} tokens")
        if total >= max_tokens:
            tell(f"Stopped reading at {total} tokens, as max_tokens is {max_tokens}")
            break
    return Corpus(_packed(train), _packed(validation))


def _marked(tokens: Tokens) -> Tokens:
    """Return a copy of `tokens` with the first token marked as the start of a document."""
    marked = tokens.copy()
    first = marked[:1]
    marked[:1] = np.where(first < 0, ~(~first | START), first | START)
    return marked


def _pieces(documents: Iterable[Document], validation_fraction: float) -> Iterator[_Piece]:
    """Yield all documents, each assigned to the training or the validation split.

    Long texts are divided, because encoding a text needs many times the memory of the text itself.
    """
    for document in documents:
        text = document if isinstance(document, str) else document.text
        digest = hashlib.sha256(text.encode("utf-8", "replace")).digest()
        validation = int.from_bytes(digest[:8], "big") < validation_fraction * 2**64
        if not isinstance(document, str):
            yield _Piece(document, len(text), validation)
            continue
        start = 0
        while len(text) - start > _PIECE_CHARS:
            end = text.rfind("\n", start + 1, start + _PIECE_CHARS)
            end = end if end > 0 else start + _PIECE_CHARS
            yield _Piece(text[start:end], end - start, validation, last=False)
            start = end
        yield _Piece(text[start:], len(text) - start, validation)


def _batches(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    batch, chars = list[_Piece](), 0
    for piece in pieces:
        batch.append(piece)
        chars += piece.chars
        if chars >= _BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def _packed(parts: Sequence[Tokens]) -> Tokens:
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def _whole(corpus: Corpus) -> Tokens:
    return _packed([corpus.train, corpus.validation])


def _with_enough(
    corpus: Corpus, validation_fraction: float, min_tokens: int, source: str | None
) -> Corpus:
    if min(len(corpus.train), len(corpus.validation)) >= min_tokens:
        return corpus
    tokens = _whole(corpus)
    if len(tokens) < 2 * min_tokens:
        name = "Python's standard library" if source is None else repr(source)
        raise UsageError(
            f"the text of {name} has only {len(tokens)} tokens, but training and validation need "
            f"{min_tokens} each; use more text, or a shorter sequence length"
        )
    held_out = max(min_tokens, round(validation_fraction * len(tokens)))
    cut = len(tokens) - min(held_out, len(tokens) - min_tokens)
    return Corpus(tokens[:cut], tokens[cut:])


def _cached(
    folder: Path,
    stem: str,
    vocab_size: int,
    encode: Callable[[], Corpus],
    tell: Callable[[str], None],
) -> Corpus:
    """Return the corpus cached in `folder`. If it is missing or damaged, encode and cache it."""
    paths = (folder / f"{stem}-train.npy", folder / f"{stem}-validation.npy")
    arrays = [_load_tokens(path, vocab_size) for path in paths]
    if arrays[0] is not None and arrays[1] is not None:
        return Corpus(arrays[0], arrays[1])
    corpus = encode()
    try:
        for path, tokens in zip(paths, (corpus.train, corpus.validation), strict=True):
            buffer = io.BytesIO()
            np.save(buffer, tokens)
            write_atomically(path, buffer.getvalue())
    except OSError as error:  # continue without the cache, which only saves time
        tell(f"The encoded text is not cached: {str(folder)!r} is not writable ({error.strerror})")
    return corpus


def _load_tokens(path: Path, vocab_size: int) -> Tokens | None:
    try:
        tokens = np.load(path)
    except (OSError, ValueError, EOFError):
        return None
    if not isinstance(tokens, np.ndarray) or tokens.dtype != np.int32 or tokens.ndim != 1:
        return None
    ids = np.where(tokens < 0, ~tokens, tokens) & ~START
    return None if tokens.size and ids.max() >= vocab_size else tokens
