"""`cleave generate`: continue a prompt with a model."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer import Option

from cleave.errors import UsageError
from cleave_cli.render.text import printable
from cleave_cli.trained_model import (
    Devices,
    Model,
    Seed,
    Server,
    Step,
    Temperature,
    Tokens,
    TopP,
    use,
)


def generate(
    model: Model,
    prompt: Annotated[str, Option(help="The text; -: read it from stdin.")] = "-",
    chat: Annotated[bool, Option("--chat", help="The text is a question to a chat model.")] = False,
    tokens: Tokens = 100,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    devices: Devices = 0,
    server: Server = "",
    step: Step = 0,
) -> None:
    """Print a prompt and a model's continuation, token by token; with --chat, only the answer.

    Examples:

      cleave generate runs/20261121-101500 --prompt 'def add(a, b):'

      cleave generate my-chat-model --chat --prompt 'What does os.walk do?'

      cleave generate my-model --temperature 0.8 --top-p 0.95 < prompt.txt

      cleave generate runs/20261121-101500 --prompt 'def add(' --server @operator.url
    """
    from cleave.training.results.uses import Generation, UseRequest

    try:
        text = sys.stdin.read() if prompt == "-" else prompt
    except UnicodeDecodeError as error:
        raise UsageError("stdin is not UTF-8 text; convert it") from error
    wanted = Generation(text, chat, tokens=tokens, temperature=temperature, top_p=top_p, seed=seed)
    wanted.check()

    def report(record: dict[str, Any]) -> None:
        if record["event"] == "text":
            typer.echo(printable(record["text"]), nl=False)

    use(UseRequest(str(model), step, generate=wanted), devices, server, report)
    typer.echo()
