"""Training data: where documents come from, how they are split, and the order of batches."""

import io
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave.errors import UsageError, to_install
from cleave.training.data.batches import (
    START,
    BatchLoader,
    Corpus,
    LoaderState,
    Tokens,
    build_corpus,
    validation_batches,
)
from cleave.training.data.conversations import Completion, Conversation
from cleave.training.data.documents import check_source, read_documents

EOS = 256


class Bytes:
    """A tokenizer whose ids are UTF-8 bytes; it counts the texts it encodes."""

    vocab_size = 257
    eos_id = EOS

    def __init__(self, fingerprint: str = "bytes", begin: Sequence[int] = ()) -> None:
        self.fingerprint = fingerprint
        self.begin_ids = np.array(begin, np.int32)
        self.encoded = 0

    def encode_batch(self, texts: list[str], /) -> list[Tokens]:
        self.encoded += len(texts)
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]

    def encode_answers(self, document: Conversation | Completion, /) -> Tokens:
        raise AssertionError(document)


def documents_of(tokens: Tokens) -> list[str]:
    """The documents that were packed into `tokens`, of each of which the first token is marked."""
    starts, tokens = np.flatnonzero(tokens >= START), tokens & ~START
    ends = np.flatnonzero(tokens == EOS)
    assert len(tokens) == 0 or ends[-1] == len(tokens) - 1
    assert starts.tolist() == [0, *ends + 1][:-1]
    parts = np.split(tokens, ends + 1)[:-1]
    return [bytes(part[:-1].astype(np.uint8)).decode() for part in parts]


def write_jsonl(path: Path, documents: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return str(path)


# --- documents ---


def test_the_default_is_the_source_of_the_standard_library() -> None:
    documents: list[Any] = list(read_documents(None))
    assert documents == list(read_documents(None))
    assert len(documents) > 300
    assert any("class OrderedDict(dict)" in document for document in documents)
    assert not any("class BatchLoader" in document for document in documents)


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path: Path) -> None:
    """Its JSON files are passed over, because they are rather settings than texts."""
    for name in ("b.txt", "a/z.md", "a/b/c.PY", "c/blank.txt", ".git/x.txt", ".x.txt", "m.bin"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("" if "blank" in name else name)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    write_jsonl(tmp_path / "d.jsonl", ["one", "two"])
    (tmp_path / "d.json").write_text('{"text": "a"}')
    pyarrow.parquet.write_table(pyarrow.table({"text": ["pq"]}), tmp_path / "e.parquet")
    found = list(read_documents(str(tmp_path)))
    assert found == ["a/b/c.PY", "a/z.md", "b.txt", "one", "two", "pq"]


def parquet(**columns: list[Any]) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "documents"),
    [
        ("corpus", b"\xef\xbb\xbfone\r\n\r\ntwo \xc3\xa9\n", ["one\n\ntwo \xe9\n"]),
        (
            "d.jsonl",
            b'{"text": "a\\u2028b", "id": 1}\n\n{"content": "c"}\n{"text": " "}\n{"text": "d"}',
            ["a\u2028b", "c", "d"],
        ),
        ("d.json", b'\xef\xbb\xbf [{"text": "a"},\n {"text": "b"}]', ["a", "b"]),
        ("d.json", b'\xef\xbb\xbf{"text": "a"}\n{"text": "b"}\n', ["a", "b"]),
        ("d.parquet", parquet(id=[1, 2, 3], content=["a", None, "b"]), ["a", "b"]),
    ],
)
def test_the_documents_of_a_file(
    tmp_path: Path, name: str, content: bytes, documents: list[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    assert list(read_documents(str(tmp_path / name))) == documents


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", b'{"text": "fine"}\n{', "line 2 of .*x.jsonl.*not valid JSON"),
        ("x.jsonl", b"[1]", "line 1 of .*not a JSON object"),
        ("x.jsonl", b"[" * 100_000, "line 1 of .*not valid JSON"),
        ("x.jsonl", b"\xff\xfe", "not UTF-8"),
        ("x.jsonl.gz", b"\x1f\x8b\x08", "x.jsonl.gz' is compressed; decompress it"),
        ("x.json", b'[{"text": "fine"}, 7]', "item 2 of .*not a JSON object"),
        ("x.json", b'[{"text": "fine"}', "x.json' is not valid JSON .*; write a list of objects"),
        (
            "x.jsonl",
            b'{"text": "fine"}\n{"text": "cut off"\n',
            r"line 2 of '.*x.jsonl' is not valid JSON \(Expecting ',' delimiter at column 19\)",
        ),
        ("x.json", b"\xff\xfe", "not UTF-8"),
        ("x.txt", b" \n", "no text in .*x.txt"),
        ("x.parquet", b"PAR1 and so on", "cannot be read as Parquet"),
        ("x.parquet", parquet(body=["x"], id=[1]), "none of the columns .*'body', 'id'"),
        ("x.parquet", parquet(text=[1]), 'has a "text" of type int, not a string'),
    ],
)
def test_bad_files_are_one_sentence(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message) as caught:
        list(read_documents(str(tmp_path / name)))
    assert "\n" not in str(caught.value)


def test_missing_sources_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`check_source` looks for a source and does not read it."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    check_source(str(tmp_path))
    with pytest.raises(UsageError, match="has no text files"):
        list(read_documents(str(tmp_path)))
    for look in (check_source, read_documents):
        for source, message in (
            (str(tmp_path / "missing"), "no file or folder .*missing"),
            ("corpus.txt", "no file or folder 'corpus.txt' in '.*'; check the path"),
            ("x" * 5000, "cannot be read .File name too long"),
            ("owner/some-set", f"'owner/some-set'.*{re.escape(to_install('datasets'))}"),
        ):
            with pytest.raises(UsageError, match=message):
                look(source)


def test_a_data_set_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(name: str, *, split: str, streaming: bool) -> Iterator[dict[str, str]]:
        assert (name, split, streaming) == ("owner/some-set", "train", True)
        return iter([{"text": "a"}, {"text": ""}, {"content": "b"}])

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert list(read_documents("owner/some-set")) == ["a", "b"]


def test_a_data_set_that_fails_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError("No route to host.\nmore")

    def broken(*_: object, **__: object) -> Iterator[dict[str, str]]:
        yield {"text": "a"}
        raise RuntimeError("lost the connection")

    def other(*_: object, **__: object) -> Iterator[dict[str, str]]:
        yield {"body": "a"}

    for load_dataset, message in (
        (refuse, "'some-set'.*No route to host\\); check the name"),
        (broken, "'some-set'.*lost the connection"),
        (other, "'some-set' has none of .*'body'"),
    ):
        monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
        with pytest.raises(UsageError, match=message):
            list(read_documents("some-set"))


# --- the corpus --------------------------------------------------------------------------------


def test_equal_documents_never_part_and_none_is_lost(tmp_path: Path) -> None:
    documents = [f"document {i % 300}" for i in range(600)]
    source = write_jsonl(tmp_path / "d.jsonl", documents)
    corpus = build_corpus(source, Bytes(), validation_fraction=0.2)
    train, validation = documents_of(corpus.train), documents_of(corpus.validation)
    assert sorted(train + validation) == sorted(documents)
    assert not set(train) & set(validation)
    assert 0.1 < len(validation) / len(documents) < 0.3
    assert corpus.train.dtype == corpus.validation.dtype == np.int32
    fewer = build_corpus(
        write_jsonl(tmp_path / "e.jsonl", documents[::-2]), Bytes(), validation_fraction=0.2
    )
    assert set(documents_of(fewer.validation)) <= set(validation)  # whatever else there is
    with pytest.raises(UsageError, match="validation fraction"):
        build_corpus(source, Bytes(), validation_fraction=1.0)


def test_a_single_document_gives_its_tail_to_validation(tmp_path: Path) -> None:
    text = "".join(f"line {i}\n" for i in range(1000))
    (tmp_path / "one.txt").write_text(text)
    corpus = build_corpus(str(tmp_path / "one.txt"), Bytes(), validation_fraction=0.1)
    whole = np.concatenate([corpus.train, corpus.validation])
    assert documents_of(whole) == [text]
    assert len(corpus.validation) == round(0.1 * len(whole))


def test_a_long_document_stays_whole_although_it_is_encoded_in_pieces(tmp_path: Path) -> None:
    tokenizer = Bytes()
    text = "a long line of text\n" * 60_000 + "x" * 2_500_000
    source = write_jsonl(tmp_path / "long.jsonl", [text])
    corpus = build_corpus(source, tokenizer)
    assert tokenizer.encoded > 3
    assert documents_of(np.concatenate([corpus.train, corpus.validation])) == [text]


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=20),
    min_tokens=st.integers(2, 60),
    fraction=st.floats(0.01, 0.99),
)
def test_each_split_has_the_tokens_it_needs_or_an_error_says_so(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], min_tokens: int, fraction: float
) -> None:
    documents = ["x" * length for length in lengths]
    source = write_jsonl(tmp_path_factory.mktemp("data") / "d.jsonl", documents)
    total = sum(lengths) + len(lengths)
    if total < 2 * min_tokens:
        with pytest.raises(UsageError, match=f"{total} tokens.*{min_tokens} each"):
            build_corpus(source, Bytes(), validation_fraction=fraction, min_tokens=min_tokens)
        return
    corpus = build_corpus(source, Bytes(), validation_fraction=fraction, min_tokens=min_tokens)
    corpus.check(min_tokens - 1)
    assert len(corpus.train) + len(corpus.validation) == total


def test_a_held_out_source_leaves_all_of_the_other_to_training(tmp_path: Path) -> None:
    documents = [f"document {i}" for i in range(200)]
    source = write_jsonl(tmp_path / "d.jsonl", documents)
    other = write_jsonl(tmp_path / "other.jsonl", ["mine", "and mine"])
    corpus = build_corpus(source, Bytes(), held_out=other)
    assert sorted(documents_of(corpus.train)) == sorted(documents)
    assert sorted(documents_of(corpus.validation)) == ["and mine", "mine"]
    corpus.check(13)
    with pytest.raises(UsageError, match=r"validation split has 14 tokens.*needs 15"):
        corpus.check(14)


def test_check_names_the_split_without_an_answer() -> None:
    """The last tokens, which fill no sequence, do not count; nor does a split nobody looks at."""
    asked, answered = ~np.ones(10, np.int32), np.ones(10, np.int32)
    answer_at_the_end = np.append(asked[:9], answered[:1])
    for held_out in (asked, answer_at_the_end):
        corpus = Corpus(answered, held_out)
        corpus.check(4, judged=False)
        with pytest.raises(UsageError, match="validation split, no sequence of 4 tokens has an an"):
            corpus.check(4)
    Corpus(answered, answer_at_the_end).check(9)
    with pytest.raises(UsageError, match="training split, no sequence of 9 tokens has an answer"):
        Corpus(asked, answered).check(9, judged=False)
    first = Corpus(answered, np.where(np.arange(10) % 2, asked, answered | START))
    first.check(4)
    with pytest.raises(UsageError, match="validation split"):
        first.check(4, separate=True)  # where no document's first token is learned


def test_reading_stops_at_the_bound_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(*_: object, **__: object) -> Iterator[dict[str, str]]:
        while True:
            yield {"text": "word " * 100_000}

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=endless))
    told: list[str] = []
    corpus = build_corpus("endless", Bytes(), max_tokens=1_000_000, progress=told.append)
    assert 1_000_000 <= len(corpus.train) + len(corpus.validation) < 10_000_000
    assert any("Stopped reading" in line for line in told)


@pytest.mark.slow
@pytest.mark.parametrize("begin", [(), (1,)])
def test_the_default_source_is_encoded_once_per_tokenizer(
    tmp_path: Path, begin: tuple[int, ...]
) -> None:
    tokenizer = Bytes(begin=begin)
    first = build_corpus(None, tokenizer, cache_dir=tmp_path)
    encoded = tokenizer.encoded
    again = build_corpus(None, tokenizer, cache_dir=tmp_path)
    assert tokenizer.encoded == encoded
    assert np.array_equal(again.train, first.train)
    assert np.array_equal(again.validation, first.validation)

    for path in tmp_path.iterdir():  # damage of two kinds is repaired
        path.write_bytes(path.read_bytes()[:-10] if "train" in path.name else b"")
    again = build_corpus(None, tokenizer, cache_dir=tmp_path)
    assert tokenizer.encoded == 2 * encoded
    assert np.array_equal(again.train, first.train)

    build_corpus(None, Bytes("another"), cache_dir=tmp_path)
    assert len(list(tmp_path.iterdir())) == 4


def test_a_cache_that_cannot_be_written_does_not_stop_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    told: list[str] = []
    corpus = build_corpus(None, Bytes(), cache_dir=tmp_path / "file", progress=told.append)
    corpus.check(1024)
    assert any("is not writable" in line for line in told)


# --- batches ---

LOADERS = st.fixed_dictionaries(
    {"batch": st.integers(1, 7), "seq": st.integers(1, 9), "seed": st.integers(0, 2**40)}
)


def tokens_of(sequences: int, seq: int, extra: int = 0) -> Tokens:
    """Tokens 0, 1, 2, ...: sequence i starts with i * seq. `extra` < seq of them are left over."""
    return np.arange(sequences * seq + 1 + extra, dtype=np.int32)


@settings(deadline=None)
@given(arguments=LOADERS, sequences=st.integers(1, 30), data=st.data())
def test_every_sequence_comes_once_per_epoch(
    arguments: dict[str, Any], sequences: int, data: st.DataObject
) -> None:
    seq, batch = arguments["seq"], arguments["batch"]
    extra = data.draw(st.integers(0, seq - 1))
    loader = BatchLoader(tokens_of(sequences, seq, extra), **arguments)
    assert len(loader) == sequences
    starts: list[int] = []
    while len(starts) < 3 * sequences:
        ids, labels, _ = loader.next_batch()
        assert ids.shape == labels.shape == (batch, seq)
        assert ids.dtype == labels.dtype == torch.int64
        assert ids.is_contiguous()
        assert labels.is_contiguous()
        assert torch.equal(labels, ids + 1)
        assert torch.equal(ids, ids[:, :1] + torch.arange(seq))
        starts += (ids[:, 0] // seq).tolist()
    for epoch in range(3):
        seen = starts[epoch * sequences : (epoch + 1) * sequences]
        assert sorted(seen) == list(range(sequences))


@settings(deadline=None)
@given(arguments=LOADERS, sequences=st.integers(1, 30), before=st.integers(0, 25))
def test_a_restored_loader_goes_on_with_the_same_batches(
    arguments: dict[str, Any], sequences: int, before: int
) -> None:
    tokens = tokens_of(sequences, arguments["seq"])
    loader = BatchLoader(tokens, **arguments)
    for _ in range(before):
        loader.next_batch()
    state = loader.state()
    restored = BatchLoader(tokens, **arguments)
    restored.restore(state)
    assert restored.state() == state
    for _ in range(5):
        ours, theirs = restored.next_batch(), loader.next_batch()
        assert torch.equal(ours.ids, theirs.ids)
        assert torch.equal(ours.labels, theirs.labels)
    assert restored.state() == loader.state()


def test_epochs_and_seeds_differ_in_their_order() -> None:
    def order(loader: BatchLoader) -> list[int]:
        ids: list[int] = loader.next_batch()[0][:, 0].tolist()
        return ids

    tokens = tokens_of(100, 4)
    loader = BatchLoader(tokens, batch=100, seq=4, seed=1)
    orders = [order(loader), order(loader), order(BatchLoader(tokens, batch=100, seq=4, seed=2))]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert orders[0] != sorted(orders[0])


def test_bad_loader_arguments_are_one_sentence() -> None:
    for batch, seq, seed, message in (
        (0, 4, 0, "batch size .* not 0 and 4"),
        (1, 0, 0, "sequence length .* not 1 and 0"),
        (1, 4, -1, "seed must be 0 or more, not -1"),
        (1, 40, 0, "37 tokens contain no sequence of 40"),
    ):
        with pytest.raises(UsageError, match=message):
            BatchLoader(tokens_of(9, 4), batch=batch, seq=seq, seed=seed)
    loader = BatchLoader(tokens_of(9, 4), batch=2, seq=4, seed=0)
    for state in (LoaderState(0, 9), LoaderState(-1, 0), LoaderState(0, -1)):
        with pytest.raises(UsageError, match="with 9 sequences"):
            loader.restore(state)


@settings(deadline=None)
@given(
    batch=st.integers(1, 8),
    seq=st.integers(1, 5),
    sequences=st.integers(1, 40),
    limit=st.none() | st.integers(0, 10),
)
def test_validation_batches_are_full_distinct_and_always_the_same(
    batch: int, seq: int, sequences: int, limit: int | None
) -> None:
    tokens = tokens_of(sequences, seq)
    batches = list(validation_batches(tokens, batch, seq, limit))
    size = min(batch, sequences)
    expected = sequences // size if limit is None else min(limit, sequences // size)
    assert [each.ids.shape for each in batches] == [(size, seq)] * expected
    starts = [start for each in batches for start in each.ids[:, 0].tolist()]
    assert len(set(starts)) == len(starts)
    assert starts == sorted(starts)
    for each, again in zip(batches, validation_batches(tokens, batch, seq, limit), strict=True):
        assert torch.equal(each.labels, each.ids + 1)
        assert torch.equal(each.ids, again.ids)
