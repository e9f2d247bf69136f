"""`cleave chat`: hold a conversation with a model."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Final

import typer
from typer import Option

from cleave.errors import UsageError
from cleave_cli.options import need_train_extra
from cleave_cli.render.text import printable, say
from cleave_cli.trained_model import Model, Seed, Step, Temperature, Tokens, TopP

if TYPE_CHECKING:
    from cleave.training.results.trained import TrainedModel
    from cleave.training.results.uses import Generation

_NEW: Final = "/new"  # what a user types to start over


def chat(
    model: Model,
    system: Annotated[str, Option(help="Instructions that precede the conversation.")] = "",
    tokens: Tokens = 400,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    step: Step = 0,
) -> None:
    """Answer what you type, with a run's model, adapters or a Hugging Face folder.

    The model sees the whole conversation. Without a chat template, it continues your text. Ctrl-C
    ends an answer, /new starts a new conversation, and Ctrl-D ends the command.

    Examples:

      cleave chat runs/20261121-101500

      cleave chat my-model --system 'Answer in one sentence.' --temperature 0.7
    """
    need_train_extra("cleave chat")
    from cleave.training.results.trained import open_trained
    from cleave.training.results.uses import Generation

    wanted = Generation("-", tokens=tokens, temperature=temperature, top_p=top_p, seed=seed)
    wanted.check()
    trained = open_trained(model, step)
    typed = sys.stdin.isatty()
    if typed:
        with suppress(ImportError):  # Windows has no readline, but edits lines anyway
            import readline  # noqa: F401  `input` then edits lines and keeps a history
        does = "answers" if trained.tokenizer.has_template else "continues text (no chat template)"
        say(f"{trained.title} {does}. {_NEW} starts over, Ctrl-D ends.")
    begin = [{"role": "system", "content": system}] if system else []
    messages = list(begin)
    while (text := _asked("> " if typed else "")) is not None:
        if text.strip() == _NEW:
            messages = list(begin)
        elif text.strip():
            try:
                answer = _answer(trained, wanted, messages, text)
            except UsageError as error:
                say(f"cleave: {error}; {_NEW} starts over")
                continue
            messages += [
                {"role": "user", "content": text},
                {"role": "assistant", "content": answer},
            ]
    if typed:
        typer.echo()


def _asked(prompt: str) -> str | None:
    """Return the next line that the user types; None at the end."""
    try:
        return input(prompt)
    except (EOFError, KeyboardInterrupt):
        return None
    except UnicodeDecodeError as error:
        raise UsageError("stdin is not UTF-8 text; convert it") from error


def _answer(
    trained: TrainedModel, wanted: Generation, messages: list[dict[str, str]], text: str
) -> str:
    """Print and return the model's answer to `text`, or its first part after Ctrl-C."""
    from msgspec.structs import replace

    from cleave.training.loop.records import TextRecord

    if trained.tokenizer.has_template:
        request = replace(wanted, prompt=text, chat=True, earlier=tuple(messages))
    else:
        before = [m["content"] + "\n" * (m["role"] == "assistant") for m in messages]
        request = replace(wanted, prompt="".join([*before, text]))
    parts: list[str] = []
    skip = not request.chat  # the first record is then the prompt

    def report(record: object) -> None:
        nonlocal skip
        if isinstance(record, TextRecord) and not skip:
            parts.append(record.text)
            typer.echo(printable(record.text), nl=False)
        skip = False

    with suppress(KeyboardInterrupt):
        request.run(trained, report, lambda: False)
    typer.echo()
    return "".join(parts)
