"""Conversations and completions: only answers are learned, and as plain PyTorch learns them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import cleave
from cleave.errors import UsageError
from cleave.training.conversations import (
    Completion,
    Conversation,
    Message,
    document_of,
    rendered,
)
from cleave.training.data import (
    IGNORED,
    BatchLoader,
    Tokens,
    build_corpus,
    validation_batches,
)
from cleave.training.documents import read_documents
from cleave.training.evaluation import perplexity
from cleave.training.job import JobSpec
from cleave.training.records import Record, StepRecord
from cleave.training.run_folder import RunFolder
from cleave.training.tokenizer import TextTokenizer, default_tokenizer, folder_tokenizer
from cleave.training.trained import TrainedModel
from cleave.training.trainer import TrainContext, prepare, train
from cleave.workload.models.build import load_folder
from tests.graphs.models import small_model

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def chatml(messages: Sequence[Message], tools: Any, prompt: bool) -> str:
    text = "".join(f"<|{m['role']}|>{m['content']}<|endoftext|>\n" for m in messages)
    return text + ("<|assistant|>" if prompt else "")


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


TURNS = [
    said("system", "Be short."),
    said("user", "What is 2 + 2?"),
    said("assistant", "It is 4."),
    said("user", "And 3 + 3?"),
    said("assistant", "6, of course."),
]


TOOL = {"name": "add"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"name": "add", "arguments": "2 2"}]}


# --- what a record holds ---


@pytest.mark.parametrize(
    ("record", "document"),
    [
        ({"text": "a", "content": "b"}, "a"),
        ({"content": "b", "text": None}, "b"),
        ({"messages": TURNS}, Conversation(tuple(TURNS))),
        ({"messages": TURNS, "text": "rendered"}, Conversation(tuple(TURNS))),
        ({"prompt": "a", "completion": "b", "id": 7}, Completion("a", "b")),
        ({"prompt": TURNS[:2], "completion": TURNS[2:3]}, Conversation(tuple(TURNS[:3]))),
        (
            {"messages": TURNS, "tools": [{"name": "f"}]},
            Conversation(tuple(TURNS), ({"name": "f"},)),
        ),
    ],
)
def test_what_a_record_holds(record: dict[str, Any], document: Any) -> None:
    assert document_of(record) == document


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"body": "a"}, "has no .* but 'body': rename"),
        ({}, "no fields at all"),
        ({"text": 1}, 'has int as "text", not a string'),
        ({"prompt": "a", "completion": TURNS}, "not both strings, or both lists"),
        ({"messages": "hello"}, 'not a list of objects with a "role"'),
        ({"messages": [{"role": "user"}]}, 'not a list of objects with a "role"'),
        ({"messages": TURNS[:2]}, "nothing is to be learned"),
    ],
)
def test_records_that_are_refused_say_where(
    tmp_path: Path, record: dict[str, Any], says: str
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"text": "fine"}) + "\n" + json.dumps(record) + "\n")
    with pytest.raises(UsageError, match=f"Line 2 of .*{says}"):
        list(read_documents(str(path)))


def test_parquet_and_jsonl_hold_the_same(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    for name, records in (
        ("chat", [{"messages": TURNS}, {"messages": TURNS[1:3]}]),
        ("completion", [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d"}]),
    ):
        lines, table = tmp_path / f"{name}.jsonl", tmp_path / f"{name}.parquet"
        lines.write_text("".join(json.dumps(record) + "\n" for record in records))
        pq.write_table(pa.Table.from_pylist(records), table)
        assert list(read_documents(str(table))) == list(read_documents(str(lines)))


# --- where answers are ---


@given(st.lists(st.tuples(st.sampled_from(["user", "assistant"]), st.text(max_size=8)), max_size=6))
def test_answers_are_what_the_assistant_said_with_the_end_of_its_turns(
    turns: list[tuple[str, str]],
) -> None:
    messages = tuple(said(*turn) for turn in turns)
    text, answers = rendered(Conversation(messages), chatml)
    assert [text[first:stop] for first, stop in answers] == [
        f"{content}<|endoftext|>\n" for role, content in turns if role == "assistant"
    ]


def test_a_template_that_changes_earlier_turns_is_refused() -> None:
    def forgetful(messages: Sequence[Message], tools: Any, prompt: bool) -> str:
        return chatml(messages[-1:], tools, prompt)

    with pytest.raises(UsageError, match="renders message 3 of a conversation in another way"):
        rendered(Conversation(tuple(TURNS)), forgetful)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a small Llama, its tokenizer and a chat template."""
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("chat") / "small"
    tokenizer = default_tokenizer(vocab_size=300, progress=lambda text: None)
    model: Any = small_model("llama", vocab_size=tokenizer.vocab_size)
    model.save_pretrained(folder)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.library_tokenizer, eos_token="<|endoftext|>"
    )
    wrapped.chat_template = CHATML
    wrapped.save_pretrained(folder)
    return folder


def learned(tokenizer: TextTokenizer, tokens: Tokens) -> str:
    return tokenizer.decode(tokens[tokens >= 0])


def whole(tokenizer: TextTokenizer, tokens: Tokens) -> str:
    return tokenizer.decode(np.where(tokens < 0, ~tokens, tokens))


def test_tokens_of_answers_are_learned_and_no_others(base: Path) -> None:
    tokenizer = folder_tokenizer(base)
    tokens = tokenizer.encode_answers(Conversation(tuple(TURNS)))
    assert whole(tokenizer, tokens) == chatml(TURNS, None, False)
    assert learned(tokenizer, tokens) == "It is 4.<|endoftext|>\n6, of course.<|endoftext|>\n"
    tokens = tokenizer.encode_answers(Completion("What is 2 + 2? ", "It is 4."))
    assert learned(tokenizer, tokens) == "It is 4."


def test_a_question_ends_where_the_answer_begins(base: Path) -> None:
    assert folder_tokenizer(base).question("Why?") == "<|user|>Why?<|endoftext|>\n<|assistant|>"


def test_a_model_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    tokenizer = default_tokenizer(vocab_size=300, progress=lambda text: None)
    with pytest.raises(UsageError, match="has no chat template"):
        tokenizer.encode_answers(Conversation(tuple(TURNS)))


def test_a_template_that_raises_says_why(base: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = tmp_path / "other"
    wrapped = AutoTokenizer.from_pretrained(base)
    wrapped.chat_template = "{{ raise_exception('no system prompts here') }}"
    wrapped.save_pretrained(folder)
    with pytest.raises(UsageError, match="no system prompts here"):
        folder_tokenizer(folder).encode_answers(Conversation(tuple(TURNS)))


# --- batches ---


@given(
    st.lists(st.booleans(), min_size=12, max_size=60),
    st.integers(1, 5),
    st.integers(1, 3),
)
def test_batches_have_every_answer_once_and_nothing_else(
    answers: list[bool], seq: int, batch: int
) -> None:
    ids = np.arange(1, len(answers) + 1, dtype=np.int32)
    tokens = np.where(answers, ids, ~ids)
    rows = (len(ids) - 1) // seq
    expected = sorted(int(i) for i in tokens[1 : rows * seq + 1] if i >= 0)
    if not expected:
        with pytest.raises(UsageError, match="has an answer to learn"):
            BatchLoader(tokens, batch=batch, seq=seq, seed=0)
        return
    loader = BatchLoader(tokens, batch=1, seq=seq, seed=0)
    found = [loader.next_batch() for _ in range(len(loader))]
    assert sorted(int(i) for each in found for i in each.labels.flatten() if i >= 0) == expected
    for got, labels, _ in (*found, *validation_batches(tokens, batch, seq)):
        assert (got > 0).all()
        assert ((labels == IGNORED) | (labels == got + 1)).all()
        assert (labels != IGNORED).any()


def sum_of(number: int) -> list[dict[str, str]]:
    return [
        said("user", f"What is {number} + {number}?"),
        said("assistant", f"It is {2 * number}."),
    ]


def chats(path: Path, count: int = 40) -> Path:
    lines = [json.dumps({"messages": sum_of(number)}) + "\n" for number in range(count)]
    path.write_text("".join(lines))
    return path


def test_ends_of_completions_are_learned_and_those_of_conversations_are_in_them(
    base: Path, tmp_path: Path
) -> None:
    tokenizer = folder_tokenizer(base)
    path = tmp_path / "completions.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": "1 + ", "completion": "2"}) + "\n" for _ in "abc")
    )
    corpus = build_corpus(str(path), tokenizer, held_out=str(path))
    assert learned(tokenizer, corpus.train) == "2<|endoftext|>" * 3
    corpus = build_corpus(
        str(chats(tmp_path / "c.jsonl", 2)), tokenizer, held_out=str(path), min_tokens=2
    )
    assert learned(tokenizer, corpus.train) == "It is 0.<|endoftext|>\nIt is 2.<|endoftext|>\n"


# --- training ---


def plain_losses(job: JobSpec) -> list[float]:
    """Train on the same batches with PyTorch alone, as transformers means a loss with labels."""
    data = prepare(job, TrainContext(None, lambda record: None))
    model, _ = load_folder(job.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=job.learning_rate)
    loader = BatchLoader(data.corpus.train, batch=job.batch, seq=job.seq, seed=job.seed)
    found = []
    for _ in range(job.steps):
        batches = [loader.next_batch() for _ in range(job.accumulate)]
        count = sum(int((labels >= 0).sum()) for _, labels, _ in batches)
        total = 0.0
        optimizer.zero_grad()
        for ids, labels, _ in batches:
            logits = model(input_ids=ids, use_cache=False).logits
            loss = nn.functional.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
            )
            torch.autograd.backward(loss / count)
            total += loss.item() / count
        optimizer.step()
        found.append(total)
    return found


@pytest.mark.parametrize(
    "method", ["local", "tiles", pytest.param("stages", marks=pytest.mark.slow)]
)
def test_losses_are_those_of_plain_pytorch(tmp_path: Path, base: Path, method: str) -> None:
    """Micro-batches with different numbers of answers count by these."""
    job = JobSpec(
        str(base), str(chats(tmp_path / "chats.jsonl")), 3, batch=2, seq=24, accumulate=2,
        method=method, optimizer="sgd", momentum=0.0, weight_decay=0.0, clip=0.0,
        learning_rate=0.1, warmup_steps=0, schedule="constant",
    )  # fmt: skip
    found: list[float] = []

    def report(record: Record) -> None:
        if isinstance(record, StepRecord):
            found.append(record.loss)

    run = RunFolder.create(tmp_path / "runs", "mine")
    with cleave.emulated(3) as fleet:
        train(job, run, TrainContext(None if method == "local" else fleet, report))
    assert found == pytest.approx(plain_losses(job), rel=1e-5)


def test_perplexity_is_that_of_answers(tmp_path: Path, base: Path) -> None:
    model, _ = load_folder(base)
    tokenizer = folder_tokenizer(base)
    told = perplexity(
        TrainedModel(model.eval(), tokenizer, "small"),
        str(chats(tmp_path / "chats.jsonl", 3)),
        seq=500,
        batch=1,
    )
    parts = [chatml(sum_of(n), None, False) for n in range(3)]
    ids = [i for part in parts for i in (*tokenizer.encode_batch([part])[0].tolist(), 0)]
    assert told.tokens == sum(
        len(tokenizer.encode_batch([f"It is {2 * n}.<|endoftext|>\n"])[0]) for n in range(3)
    )
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids[:-1]])).logits[0]
    each = nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
    marks = []
    for n, part in enumerate(parts):
        answer = len(tokenizer.encode_batch([f"It is {2 * n}.<|endoftext|>\n"])[0])
        size = len(tokenizer.encode_batch([part])[0])
        marks += [False] * (size - answer) + [True] * answer + [False]
    assert told.loss == pytest.approx(float(each[torch.tensor(marks[1:])].mean()), rel=1e-5)
