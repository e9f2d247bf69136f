"""Conversations and completions: only answers are learned, and as plain PyTorch learns them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import cleave
from cleave.errors import CleaveError, UsageError
from cleave.training.data.batches import (
    IGNORED,
    Batch,
    BatchLoader,
    Tokens,
    build_corpus,
    ids_of,
    validation_batches,
)
from cleave.training.data.conversations import (
    Completion,
    Conversation,
    Message,
    document_of,
    rendered,
)
from cleave.training.data.documents import read_documents
from cleave.training.data.tokenizer import TextTokenizer, default_tokenizer, folder_tokenizer
from cleave.training.loop.context import TrainContext
from cleave.training.loop.inputs import prepare
from cleave.training.loop.job import JobSpec
from cleave.training.loop.run_folder import RunFolder
from cleave.training.results.trained import TrainedModel
from cleave.training.results.uses import perplexity
from cleave.workload.build import load_folder
from tests.training.runs import losses, losses_by_pytorch, nightly, save_model

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


def jsonl(path: Path, *records: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


# --- what a record holds ---


CHAT = Conversation(tuple(TURNS))
WITH_TOOL = Conversation(tuple(TURNS), ({"name": "f"},))
PARTS = [{"type": "text", "text": "What "}, {"type": "text", "text": "now?"}]


@pytest.mark.parametrize(
    ("record", "document"),
    [
        ({"text": "a", "content": "b"}, "a"),
        ({"content": "b", "text": None}, "b"),
        ({"messages": TURNS, "text": "rendered", "tools": []}, CHAT),
        ({"prompt": "a", "completion": "b", "id": 7}, Completion("a", "b")),
        ({"prompt": TURNS[:2], "completion": TURNS[2:]}, CHAT),
        ({"messages": TURNS, "tools": [{"name": "f"}]}, WITH_TOOL),
        ({"messages": TURNS, "tools": '[{"name": "f"}]'}, WITH_TOOL),
        (
            {"messages": [{"role": "user", "content": PARTS}, TURNS[2]]},
            Conversation((said("user", "What now?"), TURNS[2])),
        ),
    ],
)
def test_what_a_record_holds(record: dict[str, Any], document: Any) -> None:
    assert document_of(record) == document


def user(*content: Any) -> dict[str, Any]:
    return {"messages": [*TURNS, {"role": "user", "content": list(content)}]}


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"body": "a"}, "has none of the fields .*; it has 'body'; rename"),
        ({"text": 1}, 'has a "text" of type int, not a string'),
        ({"prompt": "a", "completion": TURNS}, "of different or unsupported types"),
        ({"messages": [{"content": "a"}]}, 'a list of objects, each with a string "role"'),
        ({"messages": [{"role": "assistant"}]}, 'has no "content" in message 1'),
        (
            {"messages": [*TURNS, {"role": "user", "content": 7}]},
            '"content" of type int in message 6',
        ),
        ({"prompt": None, "completion": "a"}, 'has a "prompt" that is null; set its value'),
        ({"messages": TURNS, "tools": {"name": "f"}}, '"tools" that are not a list of objects'),
        ({"messages": TURNS, "tools": "f("}, '"tools" that are not valid JSON'),
        (user({"type": "image"}), "of type 'image' in message 6"),
        (user("b"), "has str in message 6, but only parts"),
        (user({"type": "text"}), '"text" is of type null'),
        ({"messages": TURNS[:2]}, "would learn nothing"),
    ],
)
def test_records_that_are_refused_say_where(
    tmp_path: Path, record: dict[str, Any], says: str
) -> None:
    path = jsonl(tmp_path / "data.jsonl", {"text": "fine"}, record)
    with pytest.raises(UsageError, match=f"line 2 of .*{says}"):
        list(read_documents(path))


def test_halves_of_surrogate_pairs_are_nowhere_in_a_conversation(tmp_path: Path) -> None:
    half = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"arguments": {"a\ud83d": "\ude00"}}],
    }
    path = jsonl(
        tmp_path / "halves.jsonl",
        {"messages": [said("user", "hi \ud83d"), half], "tools": [{"name": "\ud83d"}]},
        {"prompt": "hi \ud83d", "completion": "\ude00 half"},
        {"text": "a\ud800b"},
    )
    first, second, third = read_documents(path)
    call = {"role": "assistant", "content": None, "tool_calls": [{"arguments": {"a?": "?"}}]}
    assert first == Conversation((said("user", "hi ?"), call), ({"name": "?"},))
    assert second == Completion("hi ?", "? half")
    assert third == "a?b"


def test_what_a_table_fills_with_null_is_not_there(tmp_path: Path) -> None:
    """A null content stays where a message calls tools; a column may hold null in some rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def calls(**arguments: Any) -> dict[str, Any]:
        function = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        return {"role": "assistant", "content": None, "tool_calls": [function]}

    records: list[dict[str, Any]] = [
        {"messages": TURNS},
        {"messages": [{**said("user", "a"), "name": "ann"}, calls(x=1), said("tool", "2")]},
        {"messages": [said("user", "b"), calls(y={"z": ["s"]})], "tools": [{"p": {"x": "int"}}]},
        {"messages": [said("user", "b"), calls()], "tools": [{"p": {"y": "str"}}, {"q": 1}]},
        {"text": "plain"},
        {"prompt": "a", "completion": "b"},
    ]
    lines, table = jsonl(tmp_path / "some.jsonl", *records), tmp_path / "some.parquet"
    names = {name: None for record in records for name in record}
    pq.write_table(pa.Table.from_pylist([{**names, **record} for record in [*records, {}]]), table)
    assert [repr(each) for each in read_documents(str(table))] == [
        repr(each).replace("line", "row").replace("jsonl", "parquet")
        for each in read_documents(lines)
    ]
    message = [("role", pa.string()), ("content", pa.string())]
    kind = pa.list_(pa.struct([*message, ("extra", pa.map_(pa.string(), pa.string()))]))
    told = [{**said("user", "a"), "extra": [("k", "v")]}, {**said("assistant", "b"), "extra": None}]
    pq.write_table(pa.table({"messages": pa.array([told], kind)}), table)
    (found,) = read_documents(str(table))  # maps are objects
    assert found == Conversation(
        ({**said("user", "a"), "extra": {"k": "v"}}, said("assistant", "b"))
    )


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

    with pytest.raises(UsageError, match="renders message 3 of a conversation differently"):
        rendered(Conversation(tuple(TURNS)), forgetful)


def thinking(messages: Sequence[Message], tools: Any, prompt: bool) -> str:
    """Render as Qwen 3 does: a place for thoughts in the last answer and in no other."""
    text = ""
    for number, m in enumerate(messages):
        last = m["role"] == "assistant" and number + 1 == len(messages)
        thoughts = "<think>\n\n</think>\n\n" if last else ""
        text += f"<|{m['role']}|>\n{thoughts}{m['content'].strip()}<|end|>\n"
    return text + ("<|assistant|>\n" if prompt else "")


def thoughtful(messages: Sequence[Message], tools: Any, prompt: bool) -> str:
    """Render as DeepSeek R1 does: a prompt ends where thoughts begin, an answer has none."""
    text = "".join(f"<|{m['role']}|>{m['content']}<|end|>" for m in messages)
    return text + ("<|assistant|><think>\n" if prompt else "")


def unopened(messages: Sequence[Message], tools: Any, prompt: bool) -> str:
    """Render as Mistral does: nothing opens an answer, and a user's message closes itself."""
    ends = {"user": ("[INST] ", " [/INST]"), "assistant": (" ", "</s>")}
    return "<s>" + "".join(m["content"].join(ends[m["role"]]) for m in messages)


@pytest.mark.parametrize(
    ("template", "answers"),
    [
        (thinking, ["first<|end|>\n", "<|end|>\n", "<think>\n\n</think>\n\nfirst<|end|>\n"]),
        (thoughtful, ["first<|end|>", "<|end|>", "first<|end|>"]),
        (unopened, [" first</s>", " </s>", " first</s>"]),
    ],
)
@pytest.mark.parametrize("begins", [False, True])
def test_answers_are_found_whatever_a_template_adds_to_them(
    template: Any, answers: list[str], begins: bool
) -> None:
    """Also where one begins the chat, or is empty, or says what another says."""
    texts = ("first", "first", "why", "", "more", "first")
    turns = [said(("user", "assistant")[n % 2], text) for n, text in enumerate(texts)]
    messages = tuple(turns[begins:])
    text, found = rendered(Conversation(messages), template)
    assert text == template(messages, None, False)
    if begins and template is unopened:  # its first space cannot be told from what opens a chat
        answers = ["first</s>", *answers[1:]]
    assert [text[first:stop] for first, stop in found] == answers


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a small Llama, its tokenizer and a chat template."""
    folder = save_model(tmp_path_factory.mktemp("chat") / "small")
    (folder / "chat_template.jinja").write_text(CHATML)
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
    assert tokenizer.question("Why?") == "<|user|>Why?<|endoftext|>\n<|assistant|>"


def test_a_model_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    tokenizer = default_tokenizer(vocab_size=300, progress=lambda text: None)
    with pytest.raises(UsageError, match="need a chat template"):
        tokenizer.encode_answers(Conversation(tuple(TURNS)))


def with_template(base: Path, folder: Path, template: str, text: str = "") -> TextTokenizer:
    """Return the tokenizer of a copy of a folder, with another template and first token."""
    from tokenizers import processors
    from transformers import AutoTokenizer

    wrapped = AutoTokenizer.from_pretrained(base)
    wrapped.chat_template = template
    if text:
        ids = [(text, wrapped.convert_tokens_to_ids(text))]
        wrapped.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{text} $A {text}", special_tokens=ids
        )
    wrapped.save_pretrained(folder)
    return folder_tokenizer(folder)


def test_templates_that_mark_answers_or_want_parts(base: Path, tmp_path: Path) -> None:
    """Templates of models that see images take lists of parts."""
    marking = CHATML.replace(
        "{{ m.content }}<|endoftext|>",
        "{% if m.role == 'assistant' %}{%- generation -%}{{ m.content }}!{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}<|endoftext|>",
    )
    tokenizer = with_template(base, tmp_path / "marking", marking)
    tokens = tokenizer.encode_answers(Conversation(tuple(TURNS)))
    assert learned(tokenizer, tokens) == "It is 4.!6, of course.!"
    listing = CHATML.replace(
        "{{ m.content }}", "{% for c in m.content if c.type == 'text' %}{{ c.text }}{% endfor %}"
    )
    tokenizer = with_template(base, tmp_path / "listing", listing)
    tokens = tokenizer.encode_answers(Conversation(tuple(TURNS)))
    assert whole(tokenizer, tokens) == chatml(TURNS, None, False)
    assert learned(tokenizer, tokens) == "It is 4.<|endoftext|>\n6, of course.<|endoftext|>\n"


def test_a_token_with_a_part_of_an_answer_is_learned(tmp_path: Path) -> None:
    """A prompt that ends in a space shares a token with the answer's first word."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {token: number for number, token in enumerate([*alphabet, "</s>", "\u0120y"])}
    made = Tokenizer(models.BPE(vocab=ids, merges=[("\u0120", "y")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer = TextTokenizer(made, ids["</s>"])
    for prompt, answer in (("q: ", "y"), ("q:", " y")):
        tokens = tokenizer.encode_answers(Completion(prompt, answer))
        assert tokens[tokens >= 0].tolist() == [ids["\u0120y"]]
    tokens = tokenizer.encode_answers(Completion("q:  ", "z"))
    assert tokens[tokens >= 0].tolist() == [ids["z"]]


def test_an_error_within_a_conversation_says_where_it_is(base: Path, tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text("\n" + json.dumps({"messages": TURNS}) + "\n")
    tokenizer = with_template(base, tmp_path / "none", "{{ raise_exception('no system') }}")
    with pytest.raises(UsageError, match=r"line 2 of '.*some\.jsonl': the chat .*no system"):
        build_corpus(str(path), tokenizer, held_out=str(path))


# --- batches ---


@given(st.lists(st.booleans(), min_size=12, max_size=60), st.integers(1, 5), st.integers(1, 3))
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
    return Path(jsonl(path, *({"messages": sum_of(number)} for number in range(count))))


def test_what_the_tokenizer_puts_before_a_text_is_there_and_not_learned(
    base: Path, tmp_path: Path
) -> None:
    """As with transformers, which puts it before texts and prompts, and not before a template."""
    tokenizer = with_template(base, tmp_path / "begins", CHATML, "<|endoftext|>")
    assert tokenizer.fingerprint != folder_tokenizer(base).fingerprint
    records: list[Any] = [{"text": "1 + 1"}, {"prompt": "2 + ", "completion": "2"}]
    path = jsonl(tmp_path / "some.jsonl", *records, {"messages": sum_of(3)})
    corpus = build_corpus(path, tokenizer, held_out=path)
    tokens = ids_of(torch.from_numpy(corpus.train.astype(np.int64))).numpy()
    assert tokenizer.decode(tokens) == (
        "<|endoftext|>1 + 1<|endoftext|><|endoftext|>2 + 2<|endoftext|>"
        + chatml(sum_of(3), None, False)
        + "<|endoftext|>"
    )
    answers = corpus.train[(corpus.train >= 0)]
    assert tokenizer.decode(answers) == ("1 + 1<|endoftext|>2<|endoftext|>It is 6.<|endoftext|>\n")


def test_held_out_text_without_a_whole_answer_is_refused_before_training(
    base: Path, tmp_path: Path
) -> None:
    """Only where held-out losses are asked for."""
    short = ({"prompt": f"{n} is ", "completion": "y"} for n in range(40))
    long = {"prompt": "word list one two three " * 30, "completion": " y"}
    path, other = jsonl(tmp_path / "some.jsonl", *short), jsonl(tmp_path / "other.jsonl", long)
    job = JobSpec(str(base), path, 8, batch=2, seq=48, eval_every=5, eval_data=other)
    context = TrainContext(None, lambda record: None)
    with pytest.raises(UsageError, match="validation split, no sequence of 48 tokens has an answ"):
        prepare(job, context)
    prepare(replace(job, eval_every=0, eval_data=""), context)


def test_a_token_that_the_model_lacks_is_refused_where_the_text_has_it(
    base: Path, tmp_path: Path
) -> None:
    """A tokenizer may have more, as one to which somebody added a token for padding."""
    from transformers import AutoTokenizer

    folder = shutil.copytree(base, tmp_path / "more")
    wrapped = AutoTokenizer.from_pretrained(folder)
    wrapped.add_special_tokens({"pad_token": "<pad>"})
    wrapped.save_pretrained(folder)
    job = JobSpec(str(folder), str(chats(tmp_path / "chats.jsonl")), 1, batch=1, seq=16)
    prepare(job, TrainContext(None, lambda record: None))
    path = tmp_path / "text.txt"
    path.write_text("some <pad> text " * 40)
    with pytest.raises(CleaveError, match=r"with token 300, .* has only 300"):
        prepare(replace(job, data=str(path)), TrainContext(None, lambda record: None))


# --- training ---


def mean_over_answers(model: nn.Module, batches: Sequence[Batch]) -> torch.Tensor:
    """Return the loss of a step as transformers means a loss with labels."""
    losses = [
        nn.functional.cross_entropy(
            model(input_ids=batch.ids, use_cache=False).logits.flatten(0, 1),
            batch.labels.flatten(),
            ignore_index=IGNORED,
            reduction="sum",
        )
        for batch in batches
    ]
    return torch.stack(losses).sum() / sum(int((batch.labels >= 0).sum()) for batch in batches)


@pytest.mark.slow
@pytest.mark.parametrize("method", [nightly("local"), "tiles", nightly("stages")])
def test_losses_are_those_of_plain_pytorch(tmp_path: Path, base: Path, method: str) -> None:
    """Micro-batches with different numbers of answers count by these."""
    job = JobSpec(
        str(base), str(chats(tmp_path / "chats.jsonl")), 3, batch=2, seq=24, accumulate=2,
        method=method, optimizer="sgd", momentum=0.0, weight_decay=0.0, clip=0.0,
        learning_rate=0.1, warmup_steps=0, schedule="constant",
    )  # fmt: skip
    run = RunFolder.create(tmp_path / "runs", "mine")
    with cleave.emulated(1) as fleet:
        found = losses(job, run, None if method == "local" else fleet)
    assert found == pytest.approx(losses_by_pytorch(job, mean_over_answers), rel=1e-5)


def test_perplexity_is_that_of_answers(tmp_path: Path, base: Path) -> None:
    model, _ = load_folder(base)
    tokenizer = folder_tokenizer(base)
    told = perplexity(
        TrainedModel(model.eval(), tokenizer, "small"),
        str(chats(tmp_path / "chats.jsonl", 3)),
        seq=500,
        batch=1,
    )
    parts = [[*tokenizer.encode_answers(Conversation(tuple(sum_of(n)))), ~0] for n in range(3)]
    tokens = torch.tensor(np.concatenate(parts), dtype=torch.int64)  # ~0 is the end of text
    ids, counted = torch.where(tokens < 0, ~tokens, tokens), tokens[1:] >= 0
    with torch.no_grad():
        logits = model(input_ids=ids[None, :-1]).logits[0]
    each = nn.functional.cross_entropy(logits, ids[1:], reduction="none")
    assert told.tokens == int(counted.sum())
    assert told.loss == pytest.approx(float(each[counted].mean()), rel=1e-5)
