"""Tokenizers: exact round trips, a cache that heals, and tokenizers of model folders."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from cleave.errors import UsageError
from cleave.training.data.tokenizer import TextTokenizer, default_tokenizer, folder_tokenizer

pytestmark = pytest.mark.slow

SMALL = 300


@pytest.fixture(scope="session")
def tokenizer() -> TextTokenizer:
    return default_tokenizer()


@pytest.fixture
def little_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train tokenizers on less text, which takes less time."""
    monkeypatch.setattr("cleave.training.data.tokenizer._TRAINING_CHARS", 100_000)


def word_level(words: list[str]) -> Tokenizer:
    vocabulary = {word: index for index, word in enumerate(words)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token=words[0]))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


@pytest.mark.nightly
def test_the_default_tokenizer_compresses_source_code(tokenizer: TextTokenizer) -> None:
    text = "def main(self):\n    return self.value\n" * 10
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.vocab_size == 4096
    assert ids.dtype == np.int32
    assert len(ids) < len(text) / 3
    assert tokenizer.decode([tokenizer.eos_id]) == "<|endoftext|>"


@settings(deadline=None)
@given(texts=st.lists(st.text(st.characters(codec="utf-8")), max_size=4))
def test_any_text_comes_back_as_it_was(tokenizer: TextTokenizer, texts: list[str]) -> None:
    encoded = tokenizer.encode_batch(texts)
    assert [tokenizer.decode(ids) for ids in encoded] == texts
    for ids in encoded:
        assert ids.size == 0 or 0 <= ids.min() <= ids.max() < tokenizer.vocab_size
        assert tokenizer.decode(torch.from_numpy(ids)) == tokenizer.decode(ids.tolist())


def test_it_is_trained_once_and_kept_where_the_environment_says(
    tokenizer: TextTokenizer,
) -> None:
    told: list[str] = []
    cache = Path(os.environ["CLEAVE_CACHE"])
    assert default_tokenizer(cache, progress=told.append).fingerprint == tokenizer.fingerprint
    assert default_tokenizer(progress=told.append).fingerprint == tokenizer.fingerprint
    assert told == []


@pytest.mark.usefixtures("little_text")
def test_training_again_gives_the_same_and_damage_is_repaired(tmp_path: Path) -> None:
    told: list[str] = []
    first = default_tokenizer(tmp_path, SMALL, told.append).fingerprint
    (path,) = tmp_path.iterdir()
    good = path.read_bytes()
    for damaged in (good[:1000], word_level(["a", "b"]).to_str().encode()):
        path.write_bytes(damaged)
        assert default_tokenizer(tmp_path, SMALL, told.append).fingerprint == first
        assert path.read_bytes() == good
    assert len(told) == 3
    assert str(SMALL) in path.name


@pytest.mark.usefixtures("little_text")
def test_a_cache_that_cannot_be_written_is_only_a_remark(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    told: list[str] = []
    assert default_tokenizer(tmp_path / "file", SMALL, told.append).vocab_size == SMALL
    assert "is not writable" in told[-1]


@pytest.mark.parametrize("size", [0, 256])
def test_a_vocabulary_too_small_for_bytes_is_refused(tmp_path: Path, size: int) -> None:
    with pytest.raises(UsageError, match=f"a vocabulary of {size} is too small"):
        default_tokenizer(tmp_path, size)


def test_what_decides_the_ids_decides_the_fingerprint() -> None:
    words = ["<unk>", "</s>", "a", "b"]
    base = TextTokenizer(word_level(words), 1)
    assert base.fingerprint == TextTokenizer(word_level(words), 1).fingerprint
    assert base.fingerprint != TextTokenizer(word_level(words), 2).fingerprint
    assert base.fingerprint != TextTokenizer(word_level([*words, "c"]), 1).fingerprint
    assert len(base.fingerprint) == 64


@pytest.mark.parametrize(
    ("files", "eos_id"),
    [
        ({}, 1),
        ({"tokenizer_config.json": {"eos_token": "b"}}, 3),
        ({"tokenizer_config.json": {"eos_token": {"content": "a"}}}, 2),
        ({"special_tokens_map.json": {"eos_token": "b"}}, 3),
        ({"config.json": {"eos_token_id": 2}}, 2),
        ({"generation_config.json": {"eos_token_id": [3, 2]}}, 3),
        ({"tokenizer_config.json": {"eos_token": "not there"}, "config.json": []}, 1),
    ],
)
def test_a_model_folder_gives_its_tokenizer_and_its_end_of_text(
    tmp_path: Path, files: dict[str, object], eos_id: int
) -> None:
    made = word_level(["<unk>", "</s>", "a", "b"])
    made.enable_truncation(2)
    made.enable_padding(length=9)
    made.save(str(tmp_path / "tokenizer.json"))
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    tokenizer = folder_tokenizer(tmp_path)
    assert tokenizer.eos_id == eos_id
    assert tokenizer.vocab_size == 4
    assert [ids.tolist() for ids in tokenizer.encode_batch(["a b a b x", ""])] == [
        [2, 3, 2, 3, 0],
        [],
    ]


def test_a_model_folder_without_tokenizer_json_goes_through_transformers(tmp_path: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, "ab", "<|endoftext|>"]
    (tmp_path / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    tokenizer = folder_tokenizer(tmp_path)
    assert tokenizer.eos_id == words.index("<|endoftext|>")
    (ids,) = tokenizer.encode_batch(["abab c"])
    assert ids[:2].tolist() == [words.index("ab")] * 2
    assert tokenizer.decode(ids) == "abab c"


def test_folders_without_a_tokenizer_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no model folder .*missing"):
        folder_tokenizer(tmp_path / "missing")
    with pytest.raises(UsageError, match=r"has no tokenizer.json"):
        folder_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(UsageError, match=r"has no tokenizer.json.*vocab.json and merges.txt; copy"):
        folder_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UsageError, match=r"tokenizer.json' cannot be read as a tokenizer"):
        folder_tokenizer(tmp_path)
    word_level(["<unk>", "a"]).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UsageError, match='does not name an end-of-text token; add "eos_token"'):
        folder_tokenizer(tmp_path)
