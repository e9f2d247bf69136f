"""Training data: documents from many places, packed tokens, and batches in a seeded order."""

import hashlib
import io
import json
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from cleave.errors import UsageError
from cleave.training.run_folder import write_atomically

Tokens = npt.NDArray[np.int32]
"""A 1-D array of token ids."""

Batch = tuple[torch.Tensor, torch.Tensor]
"""(input_ids, labels), both int64 (batch, seq), with labels[:, t] == the token after t."""

# 1 GiB of int32 in memory: a bound for streamed data sets, which may have no end.
MAX_TOKENS = 2**28

# fmt: off
_TEXT_SUFFIXES = frozenset((
    ".txt", ".text", ".md", ".rst", ".tex", ".html", ".xml", ".csv", ".py", ".pyi", ".c", ".h",
    ".cc", ".cpp", ".hpp", ".cu", ".cs", ".go", ".java", ".js", ".jsx", ".kt", ".lua", ".php",
    ".rb", ".rs", ".scala", ".sh", ".sql", ".swift", ".ts", ".tsx",
))
# fmt: on
_SUFFIXES = _TEXT_SUFFIXES | {".jsonl", ".parquet"}
_FIELDS = ("text", "content")
_DATASET_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# Not library source: what is installed beside it, its tests, tables of code points, and what
# differs between two builds of the same version.
_NOT_LIBRARY = re.compile(
    r"(site-packages|dist-packages|test|tests|idlelib|lib2to3|encodings|__pycache__|config-.*"
    r"|_sysconfigdata.*)"
)
_PIECE_CHARS = 2**20
_BATCH_CHARS = 2**22


class Encoder(Protocol):
    """What building a corpus needs of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_id(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...
    def encode_batch(self, texts: list[str], /) -> list[Tokens]: ...


@dataclass(frozen=True, eq=False)
class Corpus:
    """Packed tokens, 1-D int32, with an end-of-text token after every document."""

    train: Tokens
    validation: Tokens

    def check(self, seq_len: int) -> None:
        """Raise UsageError unless each split holds one sequence of `seq_len` tokens.

        A sequence takes one token more than its length, for the last label.
        """
        for name, tokens in (("training", self.train), ("validation", self.validation)):
            if len(tokens) < seq_len + 1:
                raise UsageError(
                    f"The {name} split has {len(tokens)} tokens and one sequence of {seq_len} "
                    f"needs {seq_len + 1}: give more text, or a shorter sequence length."
                )


@dataclass(frozen=True)
class LoaderState:
    """Where a BatchLoader stands: `position` sequences of `epoch` have been handed out."""

    epoch: int
    position: int


class BatchLoader:
    """Batches from packed tokens, in an order that only depends on the seed.

    Sequence i is tokens[i * seq : (i + 1) * seq + 1]: neighbours share one token, which is a
    label of the first and an input of the second. Each epoch hands out every sequence once, in a
    new permutation; a batch may straddle two epochs. A last incomplete sequence is left out.
    """

    def __init__(self, tokens: Tokens, *, batch: int, seq: int, seed: int) -> None:
        """Raises UsageError when a number is out of range or `tokens` hold no sequence."""
        _check_sizes(batch, seq)
        if seed < 0:
            raise UsageError(f"The seed is {seed}: it must be 0 or more.")
        self._tokens = tokens
        self._batch = batch
        self._seq = seq
        self._seed = seed
        self._count = _sequence_count(tokens, seq)
        self._epoch = 0
        self._position = 0
        self._order = self._permutation()

    def __len__(self) -> int:
        """Sequences per epoch."""
        return self._count

    def next_batch(self) -> Batch:
        """The next (input_ids, labels), both int64 (batch, seq). There is always a next one."""
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
        return _sequences(self._tokens, rows, self._seq)

    def state(self) -> LoaderState:
        """Where the next batch begins; give it to `restore` to go on from there."""
        return LoaderState(self._epoch, self._position)

    def restore(self, state: LoaderState) -> None:
        """Go on as the loader that returned `state` would, given the same data and arguments.

        Raises UsageError for a state that this data cannot have.
        """
        if state.epoch < 0 or not 0 <= state.position < self._count:
            raise UsageError(
                f"Position {state.position} of epoch {state.epoch} does not exist in data of "
                f"{self._count} sequences: resume with the data the run began with."
            )
        self._epoch = state.epoch
        self._position = state.position
        self._order = self._permutation()

    def _permutation(self) -> npt.NDArray[np.int64]:
        return np.random.default_rng([self._seed, self._epoch]).permutation(self._count)


def validation_batches(
    tokens: Tokens, batch: int, seq: int, limit: int | None = None
) -> Iterator[Batch]:
    """At most `limit` batches like `BatchLoader`'s, always the same, spread over all of `tokens`.

    Batches are full, so that the mean of their losses is the mean over their tokens; only where
    there are fewer than `batch` sequences, one smaller batch holds them all. Raises UsageError
    when there is no sequence at all.
    """
    _check_sizes(batch, seq)
    count = _sequence_count(tokens, seq)
    batch = min(batch, count)
    batches = count // batch if limit is None else min(limit, count // batch)
    total = batches * batch
    rows = np.arange(total, dtype=np.int64) * count // max(total, 1)
    return (_sequences(tokens, rows[i : i + batch], seq) for i in range(0, total, batch))


def cache_folder() -> Path:
    """Where derived files are kept: $CLEAVE_CACHE, $XDG_CACHE_HOME/cleave or ~/.cache/cleave."""
    if chosen := os.environ.get("CLEAVE_CACHE"):
        return Path(chosen).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "cleave"
    return Path.home() / ".cache" / "cleave"


def python_fingerprint() -> str:
    """A short name for this build of Python, and so for the source of its standard library."""
    build = f"{sys.implementation.name} {sys.version}"
    return hashlib.sha256(build.encode()).hexdigest()[:12]


def read_documents(source: str | None) -> Iterator[str]:
    """The documents of `source`, in an order that never changes; blank ones are left out.

    None is the source code of Python's standard library, one document per module. Otherwise:

    * a `.jsonl` file: the field "text" (or "content") of every line;
    * a `.parquet` file: the column "text" (or "content");
    * any other file: one document, UTF-8;
    * a folder: its text, `.jsonl` and `.parquet` files and those of its subfolders, sorted by
      path, without hidden ones and without text files that are not UTF-8;
    * else the name of a data set, whose "train" split the package `datasets` streams.

    Raises UsageError: at once when there is no such source, while iterating when it turns out
    broken or empty.
    """
    if source is None:
        return _nonempty(_standard_library(), "Python's standard library")
    path = Path(source).expanduser()
    try:
        if path.is_dir():
            return _nonempty(_read_folder(path), repr(source))
        exists = path.exists()
    except OSError as error:
        raise _unreadable(path, error) from error
    if exists:
        return _nonempty(_read_file(path), repr(source))
    if _DATASET_NAME.fullmatch(source) and path.suffix.lower() not in _SUFFIXES:
        return _nonempty(_read_dataset(source), repr(source))
    raise UsageError(f"There is no file or folder {source!r}: check the path.")


def build_corpus(
    source: str | None,
    tokenizer: Encoder,
    *,
    validation_fraction: float = 0.02,
    min_tokens: int = 2,
    max_tokens: int = MAX_TOKENS,
    cache_dir: Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> Corpus:
    """Read `source` (see `read_documents`), encode it and split it into training and validation.

    A document goes to validation when the hash of its text says so, for about
    `validation_fraction` of all documents; equal documents never part. Where that leaves either
    split fewer than `min_tokens` tokens (one sequence, plus one), as with a single document, the
    tail of all tokens becomes the validation split instead.

    Reading stops after about `max_tokens` tokens, and `progress`, which receives one line at a
    time, says so. The default source is cached in `cache_dir` (default: `cache_folder()`).

    Raises UsageError when the source cannot be read or has too little text for both splits.
    """
    if not 0 < validation_fraction < 1:
        raise UsageError(
            f"The validation fraction is {validation_fraction}: it must lie between 0 and 1."
        )
    tell = progress or _silent

    def encode() -> Corpus:
        documents = read_documents(source)
        return _encode(documents, tokenizer, validation_fraction, max_tokens, tell)

    if source is None:
        recipe = f"1 {tokenizer.fingerprint} {validation_fraction!r} {max_tokens}"
        key = hashlib.sha256(recipe.encode()).hexdigest()[:12]
        stem = f"stdlib-{python_fingerprint()}-{key}"
        corpus = _cached(cache_dir or cache_folder(), stem, tokenizer.vocab_size, encode, tell)
    else:
        corpus = encode()
    return _with_enough(corpus, validation_fraction, min_tokens, source)


# --- sequences ---------------------------------------------------------------------------------


def _check_sizes(batch: int, seq: int) -> None:
    if batch < 1 or seq < 1:
        raise UsageError(
            f"The batch size is {batch} and the sequence length {seq}: both must be at least 1."
        )


def _sequence_count(tokens: Tokens, seq: int) -> int:
    count = (len(tokens) - 1) // seq
    if count < 1:
        raise UsageError(
            f"{len(tokens)} tokens hold no sequence of {seq}, which needs {seq + 1}: "
            "give more text, or a shorter sequence length."
        )
    return count


def _sequences(tokens: Tokens, rows: npt.NDArray[np.int64], seq: int) -> Batch:
    positions = rows[:, None] * seq + np.arange(seq + 1)
    ids = torch.from_numpy(tokens[positions].astype(np.int64))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


# --- documents ---------------------------------------------------------------------------------


def _nonempty(documents: Iterable[str], name: str) -> Iterator[str]:
    found = False
    for document in documents:
        if document and not document.isspace():
            found = True
            yield document
    if not found:
        raise UsageError(f"There is no text in {name}: give a source that has some.")


def _standard_library() -> Iterator[str]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in _walk(root, lambda name: _NOT_LIBRARY.fullmatch(name) is None):
        if path.suffix == ".py" and (text := _decoded(path)) is not None:
            yield text


def _read_folder(folder: Path) -> Iterator[str]:
    paths = _walk(folder, lambda name: not name.startswith("."))
    chosen = [path for path in paths if path.suffix.lower() in _SUFFIXES]
    if not chosen:
        raise UsageError(
            f"The folder {str(folder)!r} has no text files (.txt, .md, .py, .jsonl, .parquet and "
            "the like): give one that has."
        )
    for path in chosen:
        if path.suffix.lower() in _TEXT_SUFFIXES:
            if (text := _decoded(path)) is not None:
                yield text
        else:
            yield from _read_file(path)


def _walk(root: Path, wanted: Callable[[str], bool]) -> list[Path]:
    """All files below `root`, sorted, leaving out every file and folder not `wanted` by name."""

    def fail(error: OSError) -> None:
        raise _unreadable(Path(error.filename or root), error) from error

    found = []
    for folder, subfolders, files in os.walk(root, onerror=fail):
        subfolders[:] = filter(wanted, subfolders)
        found += [Path(folder, name) for name in files if wanted(name)]
    return sorted(found)


def _read_file(path: Path) -> Iterator[str]:
    match path.suffix.lower():
        case ".jsonl":
            yield from _read_jsonl(path)
        case ".parquet":
            yield from _read_parquet(path)
        case _:
            if (text := _decoded(path)) is None:
                raise _not_utf8(path)
            yield text


def _decoded(path: Path) -> str | None:
    """The text of a file, or None when it is not UTF-8."""
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError:
        return None
    except OSError as error:
        raise _unreadable(path, error) from error


def _read_jsonl(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8-sig", newline="\n") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.isspace():
                    yield _text_of_line(path, number, line)
    except UnicodeDecodeError as error:
        raise _not_utf8(path) from error
    except OSError as error:
        raise _unreadable(path, error) from error


def _text_of_line(path: Path, number: int, line: str) -> str:
    where = f"Line {number} of {str(path)!r}"
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not JSON ({error}): every line must be one object.") from None
    if not isinstance(record, dict):
        raise UsageError(f'{where} is not a JSON object: write it as {{"text": ...}}.')
    for field in _FIELDS:
        if isinstance(text := record.get(field), str):
            # JSON can spell halves of surrogate pairs, which no tokenizer takes.
            return text.encode("utf-8", "replace").decode("utf-8")
    raise UsageError(
        f'{where} has no string "text" or "content" but {_listed(record)}: rename its field.'
    )


def _read_parquet(path: Path) -> Iterator[str]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UsageError(
            f"Reading {str(path)!r} needs pyarrow: pip install 'cleave[train]'."
        ) from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            field = next((name for name in _FIELDS if name in columns), None)
            if field is None:
                raise UsageError(
                    f'{str(path)!r} has no column "text" or "content" but {_listed(columns)}: '
                    "rename the one that holds the text."
                )
            for rows in file.iter_batches(columns=[field], batch_size=1024):
                for text in rows.column(0).to_pylist():
                    if text is not None and not isinstance(text, str):
                        raise UsageError(
                            f"The column {field!r} of {str(path)!r} holds {type(text).__name__}, "
                            "not strings: give a file whose column is text."
                        )
                    yield text or ""
    except (pyarrow.ArrowException, OSError) as error:
        raise UsageError(
            f"{str(path)!r} cannot be read as Parquet ({_first_line(error)}): check the file."
        ) from error


def _read_dataset(name: str) -> Iterator[str]:
    try:
        import datasets
    except ImportError:
        raise UsageError(
            f"There is no file or folder {name!r}: check the path, or, if it is the name of a "
            "data set, pip install 'cleave[datasets]'."
        ) from None
    # What a loader of arbitrary data sets raises is no closed list, hence the broad excepts.
    try:
        rows = iter(datasets.load_dataset(name, split="train", streaming=True))
    except Exception as error:
        raise _unreachable(name, error) from error
    return _texts_of_rows(rows, name)


def _texts_of_rows(rows: Iterator[dict[str, Any]], name: str) -> Iterator[str]:
    while True:
        try:
            row = next(rows, None)
        except Exception as error:
            raise _unreachable(name, error) from error
        if row is None:
            return
        text = next((row[field] for field in _FIELDS if isinstance(row.get(field), str)), None)
        if text is None:
            raise UsageError(
                f'The data set {name!r} has no string field "text" or "content" but '
                f"{_listed(row)}: choose another, or export its text to a .jsonl file."
            )
        yield text


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names) or "no fields at all"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def _unreadable(path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"{str(path)!r} cannot be read ({error.strerror}): check the path and its permissions."
    )


def _not_utf8(path: Path) -> UsageError:
    return UsageError(f"{str(path)!r} is not UTF-8 text: convert it, or give another file.")


def _unreachable(name: str, error: Exception) -> UsageError:
    return UsageError(
        f"There is no file or folder {name!r}, and as a data set it cannot be loaded "
        f"({_first_line(error)}): check the name and the network, or give a local file."
    )


# --- tokens ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Piece:
    """Some text of a document, for one split; `last` where the document ends."""

    text: str
    validation: bool
    last: bool


def _encode(
    documents: Iterable[str],
    tokenizer: Encoder,
    validation_fraction: float,
    max_tokens: int,
    tell: Callable[[str], None],
) -> Corpus:
    train: list[Tokens] = []
    validation: list[Tokens] = []
    end = np.array([tokenizer.eos_id], np.int32)
    total = 0
    tell("Reading and encoding the training text")
    for batch in _batches(_pieces(documents, validation_fraction)):
        for piece, tokens in zip(
            batch, tokenizer.encode_batch([piece.text for piece in batch]), strict=True
        ):
            split = validation if piece.validation else train
            split.append(tokens)
            total += len(tokens)
            if piece.last:
                split.append(end)
                total += 1
        tell(f"Encoded {total / 1e6:.1f} million tokens")
        if total >= max_tokens:
            tell(f"Stopped reading at {total} tokens, as max_tokens is {max_tokens}")
            break
    return Corpus(_packed(train), _packed(validation))


def _pieces(documents: Iterable[str], validation_fraction: float) -> Iterator[_Piece]:
    """Cut long documents where a line begins: encoding takes memory many times the text's size."""
    for document in documents:
        digest = hashlib.sha256(document.encode("utf-8")).digest()
        validation = int.from_bytes(digest[:8], "big") < validation_fraction * 2**64
        start = 0
        while len(document) - start > _PIECE_CHARS:
            end = document.rfind("\n", start + 1, start + _PIECE_CHARS)
            end = end if end > 0 else start + _PIECE_CHARS
            yield _Piece(document[start:end], validation, last=False)
            start = end
        yield _Piece(document[start:], validation, last=True)


def _batches(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    batch: list[_Piece] = []
    chars = 0
    for piece in pieces:
        batch.append(piece)
        chars += len(piece.text)
        if chars >= _BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def _packed(parts: Sequence[Tokens]) -> Tokens:
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def _with_enough(
    corpus: Corpus, validation_fraction: float, min_tokens: int, source: str | None
) -> Corpus:
    if min(len(corpus.train), len(corpus.validation)) >= min_tokens:
        return corpus
    tokens = _packed([corpus.train, corpus.validation])
    if len(tokens) < 2 * min_tokens:
        name = "Python's standard library" if source is None else repr(source)
        raise UsageError(
            f"The text of {name} gives {len(tokens)} tokens, and training and validation need "
            f"{min_tokens} each: give more text, or a shorter sequence length."
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
    """The corpus kept under `folder`, encoded anew (and kept) where it is missing or damaged."""
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
    except OSError as error:  # a cache is a convenience: training goes on without one
        tell(f"The encoded text is not kept, {str(folder)!r} cannot be written: {error.strerror}")
    return corpus


def _load_tokens(path: Path, vocab_size: int) -> Tokens | None:
    try:
        tokens = np.load(path)
    except (OSError, ValueError, EOFError):
        return None
    if not isinstance(tokens, np.ndarray) or tokens.dtype != np.int32 or tokens.ndim != 1:
        return None
    if tokens.size and (tokens.min() < 0 or tokens.max() >= vocab_size):
        return None
    return tokens


def _silent(message: str) -> None:
    """Progress that nobody watches."""
