"""`cleave chat`: answers see the whole conversation, and what goes wrong ends only one answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cleave.errors import UsageError
from cleave.training.loop.records import Record, TextRecord
from cleave.training.results.trained import open_trained
from cleave.training.results.uses import Generation
from cleave_cli.main import app
from tests.training.runs import save_model

pytestmark = pytest.mark.slow

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SIZES: dict[str, Any] = {"initializer_range": 0.4, "max_position_embeddings": 256}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model of large random weights that has no chat template."""
    return save_model(tmp_path_factory.mktemp("plain"), **SIZES)


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the same model with a chat template."""
    folder = save_model(tmp_path_factory.mktemp("talks"), **SIZES)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def chat(folder: Path, *lines: str, options: tuple[str, ...] = ("--tokens", "5")) -> Any:
    text = "".join(f"{line}\n" for line in lines)
    return CliRunner().invoke(app, ["chat", str(folder), *options], input=text)


def said(folder: Path, request: Generation) -> str:
    """Return what a model answers or adds, as the command prints it."""
    parts: list[str] = []

    def report(record: Record) -> None:
        assert isinstance(record, TextRecord)
        parts.append(record.text)

    request.run(open_trained(folder), report, lambda: False)
    return "".join(parts if request.chat else parts[1:])


def shown(text: str) -> str:
    return "\n".join("".join(c for c in line if c.isprintable()) for line in text.split("\n"))


def test_an_answer_sees_the_whole_conversation(talks: Path) -> None:
    done = chat(talks, "Why?", "How?", "/new", "", "Why?", options=("--tokens", "5"))
    assert done.exit_code == 0, done.output
    first = said(talks, Generation("Why?", chat=True, tokens=5))
    messages = ({"role": "user", "content": "Why?"}, {"role": "assistant", "content": first})
    second = said(talks, Generation("How?", chat=True, earlier=messages, tokens=5))
    assert second != said(talks, Generation("How?", chat=True, tokens=5))
    assert done.stdout == "".join(f"{shown(text)}\n" for text in (first, second, first))


def test_instructions_come_first(talks: Path) -> None:
    system = ({"role": "system", "content": "Be brief."},)
    done = chat(talks, "Why?", options=("--tokens", "5", "--system", "Be brief."))
    expected = said(talks, Generation("Why?", chat=True, earlier=system, tokens=5))
    assert done.stdout == f"{shown(expected)}\n"


def test_a_model_without_a_template_continues_the_text(plain: Path) -> None:
    done = chat(plain, "def a", "def b")
    first = said(plain, Generation("def a", tokens=5))
    second = said(plain, Generation(f"def a{first}\ndef b", tokens=5))
    assert done.stdout == f"{shown(first)}\n{shown(second)}\n"


def test_a_text_that_is_too_long_ends_only_its_answer(talks: Path) -> None:
    most = open_trained(talks).most_tokens
    done = chat(talks, "x y " * most, "Why?")
    assert done.exit_code == 1  # of a script; a person has read the message
    assert f"but the context is {most} tokens" in done.stderr
    assert "/new starts over" in done.stderr
    answer = said(talks, Generation("Why?", chat=True, tokens=5))
    assert done.stdout.endswith(f"{shown(answer)}\n")


def test_an_answer_ends_at_the_context_length(talks: Path) -> None:
    """`--tokens` is at most: a conversation may fill the model's context."""
    opened = open_trained(talks)
    question = "x " * (opened.most_tokens // 4)
    (ids,) = opened.tokenizer.encode_batch([opened.tokenizer.question(question)])
    room = opened.most_tokens - len(ids)
    assert room > 0
    all_that_fits = said(talks, Generation(question, chat=True, tokens=room))
    assert said(talks, Generation(question, chat=True, tokens=room + 99)) == all_that_fits


def test_the_default_number_of_tokens_fits_the_context(plain: Path, talks: Path) -> None:
    """A context shorter than the default is no error, unless `--tokens` asks for more."""
    most = open_trained(plain).most_tokens
    text = "x " * (most // 2 - 40)  # two tokens each
    for folder in (plain, talks):
        done = chat(folder, text, options=())
        assert done.exit_code == 0, done.output
        assert done.stdout.strip()
    done = chat(plain, "Why?", options=("--tokens", str(most)))
    assert isinstance(done.exception, UsageError)
    assert f"--tokens is {most}, but the model's context is" in str(done.exception)


def test_ctrl_c_ends_an_answer_and_keeps_its_first_part(
    talks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def run(self: Generation, trained: Any, report: Any, stop: Any) -> None:
        asked.append(self)
        report(TextRecord("half an"))
        raise KeyboardInterrupt

    monkeypatch.setattr(Generation, "run", run)
    done = chat(talks, "Why?", "How?")
    assert done.stdout == "half an\nhalf an\n"
    assert asked[1].earlier[1] == {"role": "assistant", "content": "half an"}


def test_what_is_wrong_is_said_before_anything_is_asked(talks: Path, tmp_path: Path) -> None:
    for folder, options, text in (
        (tmp_path / "none", (), "there is no folder of a run or model"),
        (talks, ("--top-p", "0"), "--top-p must be more than 0 and at most 1, not 0"),
        (talks, ("--tokens", "99999"), "use fewer"),
        (talks, ("--step", "3"), "--step needs a run folder"),
    ):
        done = chat(folder, "Why?", options=options)
        assert isinstance(done.exception, UsageError)
        assert text in str(done.exception)


def test_a_request_to_a_server_may_carry_a_conversation() -> None:
    from cleave.training.results.uses import UseRequest

    earlier = ({"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."})
    alone = UseRequest("model", generate=Generation("How?", chat=True))
    assert "earlier" not in alone.to_dict()["generate"]  # which older servers refuse
    request = UseRequest("model", generate=Generation("How?", chat=True, earlier=earlier))
    assert UseRequest.from_dict(json.loads(json.dumps(request.to_dict()))) == request
