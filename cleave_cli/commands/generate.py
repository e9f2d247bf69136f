"""`cleave generate`: continue a text with a model."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from cleave.errors import UsageError
from cleave_cli.render.text import printable
from cleave_cli.trained_model import Devices, Model, Server, Step, use


def generate(
    model: Model,
    prompt: Annotated[str, typer.Option(help="The text; - to read it from stdin.")] = "-",
    chat: Annotated[
        bool, typer.Option("--chat", help="It is a question to a chat model; print the answer.")
    ] = False,
    tokens: Annotated[int, typer.Option(help="That are added at most.", min=1)] = 100,
    temperature: Annotated[
        float, typer.Option(help="0: always the likeliest token; higher: more varied.", min=0.0)
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option(help="Of the likeliest tokens that have this share together.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the choice of tokens.")] = 0,
    devices: Devices = 0,
    server: Server = "",
    step: Step = 0,
) -> None:
    """Print a text and what a model adds to it, as it comes.

    Examples:

      cleave generate runs/20261121-101500 --prompt 'def add(a, b):'

      cleave generate my-chat-model --chat --prompt 'What does os.walk do?'

      cleave generate my-model --temperature 0.8 --top-p 0.95 < prompt.txt

      cleave generate runs/20261121-101500 --prompt 'def add(' --server @operator-url
    """
    from cleave.training.results.uses import Generation, UseRequest

    try:
        text = sys.stdin.read() if prompt == "-" else prompt
    except UnicodeDecodeError as error:
        raise UsageError("what comes on stdin is not UTF-8 text; convert it") from error
    wanted = Generation(text, chat, tokens, temperature, top_p, seed)
    wanted.check()

    def report(record: dict[str, Any]) -> None:
        if record["event"] == "text":
            typer.echo(printable(record["text"]), nl=False)

    use(UseRequest(str(model), step, generate=wanted), devices, server, report)
    typer.echo()
